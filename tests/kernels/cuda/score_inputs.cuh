#pragma once

#include <type_traits>

#include "longspan/kernels/select_keys/select_keys.h"
#include "tests/kernels/cuda/device.cuh"

/// What scores of listed keys are made from, in both directions.
namespace longspan::test {

struct ScoreShape {
  int64_t rows, queries, keys, heads, slots;
  int dim;
  bool empty = false;  // all slots

  std::string name(bool half) const {
    return text("%s %lld x %lld of %lld, %lld x %d, %lld slots%s",
                half ? "fp16" : "bf16", (long long)rows, (long long)queries,
                (long long)keys, (long long)heads, dim, (long long)slots,
                empty ? ", all empty" : "");
  }
};

template <class Element>
struct ScoreInputs {
  ScoreShape shape;
  Device<Element> q, k;
  Device<float> weights, dscores;
  Device<int32_t> lists;

  explicit ScoreInputs(const ScoreShape& shape)
      : shape(shape),
        q(shape.rows * shape.queries * shape.heads * shape.dim),
        k(shape.rows * shape.keys * shape.dim),
        weights(shape.rows * shape.queries * shape.heads),
        dscores(shape.rows * shape.queries * shape.slots),
        lists(shape.rows * shape.queries * shape.slots) {
    randomize(q, 1);
    randomize(k, 2);
    randomize(weights, 3);
    randomize(dscores, 4);
  }

  KeyScoreArgs inputs() const {
    const ScoreShape& s = shape;
    KeyScoreArgs args;
    args.type = sizeof(Element) == 2 && std::is_same_v<Element, bf16>
                    ? ElementType::bfloat16
                    : ElementType::float16;
    args.rows = s.rows;
    args.queries = s.queries;
    args.keys = s.keys;
    args.heads = s.heads;
    args.head_dim = s.dim;
    args.slots = s.slots;
    args.q = array<const void*>(q.data, s.queries, s.heads, s.dim);
    args.k = {k.data, s.keys * s.dim, s.dim, 0};
    args.weights = {weights.data, s.queries * s.heads, s.heads, 1};
    return args;
  }
  ScoreSelectedArgs forward(float* scores) const {
    const ScoreShape& s = shape;
    return {inputs(),
            {lists.data, s.queries * s.slots, s.slots, 0},
            {scores, s.queries * s.slots, s.slots, 0}};
  }
  ScoreSelectedBackwardArgs backward(Element* dq, float* dk,
                                     float* dweights) const {
    const ScoreShape& s = shape;
    return {inputs(),
            {lists.data, s.queries * s.slots, s.slots, 0},
            {dscores.data, s.queries * s.slots, s.slots, 0},
            array<void*>(dq, s.queries, s.heads, s.dim),
            {dk, s.keys * s.dim, s.dim, 0},
            {dweights, s.queries * s.heads, s.heads, 1}};
  }
};

}  // namespace longspan::test
