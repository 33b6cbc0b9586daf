#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/comm/group.h"

namespace longspan {

/// Differentiable collectives. Every rank of the group must call the same ones
/// in the same order, forward and backward.
///
/// x lies on any device and is not changed; sizes are along an axis, one for
/// each rank, equal on all ranks, and may be zero. Nothing is padded. Sums are
/// taken in the order of the ranks, in float32 for half types, so that they
/// repeat bit for bit. Each is also an operator torch.ops.longspan.<name> that
/// takes the group's name last. With one rank they return x itself (roll and
/// exchange_needed: where nothing moves).
///
///   collective             adjoint (what backward does)
///   all_gather_tokens      reduce_scatter_tokens
///   reduce_scatter_tokens  all_gather_tokens
///   all_to_all_heads       all_to_all_tokens
///   all_to_all_tokens      all_to_all_heads
///   rotate by hops         rotate by -hops
///   roll by shift          roll by -shift
///   exchange_needed        return_needed
///   return_needed          exchange_needed

/// [.., sizes[rank], ..] -> [.., sum of sizes, ..], in the order of the ranks.
at::Tensor all_gather_tokens(const at::Tensor& x, int64_t axis,
                             at::IntArrayRef sizes, const Group& group);

/// [.., sum of sizes, ..] -> [.., sizes[rank], ..]: this rank's part of the sum
/// over all ranks.
at::Tensor reduce_scatter_tokens(const at::Tensor& x, int64_t axis,
                                 at::IntArrayRef sizes, const Group& group);

/// This rank's tokens with all heads -> all tokens, in the order of the ranks,
/// with this rank's heads.
at::Tensor all_to_all_heads(const at::Tensor& x, int64_t token_axis,
                            int64_t head_axis, at::IntArrayRef token_sizes,
                            at::IntArrayRef head_sizes, const Group& group);

/// The inverse: all tokens with this rank's heads -> this rank's tokens with
/// all heads.
at::Tensor all_to_all_tokens(const at::Tensor& x, int64_t token_axis,
                             int64_t head_axis, at::IntArrayRef token_sizes,
                             at::IntArrayRef head_sizes, const Group& group);

/// The tensor of rank r goes to rank r + hops (around the end; hops may be
/// negative): a ring send and receive.
at::Tensor rotate(const at::Tensor& x, int64_t hops, int64_t axis,
                  at::IntArrayRef sizes, const Group& group);

/// rotate() for tensors that have one shape on all ranks.
at::Tensor rotate(const at::Tensor& x, int64_t hops, const Group& group);

/// Rolls the stream that the ranks hold as one run each: token t goes to token
/// t + shift, around the end. Only tokens that change their rank travel.
at::Tensor roll(const at::Tensor& x, int64_t axis, int64_t shift,
                at::IntArrayRef sizes, const Group& group);

/// Sends ranges of tokens to the ranks that need them (an all-to-all-v).
///
/// sends: int64 [n, 4] on the CPU, equal on all ranks; a row (from, to, begin,
/// length) sends the local tokens [begin, begin + length) of rank `from` to
/// rank `to`, which may be `from`, and a token may go to several ranks. The
/// result has the pieces for this rank, ordered by `from` and then by row.
/// As an operator it also takes the number of tokens of the result:
/// exchange_needed(x, axis, sends, received, group).
at::Tensor exchange_needed(const at::Tensor& x, int64_t axis,
                           const at::Tensor& sends, const Group& group);

/// The adjoint of exchange_needed: adds every piece to the local tokens that it
/// came from. This rank has `tokens` of them.
at::Tensor return_needed(const at::Tensor& x, int64_t axis,
                         const at::Tensor& sends, int64_t tokens,
                         const Group& group);

}  // namespace longspan
