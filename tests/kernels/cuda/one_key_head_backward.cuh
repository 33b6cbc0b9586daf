#pragma once

#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "tests/kernels/cuda/one_key_head.cuh"

namespace longspan::test {

/// A block a head of a query: dq of it, and dkv added. `plain` rounds weights
/// and their derivatives to bfloat16.
static __global__ void true_backward(const bf16* q, const bf16* kv,
                                     const int32_t* lists, const bf16* dout,
                                     const float* lse, const float* delta,
                                     int64_t first, int64_t heads, int64_t keys,
                                     int64_t slots, int head_dim, double scale,
                                     bool plain, double* dq, double* dkv) {
  const int64_t query = first + blockIdx.y, head = blockIdx.x;
  const int64_t place = query * heads + head;
  const int32_t* list = lists + query * slots;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ double p[8], ds[8];
  double sum[3] = {0, 0, 0};
  const double log = lse[place];
  for (int64_t from = 0; from < slots; from += 8) {
    const int64_t j = from + warp;
    const int64_t key = j < slots ? list[j] : -1;
    const bool there = key >= 0 && key < keys && !isinf(log);
    double dot = 0, ddot = 0;
    if (there) {
      for (int d = lane; d < head_dim; d += 32) {
        const double k = __bfloat162float(kv[key * head_dim + d]);
        dot +=
            k * static_cast<double>(__bfloat162float(q[place * head_dim + d]));
        if (d < 512) {
          ddot +=
              k * static_cast<double>(__bfloat162float(dout[place * 512 + d]));
        }
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      dot += __shfl_xor_sync(~0u, dot, step);
      ddot += __shfl_xor_sync(~0u, ddot, step);
    }
    if (lane == 0) {
      p[warp] = there ? exp(dot * scale - log) : 0;
      ds[warp] = p[warp] * (ddot - delta[place]) * scale;
      if (plain) {
        p[warp] = rounded(p[warp]);
        ds[warp] = rounded(ds[warp]);
      }
    }
    __syncthreads();
    for (int i = 0; i < 8 && from + i < slots; ++i) {
      const int64_t other = list[from + i];
      if (other < 0 || other >= keys) continue;
      for (int c = 0; c < 3; ++c) {
        const int d = c * 256 + threadIdx.x;
        if (d >= head_dim) break;
        sum[c] += ds[i] * static_cast<double>(
                              __bfloat162float(kv[other * head_dim + d]));
        if (dkv == nullptr) continue;
        double add = ds[i] * static_cast<double>(
                                 __bfloat162float(q[place * head_dim + d]));
        if (d < 512) {
          add += p[i] *
                 static_cast<double>(__bfloat162float(dout[place * 512 + d]));
        }
        if (add != 0) atomicAdd(dkv + other * head_dim + d, add);
      }
    }
    __syncthreads();
  }
  for (int c = 0; c < 3; ++c) {
    const int d = c * 256 + threadIdx.x;
    if (d < head_dim) {
      dq[(blockIdx.y * heads + head) * head_dim + d] =
          plain ? rounded(sum[c]) : sum[c];
    }
  }
}

/// Everything a step needs, and all of its launches.
struct Step {
  AttentionData& data;
  Device<bf16> out, dout, dq;
  Device<float> lse, delta, dkv;

  explicit Step(AttentionData& data)
      : data(data),
        out(data.shape.queries * data.shape.heads * 512),
        dout(data.shape.queries * data.shape.heads * 512),
        dq(data.shape.queries * data.shape.heads * data.shape.head_dim),
        lse(data.shape.queries * data.shape.heads),
        delta(data.shape.queries * data.shape.heads),
        dkv(data.shape.keys * data.shape.head_dim) {
    randomize(dout, 21);
    hopper::selected_attention_forward(data.forward_args(out, lse), nullptr);
    if (data.shape.sink) add_sink();
    ok(cudaDeviceSynchronize(), "forward of a step");
  }

  /// The backward kernel wants the log of keys and sink.
  void add_sink() {
    auto logs = lse.host();
    const auto sinks = data.sink.host();
    for (size_t i = 0; i < logs.size(); ++i) {
      const double sink = sinks[i % sinks.size()], log = logs[i];
      if (std::isinf(log)) continue;
      const double high = std::max(sink, log);
      logs[i] = static_cast<float>(
          high + std::log(std::exp(sink - high) + std::exp(log - high)));
    }
    ok(cudaMemcpy(lse.data, logs.data(), logs.size() * 4, cudaMemcpyDefault),
       "logs");
  }

  /// In `rows` rows that share their keys; queries are a multiple of it.
  void run(int64_t rows = 1) {
    const AttentionShape& shape = data.shape;
    const int64_t queries = shape.queries / rows;
    hopper::OutputDeltaArgs of;
    of.rows = rows;
    of.queries = queries;
    of.heads = shape.heads;
    of.value_dim = 512;
    of.out = array<const void*>(out.data, queries, shape.heads, 512);
    of.dout = array<const void*>(dout.data, queries, shape.heads, 512);
    of.delta = array<float*>(delta.data, queries, shape.heads, 1);
    hopper::output_delta(of, nullptr);
    ok(cudaMemsetAsync(dkv.data, 0, dkv.size * 4, nullptr), "zero");
    SelectedBackwardArgs args;
    data.fill(args);
    args.rows = rows;
    args.queries = queries;
    args.q.row_stride = queries * shape.heads * shape.head_dim;
    args.kv.row_stride = 0;
    args.indices.row_stride = queries * shape.slots;
    args.dout = array<const void*>(dout.data, queries, shape.heads, 512);
    args.lse = array<const void*>(lse.data, queries, shape.heads, 1);
    args.delta = array<const void*>(delta.data, queries, shape.heads, 1);
    args.dq = array<void*>(dq.data, queries, shape.heads, shape.head_dim);
    args.dkv = array<void*>(dkv.data, shape.keys, 1, shape.head_dim);
    args.dkv.row_stride = 0;
    hopper::selected_attention_backward(args, nullptr);
  }

  void truth(int64_t first, int64_t count, bool plain, Device<double>& dq,
             Device<double>* dkv) {
    const AttentionShape& shape = data.shape;
    const dim3 grid(static_cast<unsigned>(shape.heads),
                    static_cast<unsigned>(count));
    true_backward<<<grid, 256>>>(
        data.q.data, data.kv.data, data.list.data, dout.data, lse.data,
        delta.data, first, shape.heads, shape.keys, shape.slots, shape.head_dim,
        data.scale, plain, dq.data, dkv != nullptr ? dkv->data : nullptr);
    ok(cudaDeviceSynchronize(), "truth");
  }

  /// dq of some queries.
  void compare_dq(int64_t first, int64_t count, const std::string& name) {
    const int64_t size = data.shape.heads * data.shape.head_dim;
    Device<double> exact(count * size), plain(count * size);
    truth(first, count, false, exact, nullptr);
    truth(first, count, true, plain, nullptr);
    const double error =
        distance(widened(dq.host(first * size, count * size)), exact.host());
    const double allowed = distance(plain.host(), exact.host());
    report(error <= 2 * allowed, name + text(": dq of %lld.. %.2e (plain %.2e)",
                                             (long long)first, error, allowed));
  }
};

}  // namespace longspan::test
