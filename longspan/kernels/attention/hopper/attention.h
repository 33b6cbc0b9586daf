#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/hopper/work_table.h"

namespace longspan::hopper {

/// Dense attention, as ../attention.h promises it, on a Hopper device:
/// bfloat16 or float16, any lines, up to 512 channels. The lines travel as they
/// are: no mask, no launch for each document, nothing read back. Nothing is
/// allocated, the host never waits and a graph may capture it. `stream` is a
/// cudaStream_t of the device in use.
///
/// The same bits every time, unless dq may come in any order; and for documents
/// of at least 128 tokens, whatever other documents are in the call.

/// Why the forward kernel cannot take it, or nothing.
std::optional<std::string> why_not_attention(const AttentionArgs& args);

/// Where the answers go.
struct DenseForwardArgs : AttentionForwardArgs {
  /// What `out` is made of: the type of q, or float32.
  ElementType out_type = ElementType::float32;
  /// The out of earlier keys, float32, whose lse is in `lse`; without data
  /// there are none. Unless it is `out` itself, which is then gone on in place,
  /// every query is written, also those that see nothing.
  TokenArray<const void*> before;
  const float* sink = nullptr;  // [heads]; it is part of out, not of lse
  bool is_in_place() const { return out.data == before.data; }
  /// Documents whose queries see at most so many keys are for a kernel of
  /// their own, up to 128 channels. Unset: where it was measured to be faster.
  std::optional<int64_t> narrow_keys;
};

/// The blocks of queries for such a call: of documents whose queries see few
/// keys, in blocks of `packed_heads` heads and fewer queries, and of others.
struct ForwardWork {
  int packed_heads = 1;
  WorkTable narrow, wide;
  std::size_t bytes() const { return narrow.bytes() + wide.bytes(); }
};
ForwardWork forward_work(const DenseForwardArgs& args);

/// `memory` is work.bytes() long, on the device, and aligned to 16.
void attention_forward(const DenseForwardArgs& args, const ForwardWork& work,
                       void* memory, void* stream);

/// Why the backward kernel cannot take it, or nothing.
std::optional<std::string> why_not_attention_backward(
    const AttentionArgs& args);

/// Where derivatives go: those of every query and key are written, also of
/// those that see or are seen by nobody; or, in float32, added to what is
/// there. In float16, derivatives of scores beyond 65504 are infinite.
struct DenseBackwardArgs : AttentionBackwardArgs {
  ElementType dq_type = ElementType::float32;  // or the type of q
  ElementType dk_type = ElementType::float32;  // of dk and dv
  bool dq_adds = false, dk_adds = false;
  /// Whether sums in device memory may come in the order in which blocks of
  /// keys finish, other bits in every run; else each waits for its turn.
  bool in_any_order = false;
  /// Blocks of keys that see at least so many tiles of 64 queries are dealt
  /// head by head where dq is added up and heads share keys: dk and dv are then
  /// added up too. That costs 2 tiles of work.
  int tiles_apart = 32;
};

/// Whether blocks of keys add to dq, which is then floats and dq_adds: up to
/// 128 channels.
bool adds_up_queries(const AttentionArgs& args);

/// The blocks of keys and of queries for such a call.
struct BackwardWork {
  KeyWorkTable keys;
  WorkTable queries;
  /// How many of the first blocks of keys are dealt head by head. If any, dk
  /// and dv must be added to (dk_adds).
  int apart = 0;
  /// Numbers that tell whose turn it is: of each head and block of keys, and of
  /// each key head and block that is dealt head by head.
  std::size_t added = 0, heads_added = 0;
  std::size_t table_bytes() const { return keys.bytes() + queries.bytes(); }
  std::size_t bytes() const {
    return table_bytes() + (added + heads_added) * sizeof(int32_t);
  }
};
BackwardWork backward_work(const DenseBackwardArgs& args);

/// `memory` is work.bytes() long, on the device, and aligned to 16.
void attention_backward(const DenseBackwardArgs& args, const BackwardWork& work,
                        void* memory, void* stream);

}  // namespace longspan::hopper
