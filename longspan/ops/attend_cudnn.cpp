#include "longspan/ops/attend_cudnn.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/common/device.h"
#include "longspan/ops/even_heads.h"

namespace longspan {

namespace {

/// One call: a rectangle, or a square with the keys up to the diagonal, in
/// rows [row, row + rows).
struct CudnnCall {
  int64_t row, rows;
  TokenRange queries, keys;
  bool causal;

  /// As cuDNN takes it: [rows, heads, tokens, ...].
  at::Tensor heads_first(const at::Tensor& tensor, TokenRange tokens) const {
    return tensor.narrow(0, row, rows)
        .narrow(1, tokens.begin, tokens.size())
        .transpose(1, 2);
  }
};

/// A causal segment with more keys than queries is a rectangle and a square.
void append_calls(std::vector<CudnnCall>& calls, const FusedSegment& segment,
                  int64_t row, int64_t rows) {
  TokenRange square = segment.keys;
  if (segment.is_causal()) {
    square.begin = segment.keys.end - segment.queries.size();
    if (square.begin > segment.keys.begin) {
      calls.push_back({row,
                       rows,
                       segment.queries,
                       {segment.keys.begin, square.begin},
                       false});
    }
  }
  calls.push_back({row, rows, segment.queries, square, segment.is_causal()});
}

std::vector<CudnnCall> calls_of(std::span<const FusedSegment> segments,
                                int64_t rows) {
  std::vector<CudnnCall> calls;
  if (const std::size_t each = segments_of_each_row(segments, rows)) {
    for (const FusedSegment& segment : segments.first(each)) {
      append_calls(calls, segment, 0, rows);
    }
  } else {
    for (const FusedSegment& segment : segments) {
      append_calls(calls, segment, segment.row, 1);
    }
  }
  return calls;
}

/// cuDNN reads 16 bytes at a time, and does not say so when it cannot.
bool is_aligned(const at::Tensor& tensor) {
  bool all = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    all = all && (tensor.size(i) == 1 || tensor.stride(i) % 8 == 0);
  }
  return all && tensor.stride(-1) == 1;
}

at::Tensor aligned(const at::Tensor& tensor) {
  return is_aligned(tensor) ? tensor
                            : tensor.clone(at::MemoryFormat::Contiguous);
}

/// Whether lengths are such that the shape will come again.
bool is_round(int64_t tokens) {
  constexpr int64_t kMultiple = 128;
  return tokens >= kLeastTokensOfCudnn && tokens % kMultiple == 0;
}

}  // namespace

std::optional<std::string> why_not_cudnn(const AttentionInputs& in) {
  if (!in.q.is_cuda()) return "the tensors are not on CUDA";
  if (in.softcap > 0) return "it has no softcap";
  const auto dtype = in.q.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    return "it has no float32 and no float64";
  }
  const int64_t dim = in.q.size(3), value_dim = in.v.size(3);
  const bool usual =
      (dim <= 128 && value_dim <= 128) || (dim == 256 && value_dim == 256);
  const bool latent = dim == 192 && value_dim == 128;
  if (dim % 8 != 0 || value_dim % 8 != 0 || !(usual || latent)) {
    return join(dim, " and ", value_dim,
                " channels; it has multiples of 8 up to 128, 256, and 192 with "
                "128");
  }
  const at::Context& torch = at::globalContext();
  constexpr long kOldest = 91100;
  if (!torch.hasCuDNN() || torch.versionCuDNN() < kOldest) {
    return "torch has no cuDNN, or one before 9.11";
  }
  if (!torch.userEnabledCuDNNSDP()) {
    return "it is off in torch.backends.cuda";
  }
  if (torch.deterministicAlgorithms()) {
    return "its gradients are not deterministic";
  }
  const c10::OptionalDeviceGuard guard(in.q.device());
  constexpr int kHopper = 90;
  if (device_generation() != kHopper) return "it is used on Hopper only";
  return std::nullopt;
}

std::optional<std::string> why_not_cudnn(const FusedSegment& segment) {
  const int64_t queries = segment.queries.size(), keys = segment.keys.size();
  if (!segment.is_full() && !segment.is_causal()) return "it takes no windows";
  if (segment.is_causal() && queries > keys) return "it takes no windows";
  const int64_t before = keys - queries;  // of a causal square
  if (!is_round(queries) || !is_round(keys) ||
      (segment.is_causal() && before > 0 && !is_round(before))) {
    return join(queries, " queries and ", keys,
                " keys; it is used for multiples of 128 from ",
                kLeastTokensOfCudnn, " on");
  }
  return std::nullopt;
}

bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  bool all = true;
  for (int64_t i = 0; i < a.dim(); ++i) {
    all = all && (a.size(i) == 1 || a.stride(i) == b.stride(i));
  }
  return all;
}

void attend_tiles_cudnn(const AttentionInputs& inputs,
                        std::span<const FusedSegment> segments,
                        Accumulator& running) {
  const EvenHeads even(inputs);
  const AttentionInputs& in = even.inputs();
  for (const CudnnCall& call : calls_of(segments, in.q.size(0))) {
    const auto result = at::_cudnn_attention_forward(
        aligned(call.heads_first(in.q, call.queries)),
        aligned(call.heads_first(in.k, call.keys)),
        aligned(call.heads_first(in.v, call.keys)), {}, {}, {},
        call.queries.size(), call.keys.size(), /*compute_log_sumexp=*/true, 0.0,
        call.causal, /*return_debug_mask=*/false, in.scale);
    const at::Tensor& out = std::get<0>(result);
    const at::Tensor lse = std::get<1>(result).reshape(out.sizes().slice(0, 3));
    running.add({out.transpose(1, 2), lse.transpose(1, 2)}, call.row,
                call.queries.begin);
  }
}

void attend_tiles_backward_cudnn(const AttentionInputs& inputs,
                                 std::span<const FusedSegment> segments,
                                 const AttentionAnswer& answer,
                                 AttentionGradients& gradients) {
  const EvenHeads even(inputs);
  const AttentionInputs& in = even.inputs();
  // Without dropout nobody looks at it.
  const at::Tensor no_random = at::empty({}, in.q.options().dtype(at::kLong));
  const at::Tensor none;
  for (const CudnnCall& call : calls_of(segments, in.q.size(0))) {
    at::Tensor q = aligned(call.heads_first(in.q, call.queries));
    at::Tensor out = aligned(call.heads_first(answer.out, call.queries));
    at::Tensor dout = aligned(call.heads_first(answer.dout, call.queries));
    // torch keeps plans by the strides of q, k and v alone. Those of out, dout
    // and lse must follow from them, or a plan reads memory in a wrong order.
    const bool same_channels = q.size(3) == out.size(3);
    if (!same_channels || !lie_alike(q, out) || !lie_alike(q, dout)) {
      q = q.contiguous();
      out = out.contiguous();
      dout = dout.contiguous();
    }
    const at::Tensor lse =
        call.heads_first(answer.lse, call.queries).contiguous().unsqueeze(3);
    const auto [dq, dk, dv] = at::_cudnn_attention_backward(
        dout, q, aligned(call.heads_first(in.k, call.keys)),
        aligned(call.heads_first(in.v, call.keys)), out, lse, no_random,
        no_random, none, none, none, call.queries.size(), call.keys.size(), 0.0,
        call.causal, in.scale);
    gradients.dq.add({dq.transpose(1, 2), {}}, call.row, call.queries.begin);
    even.add_to_key_heads(gradients.dk, dk.transpose(1, 2), call.row,
                          call.keys.begin);
    even.add_to_key_heads(gradients.dv, dv.transpose(1, 2), call.row,
                          call.keys.begin);
  }
}

}  // namespace longspan
