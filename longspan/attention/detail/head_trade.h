#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "longspan/comm/detail/carry.h"
#include "longspan/comm/group.h"
#include "longspan/core/token_range.h"
#include "longspan/plan/plan.h"

namespace longspan {

/// Trades tokens for heads inside a team (the all-to-all of Ulysses), and back:
/// before, a member has its own tokens with all heads; after, all tokens of the
/// team (member by member) with its share of the heads.
///
/// Tensors are [tokens, rows, heads, channels] of one dtype. In a team of one
/// nothing moves.
class HeadTrade {
 public:
  HeadTrade(const Plan& plan, const Group& group, int64_t heads,
            int64_t key_heads);

  enum class Kind { heads, key_heads };
  struct Part {
    at::Tensor tensor;
    Kind kind;
  };

  const HeadShare& mine() const { return mine_; }
  bool is_needed() const { return plan_.strategy().head_ranks > 1; }

  /// All parts in one message to each member. Key heads that several members
  /// use go to each of them.
  std::vector<at::Tensor> to_heads(const std::vector<Part>& parts,
                                   const std::string& purpose) const;

  /// The adjoint: what members computed for the same key head of a token is
  /// summed, in member order and in the accumulation type.
  std::vector<at::Tensor> to_tokens(const std::vector<Part>& parts,
                                    const std::string& purpose) const;

 private:
  /// What to_heads() sends of a kind of heads.
  std::vector<Piece> pieces_of(Kind kind) const;

  HeadShare share_of(int member) const;
  int64_t count(Kind kind) const;
  TokenRange range(const HeadShare& share, Kind kind) const;

  const Plan& plan_;
  const Group& group_;
  int64_t heads_, key_heads_;
  HeadShare mine_;
};

}  // namespace longspan
