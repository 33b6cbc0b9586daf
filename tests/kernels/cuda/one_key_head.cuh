#pragma once

#include "longspan/kernels/attend_selected/attend_selected.h"
#include "tests/kernels/cuda/device.cuh"

namespace longspan::test {

struct AttentionShape {
  int64_t queries, keys, heads, slots;
  int head_dim;
  bool sink;
  int value_dim = 512;

  std::string name() const {
    return text("%lld of %lld, %lld heads, %lld slots, %d/%d%s",
                (long long)queries, (long long)keys, (long long)heads,
                (long long)slots, head_dim, value_dim, sink ? ", sink" : "");
  }
};

struct ForwardTruth {
  std::vector<double> out, lse;  // of all heads of a query
};

__device__ inline double rounded(double x) {
  return __bfloat162float(__float2bfloat16(static_cast<float>(x)));
}

/// A block a head of one query; `plain` rounds weights to bfloat16, as a plain
/// computation in that type would. Weights of slots are left in `weights`.
static __global__ void true_forward(const bf16* q, const bf16* kv,
                                    const int32_t* list, const float* sink,
                                    int64_t keys, int64_t slots, int head_dim,
                                    int value_dim, double scale, bool plain,
                                    double* weights, double* out, double* lse) {
  __shared__ double partial[256];
  const int head = blockIdx.x, thread = threadIdx.x;
  double* w = weights + head * slots;
  const auto all = [&](double x, bool greatest) {
    __syncthreads();
    partial[thread] = x;
    __syncthreads();
    double result = partial[0];
    for (int i = 1; i < 256; ++i) {
      result = greatest ? fmax(result, partial[i]) : result + partial[i];
    }
    return result;
  };
  double high = -INFINITY;
  for (int64_t j = thread; j < slots; j += 256) {
    const int64_t key = list[j];
    w[j] = -INFINITY;
    if (key < 0 || key >= keys) continue;
    double dot = 0;
    for (int d = 0; d < head_dim; ++d) {
      dot += static_cast<double>(__bfloat162float(q[head * head_dim + d])) *
             static_cast<double>(__bfloat162float(kv[key * head_dim + d]));
    }
    w[j] = dot * scale;
    high = fmax(high, w[j]);
  }
  high = all(high, true);
  double sum = 0;
  for (int64_t j = thread; j < slots; j += 256) {
    w[j] = w[j] == -INFINITY ? 0 : exp(w[j] - high);
    sum += w[j];
    if (plain) w[j] = rounded(w[j]);
  }
  sum = all(sum, false);
  const double total =
      sum + (sink != nullptr ? exp(static_cast<double>(sink[head]) - high) : 0);
  if (thread == 0) lse[head] = sum == 0 ? -INFINITY : high + log(sum);
  for (int d = thread; d < value_dim; d += 256) {
    double value = 0;
    for (int64_t j = 0; j < slots; ++j) {
      if (w[j] == 0) continue;
      value += w[j] * static_cast<double>(__bfloat162float(
                          kv[static_cast<int64_t>(list[j]) * head_dim + d]));
    }
    value = sum == 0 ? 0 : value / total;
    out[head * value_dim + d] = plain ? rounded(value) : value;
  }
}

struct AttentionData {
  AttentionShape shape;
  Device<bf16> q, kv;
  Device<int32_t> list;
  Device<float> sink;
  double scale;

  explicit AttentionData(const AttentionShape& shape)
      : shape(shape),
        q(shape.queries * shape.heads * shape.head_dim),
        kv(shape.keys * shape.head_dim),
        list(shape.queries * shape.slots),
        sink(shape.heads),
        scale(1 / std::sqrt(static_cast<double>(shape.head_dim))) {
    randomize(q, 11);
    randomize(kv, 12);
    randomize(sink, 13, 3.f);
    fill_lists<<<static_cast<unsigned>(shape.queries), 256>>>(
        list.data, shape.queries, shape.slots, shape.keys, 14);
    ok(cudaDeviceSynchronize(), "inputs");
  }

  /// Lists with holes, wild numbers, repeats, and none at all.
  void wild_lists() {
    std::vector<int32_t> host(list.size);
    for (int64_t t = 0; t < shape.queries; ++t) {
      for (int64_t j = 0; j < shape.slots; ++j) {
        const uint64_t z = mixed(t * 1000003 + j);
        int32_t key = static_cast<int32_t>(z % shape.keys);
        if (t % 5 == 1 && z % 7 == 0) key = -1;
        if (t % 5 == 2 && z % 5 == 0) {
          const int32_t wild[] = {-2147483647 - 1, 2147483647, -7,
                                  static_cast<int32_t>(shape.keys)};
          key = wild[z / 8 % 4];
        }
        if (t % 5 == 3 && j / 64 % 3 != t % 3) key = -1;  // empty tiles
        if (t % 5 == 4 && j > static_cast<int64_t>(mixed(t) % shape.slots)) {
          key = -1;
        }
        if (t % 11 == 6) key = -1;
        if (t % 13 == 7) key = static_cast<int32_t>(t % shape.keys);
        host[t * shape.slots + j] = key;
      }
    }
    ok(cudaMemcpy(list.data, host.data(), host.size() * 4, cudaMemcpyDefault),
       "lists");
  }

  void fill(SelectedAttentionArgs& args) const {
    args.type = ElementType::bfloat16;
    args.rows = 1;
    args.queries = shape.queries;
    args.keys = shape.keys;
    args.heads = shape.heads;
    args.slots = shape.slots;
    args.head_dim = shape.head_dim;
    args.value_dim = shape.value_dim;
    args.scale = scale;
    args.q =
        array<const void*>(q.data, shape.queries, shape.heads, shape.head_dim);
    args.kv = array<const void*>(kv.data, shape.keys, 1, shape.head_dim);
    args.indices =
        array<const int32_t*>(list.data, shape.queries, 1, shape.slots);
  }

  SelectedForwardArgs forward_args(const Device<bf16>& out,
                                   const Device<float>& lse) const {
    SelectedForwardArgs args;
    fill(args);
    args.sink = shape.sink ? sink.data : nullptr;
    args.out =
        array<void*>(out.data, shape.queries, shape.heads, shape.value_dim);
    args.lse = array<void*>(lse.data, shape.queries, shape.heads, 1);
    return args;
  }

  ForwardTruth forward_truth(int64_t query, bool plain) const {
    Device<double> weights(shape.heads * shape.slots);
    Device<double> out(shape.heads * shape.value_dim), lse(shape.heads);
    true_forward<<<static_cast<unsigned>(shape.heads), 256>>>(
        q.data + query * shape.heads * shape.head_dim, kv.data,
        list.data + query * shape.slots, shape.sink ? sink.data : nullptr,
        shape.keys, shape.slots, shape.head_dim, shape.value_dim, scale, plain,
        weights.data, out.data, lse.data);
    ok(cudaDeviceSynchronize(), "truth");
    return {out.host(), lse.host()};
  }
};

/// What a forward kernel answered for some queries: at most twice the error of
/// a plain computation.
inline void report_forward(const AttentionData& data, const Device<bf16>& out,
                           const Device<float>& lse,
                           const std::vector<int64_t>& queries,
                           const std::string& name) {
  double error = 0, plain = 0, lse_error = 0;
  int64_t misplaced = 0;
  const int64_t H = data.shape.heads, V = data.shape.value_dim;
  std::vector<double> got, want, bf16_want, got_lse, want_lse;
  for (const int64_t t : queries) {
    const ForwardTruth exact = data.forward_truth(t, false);
    const ForwardTruth rounded = data.forward_truth(t, true);
    const auto o = widened(out.host(t * H * V, H * V));
    const auto l = lse.host(t * H, H);
    got.insert(got.end(), o.begin(), o.end());
    want.insert(want.end(), exact.out.begin(), exact.out.end());
    bf16_want.insert(bf16_want.end(), rounded.out.begin(), rounded.out.end());
    for (int64_t h = 0; h < H; ++h) {
      if (std::isinf(exact.lse[h]) || std::isinf(l[h])) {
        misplaced += !(exact.lse[h] == l[h]);
        continue;
      }
      got_lse.push_back(l[h]);
      want_lse.push_back(exact.lse[h]);
    }
  }
  error = distance(got, want);
  plain = distance(bf16_want, want);
  lse_error = distance(got_lse, want_lse);
  report(error <= 2 * plain && lse_error < 1e-6 && misplaced == 0,
         name + text(": out %.2e (plain %.2e), lse %.1e, infinite apart %lld",
                     error, plain, lse_error, (long long)misplaced));
}

}  // namespace longspan::test
