#include "longspan/ops/attend_flash.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/ops/even_heads.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

/// Segments that one call can take together.
struct Batch {
  std::vector<FusedSegment> segments;  // of one row, or one of every row
  bool every_row = false;
};

/// Few segments that all rows share go as rows; many of one row as sequences of
/// different lengths.
std::vector<Batch> batches(std::span<const FusedSegment> segments,
                           int64_t rows) {
  constexpr std::size_t kFew = 4;
  std::vector<Batch> made;
  const std::size_t each = segments_of_each_row(segments, rows);
  if (each > 0 && each <= kFew) {
    for (const FusedSegment& segment : segments.first(each)) {
      made.push_back({{segment}, true});
    }
    return made;
  }
  for (const FusedSegment& segment : segments) {
    const auto fits = [&](const Batch& batch) {
      const FusedSegment& first = batch.segments.front();
      const FusedSegment& last = batch.segments.back();
      // A query may be in several segments; in one call it must not.
      return first.row == segment.row && first.left == segment.left &&
             first.right == segment.right &&
             last.queries.end <= segment.queries.begin &&
             last.keys.end <= segment.keys.begin;
    };
    auto batch = std::ranges::find_if(made, fits);
    if (batch == made.end()) batch = made.insert(made.end(), Batch{});
    batch->segments.push_back(segment);
  }
  return made;
}

at::Tensor tokens(const at::Tensor& tensor, TokenRange range) {
  return tensor.narrow(1, range.begin, range.size());
}

/// The tokens of several segments of a row, those that follow one another
/// together.
std::vector<TokenRange> runs(const Batch& batch,
                             TokenRange FusedSegment::* side) {
  std::vector<TokenRange> ranges;
  for (const FusedSegment& segment : batch.segments) {
    append_range(ranges, segment.*side);
  }
  return ranges;
}

/// The tokens of a batch cut out of a tensor, [tokens, heads, channels]; a view
/// where they follow one another.
at::Tensor joined(const at::Tensor& tensor, const Batch& batch,
                  TokenRange FusedSegment::* side) {
  return join_ranges(tensor.select(0, batch.segments[0].row),
                     runs(batch, side));
}

/// Offsets of the segments, on the device, and the longest.
struct Offsets {
  at::Tensor offsets;
  int64_t longest = 0;
};

Offsets offsets_of(const Batch& batch, TokenRange FusedSegment::* side,
                   at::Device device) {
  std::vector<int32_t> numbers{0};
  Offsets made;
  for (const FusedSegment& segment : batch.segments) {
    const int64_t size = (segment.*side).size();
    numbers.push_back(static_cast<int32_t>(numbers.back() + size));
    made.longest = std::max(made.longest, size);
  }
  made.offsets = at::tensor(numbers, at::TensorOptions(at::kInt))
                     .to(device, /*non_blocking=*/true);
  return made;
}

/// The window as flash takes it: -1 without a bound, and both without where it
/// is causal, which flash is told by itself.
struct Window {
  bool causal;
  int64_t left, right;
  explicit Window(const FusedSegment& segment)
      : causal(segment.is_causal()),
        left(causal ? -1 : std::max<int64_t>(segment.left, -1)),
        right(causal ? -1 : std::max<int64_t>(segment.right, -1)) {}
};

}  // namespace

std::optional<std::string> why_not_flash(const AttentionInputs& in) {
  const auto dtype = in.q.scalar_type();
  const int64_t dim = in.q.size(3);
  if (!in.q.is_cuda()) return "the tensors are not on CUDA";
  if (in.softcap > 0) return "it has no softcap";
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    return "it has no float32 and no float64";
  }
  if (dim != in.v.size(3)) {
    return join("keys have ", dim, " channels but values ", in.v.size(3));
  }
  if (dim > 256 || dim % 8 != 0) {
    return join(dim, " channels; it has multiples of 8 up to 256");
  }
  return std::nullopt;
}

namespace {

/// The tensors of one call: those of one segment in all rows or one, as
/// [rows, tokens, heads, channels], or several segments of a row end to end, as
/// [tokens, heads, channels] with offsets.
struct FlashCall {
  const Batch& batch;
  Window window;
  std::optional<at::Tensor> query_offsets, key_offsets;
  int64_t longest_queries, longest_keys;

  FlashCall(const Batch& of, at::Device device)
      : batch(of), window(of.segments[0]) {
    if (is_rows()) {
      longest_queries = batch.segments[0].queries.size();
      longest_keys = batch.segments[0].keys.size();
      return;
    }
    const auto queries = offsets_of(batch, &FusedSegment::queries, device);
    const auto keys = offsets_of(batch, &FusedSegment::keys, device);
    longest_queries = queries.longest;
    longest_keys = keys.longest;
    query_offsets = queries.offsets;
    key_offsets = keys.offsets;
  }

  bool is_rows() const { return batch.every_row; }

  at::Tensor queries(const at::Tensor& tensor) const {
    return is_rows() ? tokens(tensor, batch.segments[0].queries)
                     : joined(tensor, batch, &FusedSegment::queries);
  }
  at::Tensor keys(const at::Tensor& tensor) const {
    return is_rows() ? tokens(tensor, batch.segments[0].keys)
                     : joined(tensor, batch, &FusedSegment::keys);
  }

  /// [rows, tokens, heads] or [tokens, heads] <-> heads before tokens.
  at::Tensor heads_first(const at::Tensor& lse) const {
    return lse.transpose(-2, -1);
  }

  /// Calls body(part, row, token) for each run of tokens that follow one
  /// another, with what a result of the call says about them, as [rows, tokens,
  /// ...], and where they lie in the tensors of all tokens.
  template <class Body>
  void for_each_run(TokenRange FusedSegment::* side, const at::Tensor& result,
                    const Body& body) const {
    if (is_rows()) {
      body(result, 0, (batch.segments[0].*side).begin);
      return;
    }
    int64_t at = 0;
    for (TokenRange range : runs(batch, side)) {
      body(result.narrow(0, at, range.size()).unsqueeze(0),
           batch.segments[0].row, range.begin);
      at += range.size();
    }
  }
};

}  // namespace

void attend_tiles_flash(const AttentionInputs& inputs,
                        std::span<const FusedSegment> segments,
                        Accumulator& running) {
  const EvenHeads even(inputs);
  const AttentionInputs& in = even.inputs();
  for (const Batch& batch : batches(segments, in.q.size(0))) {
    const FlashCall call(batch, in.q.device());
    const auto result = at::_flash_attention_forward(
        call.queries(in.q), call.keys(in.k), call.keys(in.v),
        call.query_offsets, call.key_offsets, call.longest_queries,
        call.longest_keys, 0.0, call.window.causal, false, in.scale,
        call.window.left, call.window.right);
    const at::Tensor lse = call.heads_first(std::get<1>(result));
    int64_t at = 0;
    call.for_each_run(&FusedSegment::queries, std::get<0>(result),
                      [&](const at::Tensor& out, int64_t row, int64_t token) {
                        const at::Tensor part =
                            call.is_rows()
                                ? lse
                                : lse.narrow(0, at, out.size(1)).unsqueeze(0);
                        at += out.size(1);
                        running.add({out, part}, row, token);
                      });
  }
}

void attend_tiles_backward_flash(const AttentionInputs& inputs,
                                 std::span<const FusedSegment> segments,
                                 const AttentionAnswer& answer,
                                 AttentionGradients& gradients) {
  const EvenHeads even(inputs);
  const AttentionInputs& in = even.inputs();
  // Without dropout nobody looks at these.
  const at::Tensor no_random =
      at::zeros({2}, in.q.options().dtype(at::kUInt64));
  const at::Tensor nothing = at::empty({0}, in.q.options().dtype(at::kLong));
  for (const Batch& batch : batches(segments, in.q.size(0))) {
    const FlashCall call(batch, in.q.device());
    const auto found = at::_flash_attention_backward(
        call.queries(answer.dout), call.queries(in.q), call.keys(in.k),
        call.keys(in.v), call.queries(answer.out),
        call.heads_first(call.queries(answer.lse)).contiguous(),
        call.query_offsets.value_or(at::Tensor()),
        call.key_offsets.value_or(at::Tensor()), call.longest_queries,
        call.longest_keys, 0.0, call.window.causal, no_random, nothing,
        in.scale, call.window.left, call.window.right);
    call.for_each_run(&FusedSegment::queries, std::get<0>(found),
                      [&](const at::Tensor& dq, int64_t row, int64_t token) {
                        gradients.dq.add({dq, {}}, row, token);
                      });
    const auto add_keys = [&](Accumulator& total, const at::Tensor& result) {
      call.for_each_run(
          &FusedSegment::keys, result,
          [&](const at::Tensor& part, int64_t row, int64_t token) {
            even.add_to_key_heads(total, part, row, token);
          });
    };
    add_keys(gradients.dk, std::get<1>(found));
    add_keys(gradients.dv, std::get<2>(found));
  }
}

}  // namespace longspan
