#include "longspan/ops/attend_fused.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/core/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

/// Cuts a line where one of its bounds stops or starts to move, so that inside
/// a part each of them is constant or rises with the query.
std::vector<KeyLines> straight_parts(const KeyLines& line) {
  const TokenRange all = line.queries;
  std::vector<int64_t> cuts{
      all.begin,
      std::clamp(line.begin_max - line.begin_shift + 1, all.begin, all.end),
      std::clamp(line.end_min - line.end_shift, all.begin, all.end), all.end};
  std::ranges::sort(cuts);
  std::vector<KeyLines> parts;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    if (cuts[i] == cuts[i + 1]) continue;
    parts.push_back(line);
    parts.back().queries = {cuts[i], cuts[i + 1]};
  }
  return parts;
}

bool is_causal(const FusedSegment& segment) {
  return segment.left < 0 && segment.right == 0;
}

/// Keys with one head for each query head, unless heads share them evenly,
/// which the kernel knows.
AttentionInputs with_even_heads(const AttentionInputs& in) {
  const int64_t heads = in.q.size(2);
  const bool even =
      in.head_offset == 0 && in.k.size(2) * in.heads_per_key_head == heads;
  if (even) return in;
  const at::Tensor which =
      at::arange(heads, at::TensorOptions(at::kLong).device(in.q.device()))
          .add_(in.head_offset)
          .floor_divide_(in.heads_per_key_head);
  AttentionInputs expanded = in;
  expanded.k = in.k.index_select(2, which);
  expanded.v = in.v.index_select(2, which);
  expanded.heads_per_key_head = 1;
  expanded.head_offset = 0;
  return expanded;
}

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
  const auto same = [](const FusedSegment& a, const FusedSegment& b) {
    return a.queries == b.queries && a.keys == b.keys && a.left == b.left &&
           a.right == b.right;
  };
  std::vector<Batch> made;
  const std::size_t each = segments.size() / static_cast<std::size_t>(rows);
  bool alike = segments.size() % static_cast<std::size_t>(rows) == 0;
  for (std::size_t i = each; alike && i < segments.size(); ++i) {
    alike = same(segments[i], segments[i - each]);
  }
  if (alike && each <= kFew) {
    for (std::size_t i = 0; i < each; ++i) {
      made.push_back({{segments[i]}, true});
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

/// The tokens of several segments of a row, [tokens, heads, channels]; a view
/// where they follow one another.
at::Tensor joined(const at::Tensor& tensor, const Batch& batch,
                  TokenRange FusedSegment::* side) {
  std::vector<TokenRange> ranges;
  for (const FusedSegment& segment : batch.segments) {
    append_range(ranges, segment.*side);
  }
  const at::Tensor row = tensor.select(0, batch.segments[0].row);
  std::vector<at::Tensor> pieces;
  for (TokenRange range : ranges) {
    pieces.push_back(row.narrow(0, range.begin, range.size()));
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces);
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

std::optional<int64_t> bound(int64_t keys) {
  return keys < 0 ? std::nullopt : std::optional<int64_t>(keys);
}

/// The window as flash takes it: -1 without a bound.
struct Window {
  bool causal;
  std::optional<int64_t> left, right;
  explicit Window(const FusedSegment& segment)
      : causal(is_causal(segment)),
        left(causal ? std::nullopt : bound(segment.left)),
        right(causal ? std::nullopt : bound(segment.right)) {
    if (left.has_value() != right.has_value()) {
      left = left.value_or(-1);
      right = right.value_or(-1);
    }
  }
};

}  // namespace

std::vector<FusedSegment> fused_segments(const KeyLines& line) {
  std::vector<FusedSegment> segments;
  for (const KeyLines& part : straight_parts(line)) {
    const int64_t first = part.queries.begin;
    const int64_t last = part.queries.end - 1;
    FusedSegment segment{part.row,
                         part.queries,
                         {part.keys_of(first).begin, part.keys_of(last).end}};
    // Query and key are counted from the ends of their runs.
    const int64_t diagonal = segment.keys.end - part.queries.end;
    if (part.keys_of(last).begin != segment.keys.begin) {
      segment.left = diagonal - part.begin_shift;
    }
    if (part.keys_of(first).end != segment.keys.end) {
      segment.right = part.end_shift - 1 - diagonal;
    }
    segments.push_back(segment);
  }
  return segments;
}

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

  /// Calls body(here, part) for each segment: where it lies in the tensors of
  /// all tokens, and in those of the call.
  template <class Body>
  void for_each_segment(TokenRange FusedSegment::* side,
                        const Body& body) const {
    int64_t at = 0;
    for (const FusedSegment& segment : batch.segments) {
      const TokenRange range = segment.*side;
      const auto here = [&](const at::Tensor& tensor) {
        return tokens(is_rows() ? tensor : tensor.narrow(0, segment.row, 1),
                      range);
      };
      const auto part = [&](const at::Tensor& tensor) {
        return is_rows() ? tensor
                         : tensor.narrow(0, at, range.size()).unsqueeze(0);
      };
      body(here, part);
      at += range.size();
    }
  }
};

}  // namespace

void attend_tiles_flash(const AttentionInputs& inputs,
                        std::span<const FusedSegment> segments,
                        PartialAttention& running) {
  const AttentionInputs in = with_even_heads(inputs);
  for (const Batch& batch : batches(segments, in.q.size(0))) {
    const FlashCall call(batch, in.q.device());
    const auto result = at::_flash_attention_forward(
        call.queries(in.q), call.keys(in.k), call.keys(in.v),
        call.query_offsets, call.key_offsets, call.longest_queries,
        call.longest_keys, 0.0, call.window.causal, false, in.scale,
        call.window.left, call.window.right);
    const at::Tensor& out = std::get<0>(result);
    const at::Tensor lse = call.heads_first(std::get<1>(result));
    call.for_each_segment(
        &FusedSegment::queries, [&](const auto& here, const auto& part) {
          PartialAttention before{here(running.out), here(running.lse)};
          before.add({part(out), part(lse)});
        });
  }
}

void attend_tiles_backward_flash(const AttentionInputs& inputs,
                                 std::span<const FusedSegment> segments,
                                 AttentionGradients& gradients) {
  const AttentionInputs in = with_even_heads(inputs);
  const bool expanded = in.k.size(2) != inputs.k.size(2);
  // Without dropout nobody looks at these.
  const at::Tensor no_random =
      at::zeros({2}, in.q.options().dtype(at::kUInt64));
  const at::Tensor nothing = at::empty({0}, in.q.options().dtype(at::kLong));
  const auto add_keys = [&](const at::Tensor& total, const at::Tensor& part) {
    if (!expanded) {
      total.add_(part);
      return;
    }
    // One head after another: the same sum in every run.
    for (int64_t head = 0; head < part.size(2); ++head) {
      total.select(2, (head + inputs.head_offset) / inputs.heads_per_key_head)
          .add_(part.select(2, head));
    }
  };
  for (const Batch& batch : batches(segments, in.q.size(0))) {
    const FlashCall call(batch, in.q.device());
    const auto found = at::_flash_attention_backward(
        call.queries(gradients.dout), call.queries(in.q), call.keys(in.k),
        call.keys(in.v), call.queries(gradients.out),
        call.heads_first(call.queries(gradients.lse)).contiguous(),
        call.query_offsets.value_or(at::Tensor()),
        call.key_offsets.value_or(at::Tensor()), call.longest_queries,
        call.longest_keys, 0.0, call.window.causal, no_random, nothing,
        in.scale, call.window.left, call.window.right);
    call.for_each_segment(&FusedSegment::queries,
                          [&](const auto& here, const auto& part) {
                            here(gradients.dq).add_(part(std::get<0>(found)));
                          });
    call.for_each_segment(
        &FusedSegment::keys, [&](const auto& here, const auto& part) {
          add_keys(here(gradients.dk), part(std::get<1>(found)));
          add_keys(here(gradients.dv), part(std::get<2>(found)));
        });
  }
}

}  // namespace longspan
