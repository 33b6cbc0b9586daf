#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "tests/kernels/cuda/device.cuh"

/// Cases of attention to listed keys in any shape, and their truth in double.
namespace longspan::test {

struct AnyShape {
  int64_t rows, queries, keys, heads, key_heads, slots;
  int head_dim, value_dim;
  bool sink = false;

  std::string name() const {
    return text("%lld x %lld of %lld, %lld heads of %lld, %lld slots, %d/%d%s",
                (long long)rows, (long long)queries, (long long)keys,
                (long long)heads, (long long)key_heads, (long long)slots,
                head_dim, value_dim, sink ? ", sink" : "");
  }
};

template <class Element>
__device__ double wide(Element x) {
  return static_cast<double>(static_cast<float>(x));
}

template <class Element>
__device__ double as_if_stored(double x) {
  return wide(static_cast<Element>(static_cast<float>(x)));
}

/// What the truth is made from and goes to.
template <class Element>
struct ListedTruth {
  SelectedAttentionArgs args;
  const Element* dout;
  const float* sink;
  double *scores, *ddots;  // [rows, queries, heads, slots]
  double *out, *only_lse;  // of the keys
  float *lse, *delta;      // of keys and sink
  double *weights, *dq, *dkv;
  bool plain;
};

/// What a block looks at: a head of a query.
template <class Element>
struct HeadOfQuery {
  int64_t head, token, row, key_head, place;
  const Element *q, *o, *kv;
  const int32_t* list;

  __device__ explicit HeadOfQuery(const ListedTruth<Element>& truth) {
    const SelectedAttentionArgs& a = truth.args;
    head = blockIdx.x;
    token = blockIdx.y;
    row = token / a.queries;
    key_head = head / (a.heads / a.key_heads);
    place = token * a.heads + head;
    q = static_cast<const Element*>(a.q.data) + place * a.head_dim;
    o = truth.dout + place * a.value_dim;
    kv = static_cast<const Element*>(a.kv.data) + row * a.kv.row_stride +
         key_head * a.kv.head_stride;
    list = a.indices.data + row * a.indices.row_stride +
           token % a.queries * a.indices.token_stride +
           key_head * a.indices.head_stride;
  }
};

/// Scores, logs, output.
template <class Element>
__global__ void true_listed_scores(ListedTruth<Element> truth) {
  const SelectedAttentionArgs& a = truth.args;
  const auto [head, token, row, key_head, place, q, o, kv, list] =
      HeadOfQuery<Element>(truth);
  double* score = truth.scores + place * a.slots;
  double* ddot = truth.ddots + place * a.slots;
  for (int64_t j = threadIdx.x; j < a.slots; j += blockDim.x) {
    const int64_t key = list[j];
    score[j] = -INFINITY;
    ddot[j] = 0;
    if (key < 0 || key >= a.keys) continue;
    const Element* k = kv + key * a.kv.token_stride;
    double s = 0, d = 0;
    for (int c = 0; c < a.head_dim; ++c) s += wide(q[c]) * wide(k[c]);
    for (int c = 0; c < a.value_dim; ++c) d += wide(o[c]) * wide(k[c]);
    score[j] = s * a.scale;
    ddot[j] = d;
  }
  __syncthreads();
  double high = -INFINITY, sum = 0, delta = 0;
  for (int64_t j = 0; j < a.slots; ++j) high = fmax(high, score[j]);
  for (int64_t j = 0; j < a.slots; ++j) {
    sum += score[j] == -INFINITY ? 0 : exp(score[j] - high);
  }
  const double keys_log = sum == 0 ? -INFINITY : high + log(sum);
  double log_all = keys_log;
  if (truth.sink != nullptr) {
    const double sink = truth.sink[head], most = fmax(sink, keys_log);
    log_all = most + log(exp(sink - most) + exp(keys_log - most));
  }
  for (int64_t j = 0; j < a.slots; ++j) {
    if (score[j] != -INFINITY) delta += exp(score[j] - log_all) * ddot[j];
  }
  for (int c = threadIdx.x; c < a.value_dim; c += blockDim.x) {
    double value = 0;
    for (int64_t j = 0; j < a.slots; ++j) {
      if (score[j] == -INFINITY) continue;
      double p = exp(score[j] - high);
      if (truth.plain) p = as_if_stored<Element>(p);
      value += p * wide(kv[list[j] * a.kv.token_stride + c]);
    }
    value = sum == 0 ? 0 : value * exp(high - log_all);
    truth.out[place * a.value_dim + c] =
        truth.plain ? as_if_stored<Element>(value) : value;
  }
  if (threadIdx.x == 0 && !truth.plain) {
    truth.only_lse[place] = keys_log;
    // Every so often a head that saw something is to move nothing.
    truth.lse[place] = place % 37 == 5 ? INFINITY : static_cast<float>(log_all);
    truth.delta[place] = static_cast<float>(delta);
  }
}

/// From scores and logs: the derivatives.
template <class Element>
__global__ void true_listed_derivatives(ListedTruth<Element> truth) {
  const SelectedAttentionArgs& a = truth.args;
  const auto [head, token, row, key_head, place, q, o, kv, list] =
      HeadOfQuery<Element>(truth);
  const double log_all = truth.lse[place], delta = truth.delta[place];
  double* dkv =
      truth.dkv + (row * a.keys * a.key_heads + key_head) * a.head_dim;
  for (int c = threadIdx.x; c < a.head_dim; c += blockDim.x) {
    double sum = 0;
    for (int64_t j = 0; j < a.slots; ++j) {
      const double s = truth.scores[place * a.slots + j];
      if (s == -INFINITY || isinf(log_all)) continue;
      double p = exp(s - log_all);
      double ds = p * (truth.ddots[place * a.slots + j] - delta) * a.scale;
      if (truth.plain) {
        p = as_if_stored<Element>(p);
        ds = as_if_stored<Element>(ds);
      }
      sum += ds * wide(kv[list[j] * a.kv.token_stride + c]);
      double add = ds * wide(q[c]);
      if (c < a.value_dim) add += p * wide(o[c]);
      atomicAdd(dkv + list[j] * a.key_heads * a.head_dim + c, add);
    }
    truth.dq[place * a.head_dim + c] =
        truth.plain ? as_if_stored<Element>(sum) : sum;
  }
  const int64_t group = a.heads / a.key_heads;
  if (head % group != 0 || truth.plain) return;
  double* weights = truth.weights + (token * a.key_heads + key_head) * a.slots;
  for (int64_t j = threadIdx.x; j < a.slots; j += blockDim.x) {
    double sum = 0;
    for (int64_t h = place; h < place + group; ++h) {
      const double s = truth.scores[h * a.slots + j];
      if (s == -INFINITY || isinf(truth.lse[h])) continue;
      sum += exp(s - static_cast<double>(truth.lse[h]));
    }
    weights[j] = sum;
  }
}

template <class Element>
std::vector<double> widened_all(const std::vector<Element>& x) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = static_cast<float>(x[i]);
  return y;
}

/// Lists with holes, wild numbers, repeats, and none at all.
inline int32_t listed(const AnyShape& shape, int64_t t, int64_t j) {
  const uint64_t z = mixed(t * 1000003 + j);
  auto key = static_cast<int32_t>(z % shape.keys);
  if (t % 5 == 1 && z % 7 == 0) return -1;
  if (t % 5 == 2 && z % 5 == 0) {
    const int32_t wild[] = {-2147483647 - 1, 2147483647, -7,
                            static_cast<int32_t>(shape.keys)};
    return wild[z / 8 % 4];
  }
  if (t % 5 == 3 && j / 32 % 3 != t % 3) return -1;  // empty tiles
  if (t % 5 == 4 &&
      j > static_cast<int64_t>(mixed(t) % static_cast<uint64_t>(shape.slots))) {
    return -1;
  }
  if (t % 11 == 6) return -1;
  if (t % 13 == 7) key = static_cast<int32_t>(t % shape.keys);
  return key;
}

/// A case with everything that the kernels read and write. Rows of keys stand
/// further apart than they must.
template <class Element>
struct ListedCase {
  AnyShape shape;
  int64_t tokens, places, kv_token, dkv_token;
  Device<Element> q, kv, dout, dq, out;
  Device<int32_t> lists;
  Device<float> sink, lse, delta, dkv, weights, only_lse;
  std::string name;

  explicit ListedCase(const AnyShape& shape, bool is_wild)
      : shape(shape),
        tokens(shape.rows * shape.queries),
        places(tokens * shape.heads),
        kv_token(shape.key_heads * shape.head_dim + 8),
        dkv_token(shape.key_heads * shape.head_dim + 4),
        q(places * shape.head_dim),
        kv(shape.rows * shape.keys * kv_token),
        dout(places * shape.value_dim),
        dq(q.size),
        out(dout.size),
        lists(tokens * shape.key_heads * shape.slots),
        sink(shape.heads),
        lse(places),
        delta(places),
        dkv(shape.rows * shape.keys * dkv_token),
        weights(lists.size),
        only_lse(places),
        name((std::is_same_v<Element, bf16> ? "bf16 " : "fp16 ") +
             shape.name()) {
    randomize(q, 31);
    randomize(kv, 32);
    randomize(dout, 33);
    randomize(sink, 34, 2.f);
    if (is_wild) {
      make_wild();
    } else {
      fill_lists<<<static_cast<unsigned>(tokens * shape.key_heads), 256>>>(
          lists.data, tokens * shape.key_heads, shape.slots, shape.keys, 35);
    }
    ok(cudaDeviceSynchronize(), "inputs");
  }

  /// Wild lists, and keys that nobody lists are no numbers.
  void make_wild() {
    std::vector<int32_t> host(lists.size);
    std::vector<char> used(shape.rows * shape.keys * shape.key_heads);
    for (int64_t t = 0; t < tokens * shape.key_heads; ++t) {
      const int64_t token = t / shape.key_heads, head = t % shape.key_heads;
      for (int64_t j = 0; j < shape.slots; ++j) {
        const int32_t key = host[t * shape.slots + j] = listed(shape, t, j);
        if (key < 0 || key >= shape.keys) continue;
        const int64_t row = token / shape.queries;
        used[(row * shape.keys + key) * shape.key_heads + head] = 1;
      }
    }
    ok(cudaMemcpy(lists.data, host.data(), host.size() * 4, cudaMemcpyDefault),
       "lists");
    auto keys = kv.host();
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i] != 0) continue;
      Element* key = keys.data() + i / shape.key_heads * kv_token +
                     i % shape.key_heads * shape.head_dim;
      std::fill(key, key + shape.head_dim, static_cast<Element>(NAN));
    }
    ok(cudaMemcpy(kv.data, keys.data(), keys.size() * 2, cudaMemcpyDefault),
       "keys");
  }

  void fill(SelectedAttentionArgs& args) const {
    args.type = std::is_same_v<Element, bf16> ? ElementType::bfloat16
                                              : ElementType::float16;
    args.rows = shape.rows;
    args.queries = shape.queries;
    args.keys = shape.keys;
    args.heads = shape.heads;
    args.key_heads = shape.key_heads;
    args.slots = shape.slots;
    args.head_dim = shape.head_dim;
    args.value_dim = shape.value_dim;
    args.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
    args.q =
        array<const void*>(q.data, shape.queries, shape.heads, shape.head_dim);
    args.kv = {kv.data, shape.keys * kv_token, kv_token, shape.head_dim};
    args.indices = array<const int32_t*>(lists.data, shape.queries,
                                         shape.key_heads, shape.slots);
  }

  SelectedForwardArgs forward_args() const {
    SelectedForwardArgs args;
    fill(args);
    args.sink = shape.sink ? sink.data : nullptr;
    args.out =
        array<void*>(out.data, shape.queries, shape.heads, shape.value_dim);
    args.lse = array<void*>(only_lse.data, shape.queries, shape.heads, 1);
    return args;
  }

  SelectedBackwardArgs backward_args() const {
    SelectedBackwardArgs args;
    fill(args);
    args.dout = array<const void*>(dout.data, shape.queries, shape.heads,
                                   shape.value_dim);
    args.lse = array<const void*>(lse.data, shape.queries, shape.heads, 1);
    args.delta = array<const void*>(delta.data, shape.queries, shape.heads, 1);
    args.dq = array<void*>(dq.data, shape.queries, shape.heads, shape.head_dim);
    args.dkv = {dkv.data, shape.keys * dkv_token, dkv_token, shape.head_dim};
    return args;
  }

  SelectedWeightsArgs weights_args() const {
    SelectedWeightsArgs args;
    fill(args);
    args.lse = array<const void*>(lse.data, shape.queries, shape.heads, 1);
    args.weights =
        array<void*>(weights.data, shape.queries, shape.key_heads, shape.slots);
    return args;
  }

  void backward() {
    dq.poison();
    dkv.zero();
    ampere::selected_attention_backward(backward_args(), nullptr);
    ok(cudaDeviceSynchronize(), "backward");
  }

  /// dkv as if rows were not apart; what lies between must be untouched.
  std::vector<float> packed_dkv() const {
    const auto host = dkv.host();
    std::vector<float> result;
    for (int64_t i = 0; i < shape.rows * shape.keys; ++i) {
      const float* row = host.data() + i * dkv_token;
      result.insert(result.end(), row, row + dkv_token - 4);
      for (int k = 1; k <= 4; ++k) {
        if (row[dkv_token - k] != 0) result.back() = NAN;
      }
    }
    return result;
  }
};

}  // namespace longspan::test
