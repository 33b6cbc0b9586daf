#include <cuda_fp16.h>

#include "longspan/kernels/select_keys/ampere/select_keys.h"
#include "tests/kernels/cuda/on_device.h"
#include "tests/kernels/cuda/score_inputs.cuh"

namespace longspan::test {

namespace {

/// A thread a product, [rows, queries, heads, slots]; 0 for an empty slot.
template <class Real, class Element>
__global__ void true_products(const Element* q, const Element* k,
                              const int32_t* lists, ScoreShape shape,
                              Real* to) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= shape.rows * shape.queries * shape.heads * shape.slots) return;
  const int64_t slot = i % shape.slots, place = i / shape.slots;
  const int64_t query = place / shape.heads, row = query / shape.queries;
  const int32_t key = lists[query * shape.slots + slot];
  Real sum = 0;
  if (key >= 0 && key < shape.keys) {
    for (int d = 0; d < shape.dim; ++d) {
      sum += static_cast<Real>(static_cast<float>(q[place * shape.dim + d])) *
             static_cast<Real>(static_cast<float>(
                 k[(row * shape.keys + key) * shape.dim + d]));
    }
  }
  to[i] = sum;
}

/// A block a query: everything else. `plain` rounds derivatives of products to
/// elements, as a plain computation in that type would.
template <class Real, class Element>
__global__ void true_scores(const Element* q, const Element* k,
                            const float* weights, const int32_t* lists,
                            const float* dscores, const Real* products,
                            ScoreShape shape, bool plain, Real* scores,
                            Real* dq, Real* dk, Real* dweights) {
  const int64_t query = blockIdx.x, row = query / shape.queries;
  const int64_t H = shape.heads, K = shape.slots, D = shape.dim;
  const auto key_at = [&](int64_t slot) {
    const int32_t key = lists[query * K + slot];
    return key >= 0 && key < shape.keys ? int64_t{key} : -1;
  };
  const auto derivative = [&](int64_t h, int64_t slot) -> Real {
    if (key_at(slot) < 0 || products[(query * H + h) * K + slot] <= 0) return 0;
    const Real d = static_cast<Real>(dscores[query * K + slot]) *
                   static_cast<Real>(weights[query * H + h]);
    if (!plain) return d;
    return static_cast<float>(static_cast<Element>(static_cast<float>(d)));
  };
  for (int64_t slot = threadIdx.x; slot < K; slot += blockDim.x) {
    Real sum = 0;
    for (int64_t h = 0; h < H; ++h) {
      const Real x = products[(query * H + h) * K + slot];
      sum += (x > 0 ? x : 0) * static_cast<Real>(weights[query * H + h]);
    }
    scores[query * K + slot] = key_at(slot) < 0 ? -INFINITY : sum;
  }
  for (int64_t h = threadIdx.x; h < H; h += blockDim.x) {
    Real sum = 0;
    for (int64_t slot = 0; slot < K; ++slot) {
      const Real x = products[(query * H + h) * K + slot];
      if (key_at(slot) >= 0) {
        sum += (x > 0 ? x : 0) * static_cast<Real>(dscores[query * K + slot]);
      }
    }
    dweights[query * H + h] = sum;
  }
  for (int64_t i = threadIdx.x; i < H * D; i += blockDim.x) {
    Real sum = 0;
    for (int64_t slot = 0; slot < K; ++slot) {
      const int64_t key = key_at(slot);
      if (key < 0) continue;
      sum += derivative(i / D, slot) *
             static_cast<Real>(
                 static_cast<float>(k[(row * shape.keys + key) * D + i % D]));
    }
    dq[query * H * D + i] =
        plain
            ? static_cast<float>(static_cast<Element>(static_cast<float>(sum)))
            : sum;
  }
  for (int64_t i = threadIdx.x; i < K * D; i += blockDim.x) {
    const int64_t key = key_at(i / D);
    if (key < 0) continue;
    Real sum = 0;
    for (int64_t h = 0; h < H; ++h) {
      sum +=
          derivative(h, i / D) *
          static_cast<Real>(static_cast<float>(q[(query * H + h) * D + i % D]));
    }
    atomicAdd(dk + (row * shape.keys + key) * D + i % D, sum);
  }
}

template <class Real>
struct Truth {
  std::vector<Real> scores, dq, dk, dweights;
};

template <class Real, class Element>
Truth<Real> truth_of(const ScoreInputs<Element>& data, bool plain) {
  const ScoreShape& s = data.shape;
  const int64_t count = s.rows * s.queries * s.heads * s.slots;
  Device<Real> products(count), scores(data.dscores.size), dq(data.q.size),
      dk(data.k.size), dweights(data.weights.size);
  dk.zero();
  if (count > 0) {
    true_products<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        data.q.data, data.k.data, data.lists.data, s, products.data);
  }
  true_scores<<<static_cast<unsigned>(s.rows * s.queries), 256>>>(
      data.q.data, data.k.data, data.weights.data, data.lists.data,
      data.dscores.data, products.data, s, plain, scores.data, dq.data, dk.data,
      dweights.data);
  ok(cudaDeviceSynchronize(), "truth");
  return {scores.host(), dq.host(), dk.host(), dweights.host()};
}

/// Keys in any order, some twice, some slots empty or wild, some runs of them,
/// and the key 3 never, which is NaN.
std::vector<int32_t> odd_lists(const ScoreShape& shape) {
  const int64_t queries = shape.rows * shape.queries;
  std::vector<int32_t> lists(queries * shape.slots, -1);
  const int32_t wild[] = {-1, -7, INT32_MIN, INT32_MAX,
                          static_cast<int32_t>(shape.keys)};
  for (int64_t t = 0; t < queries && !shape.empty; ++t) {
    for (int64_t j = 0; j < shape.slots; ++j) {
      const auto z = mixed(t * shape.slots + j + 99);
      auto key = static_cast<int32_t>(z % shape.keys);
      if (key == 3) key = 4 % static_cast<int32_t>(shape.keys);
      if (z >> 40 & 1 && t % 3 == 1) key = wild[z % 5];
      if (t % 7 == 2) key = -1;
      if (t % 5 == 3 && j > t % shape.slots) key = wild[j % 5];
      if (t % 5 == 4 && j < 150) key = -1;
      lists[t * shape.slots + j] = key;
    }
  }
  return lists;
}

template <class Element>
void poison_key(ScoreInputs<Element>& data) {
  if (data.shape.keys < 4) return;
  for (int64_t row = 0; row < data.shape.rows; ++row) {
    ok(cudaMemset(data.k.data + (row * data.shape.keys + 3) * data.shape.dim,
                  0xff, data.shape.dim * sizeof(Element)),
       "poison a key");
  }
}

template <class Element>
void check_case(const ScoreShape& shape) {
  ScoreInputs<Element> data(shape);
  poison_key(data);
  const auto lists = odd_lists(shape);
  ok(cudaMemcpy(data.lists.data, lists.data(), lists.size() * 4,
                cudaMemcpyDefault),
     "lists");
  const std::string name = shape.name(!std::is_same_v<Element, bf16>);
  const auto truth = truth_of<double>(data, false);
  const auto plain = truth_of<float>(data, true);

  Device<float> scores(data.dscores.size), dk(data.k.size),
      dweights(data.weights.size);
  Device<Element> dq(data.q.size);
  std::vector<float> first, first_dweights;
  std::vector<Element> first_dq;
  bool same = true;
  for (int i = 0; i < 5; ++i) {
    scores.poison();
    dq.poison();
    dweights.poison();
    dk.zero();
    ampere::score_selected(data.forward(scores.data), nullptr);
    ampere::score_selected_backward(
        data.backward(dq.data, dk.data, dweights.data), nullptr);
    ok(cudaDeviceSynchronize(), "score_selected");
    if (i == 0) {
      first = scores.host();
      first_dq = dq.host();
      first_dweights = dweights.host();
    }
    same = same && same_bits(first, scores.host()) &&
           same_bits(first_dq, dq.host()) &&
           same_bits(first_dweights, dweights.host());
  }
  std::vector<float> dq_wide(first_dq.begin(), first_dq.end());
  const double error = distance(first, truth.scores);
  const double d[] = {distance(dq_wide, truth.dq),
                      distance(dk.host(), truth.dk),
                      distance(first_dweights, truth.dweights)};
  const double p[] = {distance(plain.dq, truth.dq),
                      distance(plain.dk, truth.dk),
                      distance(plain.dweights, truth.dweights)};
  report(same && error <= 1e-6 && d[0] <= 2 * p[0] && d[1] <= 2 * p[1] &&
             d[2] <= std::max(2 * p[2], 1e-6),
         name + text(": scores %.1e, dq %.1e (%.1e), dk %.1e (%.1e), dweights "
                     "%.1e (%.1e)%s",
                     error, d[0], p[0], d[1], p[1], d[2], p[2],
                     same ? "" : ", not the same again"));
}

using ScoreSelectedOnAmpere = OnAmpere;

/// Derivatives so small that float16 alone would lose them.
TEST_F(ScoreSelectedOnAmpere, KeepsSmallDerivatives) {
  const ScoreShape shape{1, 37, 300, 32, 200, 128};
  ScoreInputs<__half> data(shape);
  poison_key(data);
  const auto lists = odd_lists(shape);
  ok(cudaMemcpy(data.lists.data, lists.data(), lists.size() * 4,
                cudaMemcpyDefault),
     "lists");
  randomize(data.dscores, 4, 1e-9f);
  const auto truth = truth_of<double>(data, false);
  Device<float> dk(data.k.size), dweights(data.weights.size);
  Device<__half> dq(data.q.size);
  dk.zero();
  ampere::score_selected_backward(
      data.backward(dq.data, dk.data, dweights.data), nullptr);
  ok(cudaDeviceSynchronize(), "score_selected");
  const double error = distance(dk.host(), truth.dk);
  report(error < 1e-3, text("fp16, small derivatives: dk %.1e", error));
}

/// NaN and infinite products do what multiplying by hand does.
TEST_F(ScoreSelectedOnAmpere, KeepsNanAndInfiniteKeysToThemselves) {
  const ScoreShape shape{1, 4, 64, 5, 64, 40};
  ScoreInputs<bf16> data(shape);
  std::vector<int32_t> lists(4 * 64);
  for (int i = 0; i < 4 * 64; ++i) lists[i] = i % 64;
  ok(cudaMemcpy(data.lists.data, lists.data(), lists.size() * 4,
                cudaMemcpyDefault),
     "lists");
  auto k = data.k.host();
  k[7 * 40] = __float2bfloat16(NAN);
  k[9 * 40 + 1] = __float2bfloat16(INFINITY);
  ok(cudaMemcpy(data.k.data, k.data(), k.size() * 2, cudaMemcpyDefault), "k");
  std::vector<float> one(4 * 5, 1.f);
  ok(cudaMemcpy(data.weights.data, one.data(), 80, cudaMemcpyDefault), "w");
  Device<float> scores(4 * 64), dk(data.k.size), dweights(20);
  Device<bf16> dq(data.q.size);
  dk.zero();
  ampere::score_selected(data.forward(scores.data), nullptr);
  ampere::score_selected_backward(
      data.backward(dq.data, dk.data, dweights.data), nullptr);
  const auto got = scores.host(), keys = dk.host();
  int wrong = 0;
  for (int t = 0; t < 4; ++t) {
    for (int s = 0; s < 64; ++s) {
      const float x = got[t * 64 + s];
      wrong += s == 7   ? !std::isnan(x)
               : s == 9 ? !(x == INFINITY || x == 0)
                        : !std::isfinite(x) || std::signbit(x);
    }
  }
  for (int i = 0; i < 64 * 40; ++i) wrong += !std::isfinite(keys[i]);
  report(wrong == 0, text("NaN and infinite keys: %d wrong", wrong));
}

TEST_F(ScoreSelectedOnAmpere, ErrsAtMostTwiceAsPlain) {
  check_case<bf16>({1, 1, 1, 1, 1, 64});
  check_case<bf16>({1, 61, 1003, 32, 300, 128});
  check_case<bf16>({3, 37, 500, 32, 129, 128});
  check_case<bf16>({2, 33, 257, 1, 100, 40});
  check_case<bf16>({1, 41, 300, 5, 64, 64});
  check_case<bf16>({2, 29, 301, 8, 65, 128});
  check_case<bf16>({1, 50, 700, 24, 333, 128});
  check_case<bf16>({1, 31, 700, 64, 190, 128});
  check_case<bf16>({1, 31, 700, 64, 190, 40});
  check_case<bf16>({1, 23, 400, 80, 130, 128});
  check_case<bf16>({1, 23, 400, 40, 130, 256});
  check_case<bf16>({2, 23, 400, 16, 130, 200});
  check_case<bf16>({1, 20, 400, 32, 200, 128, true});
  check_case<bf16>({1, 3, 9000, 32, 40000, 64});
  check_case<__half>({1, 61, 1003, 32, 300, 128});
  check_case<__half>({2, 33, 257, 5, 100, 40});
  check_case<__half>({2, 29, 301, 64, 65, 64});
  check_case<__half>({1, 23, 400, 24, 130, 256});
  check_case<__half>({1, 20, 400, 8, 200, 128, true});
}

TEST_F(ScoreSelectedOnAmpere, ScoresAFew) {
  check_case<bf16>({2, 7, 301, 24, 130, 128});
  check_case<bf16>({1, 5, 300, 5, 64, 40});
  check_case<__half>({1, 5, 200, 64, 70, 128});
  check_case<__half>({1, 5, 200, 16, 70, 256});
}

}  // namespace

}  // namespace longspan::test
