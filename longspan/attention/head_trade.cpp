#include "longspan/attention/detail/head_trade.h"

#include <ATen/ATen.h>

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

std::vector<Piece> HeadTrade::pieces_of(Kind kind) const {
  std::vector<Trader> team;
  int64_t token = 0;
  for (int member = 0; member < plan_.strategy().head_ranks; ++member) {
    const int64_t held =
        plan_.member_tokens()[static_cast<std::size_t>(member)];
    team.push_back({.rank = plan_.first_of_team() + member,
                    .gets = range(share_of(member), kind),
                    .puts = {token, token + held}});
    token += held;
  }
  return trade_pieces(/*split=*/2, /*join=*/0, team, group_.rank());
}

std::vector<at::Tensor> HeadTrade::to_heads(const std::vector<Part>& parts,
                                            const std::string& purpose) const {
  std::vector<at::Tensor> traded;
  if (!is_needed()) {
    for (const Part& part : parts) traded.push_back(part.tensor);
    return traded;
  }
  int64_t all = 0;
  for (const int64_t held : plan_.member_tokens()) all += held;
  std::vector<Cargo> cargo;
  for (const auto& [x, kind] : parts) {
    const int64_t heads = range(mine_, kind).size();
    cargo.push_back({.x = x,
                     .pieces = pieces_of(kind),
                     .target_sizes = {all, x.size(1), heads, x.size(3)}});
  }
  return carry(cargo, group_, {purpose, plan_.fingerprint()});
}

std::vector<at::Tensor> HeadTrade::to_tokens(const std::vector<Part>& parts,
                                             const std::string& purpose) const {
  std::vector<at::Tensor> traded;
  if (!is_needed()) {
    for (const Part& part : parts) traded.push_back(part.tensor);
    return traded;
  }
  const int64_t own =
      plan_.member_tokens()[static_cast<std::size_t>(plan_.member())];
  std::vector<Cargo> cargo;
  for (const auto& [x, kind] : parts) {
    // A head is of one member; a key head may be of several.
    cargo.push_back(
        {.x = x,
         .pieces = reversed(pieces_of(kind)),
         .target_sizes = {own, x.size(1), count(kind), x.size(3)},
         .meeting = kind == Kind::heads ? Meeting::never : Meeting::add});
  }
  return carry(cargo, group_, {purpose, plan_.fingerprint()});
}

}  // namespace longspan
