#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "longspan/core/token_range.h"
#include "longspan/ops/fold.h"
#include "longspan/ops/partial_attention.h"

namespace longspan {

enum class MemoryOrder { tokens_first, heads_first };

/// The running total of parts: attention over different keys, merged by its
/// log-sum-exp, or gradients, added up. [rows, tokens, heads, channels].
///
/// On CUDA the cost is memory traffic, so passes are few: nothing is filled
/// with zeros first, some parts wait and are folded together, the last ones
/// straight into the result, and a single part that covers everything is the
/// result. Sums have the accumulation type and are made when they are needed.
/// Parts are added in the order of the calls: the same bits in every run.
class Accumulator {
 public:
  enum class Kind { attention, sum };

  /// Empty. `options` tell the accumulation type and the device.
  Accumulator(Kind kind, at::IntArrayRef sizes,
              const at::TensorOptions& options,
              MemoryOrder order = MemoryOrder::tokens_first);

  /// An empty sum that will be kept in `memory`, whatever that holds now.
  /// Tokens outside of `wanted` will not be read, so their memory may stay as
  /// it is.
  static Accumulator sum_in(at::Tensor memory, TokenRange wanted);

  /// Takes a part in any floating type: about the tokens from `token` on, of
  /// the rows from `row` on. Nobody may write to it any more. Gradients have
  /// no lse.
  void add(PartialAttention part, int64_t row = 0, int64_t token = 0);

  /// Memory for a part about all tokens, in the order asked for: in this type,
  /// or, for a first part where sum_in() was told where the sum is to be, that
  /// memory. add() takes it once it is filled.
  PartialAttention room(at::ScalarType dtype) const;

  /// Whether further parts come after the next one.
  void expect_more(bool more) { expects_more_ = more; }

  /// What a kernel is given that takes the total along, of attention.
  struct Turn {
    PartialAttention before;  ///< the total so far; undefined: no part came
    /// Where the total goes. Unless this is the last turn it is `before`, or
    /// memory where every token must be written; on the last one every token
    /// of memory of its own, with the lse that is in `before`.
    PartialAttention total;
    at::Tensor sink;  ///< to be in total.out, not in its lse; undefined: none
  };
  /// On the last turn, total.out has this type.
  Turn begin_turn(at::ScalarType dtype);
  void end_turn(Turn turn);

  /// A logit without a value for each head (attention sink), floats, that the
  /// result is to include. The last turn sees to it; without one, the caller of
  /// finish() must.
  void ask_for_sink(at::Tensor sink) { asked_sink_ = std::move(sink); }
  bool has_sink() const { return has_sink_; }

  /// The total so far, for callers that fold in place: the accumulation type,
  /// 0 and -inf where no part has come. `lse` is undefined for a sum.
  PartialAttention& sums();

  /// The result, its output in this type; nothing may be added after it. Memory
  /// lies in the order asked for, unless a single part was all.
  PartialAttention finish(at::ScalarType dtype);

 private:
  at::ScalarType type_of_sums() const;
  PartialAttention empty(at::ScalarType dtype) const;
  TokenRange reach_of_waiting() const;
  void fold_waiting();
  void forget_waiting();

  Kind kind_;
  std::vector<int64_t> sizes_;
  at::TensorOptions options_;
  MemoryOrder order_;
  at::Tensor memory_;
  TokenRange wanted_;
  std::optional<PartialAttention> sums_;
  std::vector<PlacedPart> waiting_;
  int64_t waiting_bytes_ = 0;
  bool expects_more_ = false;
  at::Tensor asked_sink_;
  bool has_sink_ = false;
};

}  // namespace longspan
