#include "longspan/attention/head_trade.h"

#include <ATen/ATen.h>

#include "longspan/comm/exchange.h"

namespace longspan {

HeadTrade::HeadTrade(const Plan& plan, const Group& group, int64_t heads,
                     int64_t key_heads)
    : plan_(plan), group_(group), heads_(heads), key_heads_(key_heads) {
  mine_ = share_of(plan.member());
}

HeadShare HeadTrade::share_of(int member) const {
  return HeadShare::of(heads_, key_heads_, member, plan_.strategy().head_ranks);
}

int64_t HeadTrade::count(Kind kind) const {
  return kind == Kind::heads ? heads_ : key_heads_;
}

TokenRange HeadTrade::range(const HeadShare& share, Kind kind) const {
  return kind == Kind::heads ? share.heads : share.key_heads;
}

std::vector<at::Tensor> HeadTrade::to_heads(const std::vector<Part>& parts,
                                            const std::string& purpose) const {
  std::vector<at::Tensor> traded;
  if (!is_needed()) {
    for (const Part& part : parts) traded.push_back(part.tensor);
    return traded;
  }
  const auto& tokens = plan_.member_tokens();
  const int members = plan_.strategy().head_ranks;
  std::vector<Parcel> sends, receives;
  for (int m = 0; m < members; ++m) {
    if (m == plan_.member()) continue;
    const HeadShare theirs = share_of(m);
    std::vector<at::Tensor> message;
    int64_t expected = 0;
    for (const Part& part : parts) {
      const TokenRange heads = range(theirs, part.kind);
      message.push_back(
          part.tensor.narrow(2, heads.begin, heads.size()).reshape({-1}));
      expected += tokens[static_cast<std::size_t>(m)] * part.tensor.size(1) *
                  range(mine_, part.kind).size() * part.tensor.size(3);
    }
    sends.push_back({plan_.first_of_team() + m, at::cat(message)});
    receives.push_back({plan_.first_of_team() + m,
                        at::empty({expected}, parts[0].tensor.options())});
  }
  Transfer transfer =
      start_exchange(group_, sends, receives, purpose, plan_.fingerprint());
  int64_t all = 0;
  for (int64_t held : tokens) all += held;
  for (const Part& part : parts) {
    const TokenRange heads = range(mine_, part.kind);
    traded.push_back(
        at::empty({all, part.tensor.size(1), heads.size(), part.tensor.size(3)},
                  part.tensor.options()));
  }
  transfer.wait();
  int64_t first = 0;
  std::size_t next = 0;
  for (int m = 0; m < members; ++m) {
    const int64_t held = tokens[static_cast<std::size_t>(m)];
    int64_t at = 0;
    const bool is_own = m == plan_.member();
    const at::Tensor message = is_own ? at::Tensor() : receives[next++].tensor;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      at::Tensor target = traded[i].narrow(0, first, held);
      const TokenRange heads = range(mine_, parts[i].kind);
      if (is_own) {
        target.copy_(parts[i].tensor.narrow(2, heads.begin, heads.size()));
      } else {
        target.copy_(message.narrow(0, at, target.numel()).view_as(target));
        at += target.numel();
      }
    }
    first += held;
  }
  return traded;
}

std::vector<at::Tensor> HeadTrade::to_tokens(const std::vector<Part>& parts,
                                             const std::string& purpose) const {
  std::vector<at::Tensor> traded;
  if (!is_needed()) {
    for (const Part& part : parts) traded.push_back(part.tensor);
    return traded;
  }
  const auto& tokens = plan_.member_tokens();
  const int members = plan_.strategy().head_ranks;
  const int64_t own = tokens[static_cast<std::size_t>(plan_.member())];
  std::vector<Parcel> sends, receives;
  int64_t first = 0;
  int64_t own_first = 0;
  for (int m = 0; m < members; ++m) {
    const int64_t held = tokens[static_cast<std::size_t>(m)];
    if (m == plan_.member()) {
      own_first = first;
    } else {
      const HeadShare theirs = share_of(m);
      std::vector<at::Tensor> message;
      int64_t expected = 0;
      for (const Part& part : parts) {
        message.push_back(part.tensor.narrow(0, first, held).reshape({-1}));
        expected += own * part.tensor.size(1) *
                    range(theirs, part.kind).size() * part.tensor.size(3);
      }
      sends.push_back({plan_.first_of_team() + m, at::cat(message)});
      receives.push_back({plan_.first_of_team() + m,
                          at::empty({expected}, parts[0].tensor.options())});
    }
    first += held;
  }
  Transfer transfer =
      start_exchange(group_, sends, receives, purpose, plan_.fingerprint());
  for (const Part& part : parts) {
    traded.push_back(at::zeros(
        {own, part.tensor.size(1), count(part.kind), part.tensor.size(3)},
        part.tensor.options()));
  }
  transfer.wait();
  std::size_t next = 0;
  for (int m = 0; m < members; ++m) {
    const HeadShare theirs = share_of(m);
    const bool is_own = m == plan_.member();
    const at::Tensor message = is_own ? at::Tensor() : receives[next++].tensor;
    int64_t at = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const TokenRange heads = range(theirs, parts[i].kind);
      const at::Tensor target = traded[i].narrow(2, heads.begin, heads.size());
      if (is_own) {
        target.add_(parts[i].tensor.narrow(0, own_first, own));
      } else {
        target.add_(message.narrow(0, at, target.numel()).view(target.sizes()));
        at += target.numel();
      }
    }
  }
  return traded;
}

}  // namespace longspan
