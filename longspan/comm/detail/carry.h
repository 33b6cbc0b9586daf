#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/core/token_range.h"

namespace longspan {

/// A part of a tensor along one axis: a range, or listed places, none twice.
struct Part {
  int64_t axis = 0;
  int64_t begin = 0;
  int64_t length = 0;
  at::Tensor places =
      {};  ///< int32 or int64 on the tensor's device, or nothing
};

/// What goes from a part of one rank's tensor to a part of another's.
struct Piece {
  int from = 0;
  int to = 0;
  Part source;
  Part target;
};

/// Whether pieces that meet in one place are added, or no two ever meet.
enum class Meeting { never, add };

/// One tensor, where its pieces go, and the shape of what they make there.
///
/// The list needs only the pieces of this rank, ordered by `from`; between two
/// ranks both sides list them in the same order. The sender of a piece need not
/// know its target, nor the receiver its source.
struct Cargo {
  at::Tensor x;
  std::vector<Piece> pieces;
  std::vector<int64_t> target_sizes;
  Meeting meeting = Meeting::never;
};

/// What an exchange is for.
struct Errand {
  std::string purpose;  ///< for messages: "selected attention forward, keys"
  uint64_t common = 0;  ///< ranks that differ in it never meet, as over gloo
};

/// Every collective and every trade of a strategy calls this with its own list
/// of pieces. All tensors travel in one exchange: tensors of one type share a
/// message to each peer. Places that no piece reaches are zero where pieces
/// add, and undefined where they do not. Sums are taken in the order of the
/// list, in float32 for half types.
std::vector<at::Tensor> carry(const std::vector<Cargo>& cargo,
                              const Group& group, const Errand& errand);

at::Tensor carry(const Cargo& cargo, const Group& group, const Errand& errand);

// ---- Lists of pieces, those of rank `me`.

/// An all-gather: every rank's whole tensor, of the given sizes along an axis,
/// goes to every rank, which puts them in the order of the ranks.
std::vector<Piece> gather_pieces(int64_t axis, at::IntArrayRef sizes, int me);

/// A rank that takes part in a trade: the part that it gets of every tensor,
/// and where the others put their part of its own.
struct Trader {
  int rank = 0;
  TokenRange gets;
  TokenRange puts;
};

/// All to all: what is whole along `split` becomes whole along `join`. Traders
/// are in the order of their ranks, and may be some of the group's only.
std::vector<Piece> trade_pieces(int64_t split, int64_t join,
                                const std::vector<Trader>& traders, int me);

/// The pieces of the adjoint: each goes back to where it came from.
std::vector<Piece> reversed(const std::vector<Piece>& pieces);

// ---- Collectives below autograd, for operators and strategies.

/// all_gather_tokens without a derivative.
at::Tensor gather_tokens(const at::Tensor& x, int64_t axis,
                         at::IntArrayRef sizes, const Group& group,
                         const Errand& errand);

/// reduce_scatter_tokens, its adjoint, without a derivative.
at::Tensor scatter_tokens(const at::Tensor& x, int64_t axis,
                          at::IntArrayRef sizes, const Group& group,
                          const Errand& errand);

}  // namespace longspan
