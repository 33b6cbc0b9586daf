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

TokenRange HeadTrade::tokens_of(int member) const {
  TokenRange range;
  for (int m = 0; m <= member; ++m) {
    const int64_t held = plan_.member_tokens()[static_cast<std::size_t>(m)];
    range = {range.end, range.end + held};
  }
  return range;
}

void HeadTrade::trade(const std::vector<Part>& parts, const Piece& given,
                      const Piece& target, bool adds,
                      const std::string& purpose) const {
  const int members = plan_.strategy().head_ranks;
  std::vector<Parcel> sends, receives;
  for (int m = 0; m < members; ++m) {
    if (m == plan_.member()) continue;
    std::vector<at::Tensor> message;
    int64_t expected = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      message.push_back(given(i, m).reshape({-1}));
      expected += target(i, m).numel();
    }
    sends.push_back({plan_.first_of_team() + m, at::cat(message)});
    receives.push_back({plan_.first_of_team() + m,
                        at::empty({expected}, parts[0].tensor.options())});
  }
  start_exchange(group_, sends, receives, purpose, plan_.fingerprint()).wait();
  std::size_t next = 0;
  for (int m = 0; m < members; ++m) {
    const bool is_own = m == plan_.member();
    const at::Tensor message = is_own ? at::Tensor() : receives[next++].tensor;
    int64_t at = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const at::Tensor to = target(i, m);
      const at::Tensor from =
          is_own ? given(i, m)
                 : message.narrow(0, at, to.numel()).view(to.sizes());
      at += is_own ? 0 : to.numel();
      adds ? to.add_(from) : to.copy_(from);
    }
  }
}

std::vector<at::Tensor> HeadTrade::to_heads(const std::vector<Part>& parts,
                                            const std::string& purpose) const {
  std::vector<at::Tensor> traded;
  if (!is_needed()) {
    for (const Part& part : parts) traded.push_back(part.tensor);
    return traded;
  }
  const int64_t all = tokens_of(plan_.strategy().head_ranks - 1).end;
  for (const Part& part : parts) {
    const TokenRange heads = range(mine_, part.kind);
    traded.push_back(
        at::empty({all, part.tensor.size(1), heads.size(), part.tensor.size(3)},
                  part.tensor.options()));
  }
  trade(
      parts,
      [&](std::size_t i, int m) {
        const TokenRange heads = range(share_of(m), parts[i].kind);
        return parts[i].tensor.narrow(2, heads.begin, heads.size());
      },
      [&](std::size_t i, int m) {
        const TokenRange tokens = tokens_of(m);
        return traded[i].narrow(0, tokens.begin, tokens.size());
      },
      /*adds=*/false, purpose);
  return traded;
}

std::vector<at::Tensor> HeadTrade::to_tokens(const std::vector<Part>& parts,
                                             const std::string& purpose) const {
  std::vector<at::Tensor> traded;
  if (!is_needed()) {
    for (const Part& part : parts) traded.push_back(part.tensor);
    return traded;
  }
  const int64_t own = tokens_of(plan_.member()).size();
  for (const Part& part : parts) {
    traded.push_back(at::zeros(
        {own, part.tensor.size(1), count(part.kind), part.tensor.size(3)},
        part.tensor.options()));
  }
  trade(
      parts,
      [&](std::size_t i, int m) {
        const TokenRange tokens = tokens_of(m);
        return parts[i].tensor.narrow(0, tokens.begin, tokens.size());
      },
      [&](std::size_t i, int m) {
        const TokenRange heads = range(share_of(m), parts[i].kind);
        return traded[i].narrow(2, heads.begin, heads.size());
      },
      /*adds=*/true, purpose);
  return traded;
}

}  // namespace longspan
