#pragma once

#include <type_traits>

#include "longspan/kernels/select_keys/select_keys.h"
#include "tests/kernels/cuda/device.cuh"

/// What the lightning indexer reads, and its scores in double.
namespace longspan::test {

struct IndexShape {
  int64_t rows, queries, keys, heads;
  int dim;
  int64_t slots;
};

template <class Element>
__global__ void true_index_scores(const Element* q, const Element* k,
                                  const float* weights, IndexShape shape,
                                  double* to) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= shape.rows * shape.queries * shape.keys) return;
  const int64_t query = i / shape.keys, row = query / shape.queries;
  const int64_t key = row * shape.keys + i % shape.keys;
  double sum = 0;
  for (int64_t h = 0; h < shape.heads; ++h) {
    const int64_t place = query * shape.heads + h;
    double dot = 0;
    for (int d = 0; d < shape.dim; ++d) {
      dot += static_cast<double>(static_cast<float>(q[place * shape.dim + d])) *
             static_cast<double>(static_cast<float>(k[key * shape.dim + d]));
    }
    sum += weights[place] * (dot > 0 ? dot : 0);
  }
  to[i] = sum;
}

template <class Element>
struct IndexInputs {
  IndexShape shape;
  Device<Element> q, k;
  Device<float> weights;

  explicit IndexInputs(const IndexShape& shape)
      : shape(shape),
        q(shape.rows * shape.queries * shape.heads * shape.dim),
        k(shape.rows * shape.keys * shape.dim),
        weights(shape.rows * shape.queries * shape.heads) {
    randomize(q, 1);
    randomize(k, 2);
    randomize(weights, 3);
  }

  SelectKeysArgs args(int64_t slots, const int32_t* start, const int32_t* end,
                      int32_t* indices, float* scores) const {
    const IndexShape& s = shape;
    SelectKeysArgs args;
    args.type = std::is_same_v<Element, bf16> ? ElementType::bfloat16
                                              : ElementType::float16;
    args.rows = s.rows;
    args.queries = s.queries;
    args.keys = s.keys;
    args.heads = s.heads;
    args.head_dim = s.dim;
    args.slots = slots;
    args.q = array<const void*>(q.data, s.queries, s.heads, s.dim);
    args.k = {k.data, s.keys * s.dim, s.dim, 0};
    args.weights = {weights.data, s.queries * s.heads, s.heads, 1};
    args.start = {start, s.queries, 1, 0};
    args.end = {end, s.queries, 1, 0};
    args.indices = {indices, s.queries * slots, slots, 0};
    args.scores = {scores, s.queries * slots, slots, 0};
    return args;
  }
};

}  // namespace longspan::test
