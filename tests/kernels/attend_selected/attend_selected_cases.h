#pragma once

#include <climits>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/attention/attention_answers.h"
#include "tests/oracle/selected_attention.h"

/// Problems for selected-key kernels, the answers they get and those they
/// ought to get.
namespace longspan::test {

/// How slots are filled.
enum class Lists {
  ascending,  // different keys; -1 behind them where there are too few
  shuffled,   // the same in any order, empty slots between
  repeated,   // any keys, many of them several times
  wild,       // half of the slots name no key
  empty,      // none names one
  growing     // as many keys as earlier queries there are, ascending
};

struct SelectedCase {
  std::string name;
  int64_t rows = 1, queries = 3, keys = 40;
  int64_t heads = 4, key_heads = 1, slots = 24;
  int64_t head_dim = 24, value_dim = 16;
  Lists lists = Lists::ascending;
  bool sink = false;
  double size = 1;  // of q; scores grow with it
  Strides strides = Strides::contiguous;
};

inline void PrintTo(const SelectedCase& c, std::ostream* out) {
  *out << c.name;
}

inline const std::vector<SelectedCase>& selected_cases() {
  static const std::vector<SelectedCase> cases{
      // Usual.
      {.name = "sixteen_heads",
       .queries = 4,
       .keys = 150,
       .heads = 16,
       .slots = 96,
       .head_dim = 64,
       .value_dim = 32},
      {.name = "channels_576_and_512_of_64_heads",
       .queries = 2,
       .keys = 200,
       .heads = 64,
       .slots = 130,
       .head_dim = 576,
       .value_dim = 512},
      {.name = "channels_512_with_a_sink",
       .queries = 2,
       .keys = 90,
       .heads = 16,
       .slots = 70,
       .head_dim = 512,
       .value_dim = 512,
       .sink = true},
      {.name = "two_key_heads",
       .rows = 2,
       .heads = 12,
       .key_heads = 2,
       .slots = 80,
       .lists = Lists::shuffled},
      {.name = "growing_lists",
       .queries = 70,
       .keys = 70,
       .heads = 3,
       .slots = 48,
       .lists = Lists::growing},
      {.name = "many_slots_in_many_ranges",
       .queries = 5,
       .keys = 700,
       .heads = 2,
       .slots = 600,
       .lists = Lists::repeated},
      // Ragged.
      {.name = "one_head", .heads = 1},
      {.name = "three_heads", .heads = 3, .slots = 65},
      {.name = "seventy_heads", .keys = 140, .heads = 70, .slots = 129},
      {.name = "odd_channels", .heads = 5, .head_dim = 7, .value_dim = 5},
      {.name = "channels_33_and_17",
       .heads = 17,
       .slots = 63,
       .head_dim = 33,
       .value_dim = 17},
      {.name = "one_channel", .head_dim = 1, .value_dim = 1},
      {.name = "gaps_between_everything",
       .rows = 2,
       .heads = 6,
       .key_heads = 2,
       .slots = 33,
       .head_dim = 20,
       .value_dim = 12,
       .lists = Lists::wild,
       .sink = true,
       .strides = Strides::gapped},
      // Corner.
      {.name = "one_key", .keys = 1, .slots = 1},
      {.name = "one_slot", .slots = 1},
      {.name = "more_slots_than_keys", .keys = 5, .slots = 70},
      {.name = "repeated_keys", .keys = 3, .lists = Lists::repeated},
      {.name = "one_key_repeated",
       .keys = 1,
       .slots = 70,
       .lists = Lists::repeated},
      {.name = "wild_slots", .slots = 150, .lists = Lists::wild},
      {.name = "empty_slots", .lists = Lists::empty},
      {.name = "empty_slots_with_a_sink", .lists = Lists::empty, .sink = true},
      {.name = "no_slots", .slots = 0},
      {.name = "no_keys", .keys = 0, .lists = Lists::wild},
      {.name = "no_queries", .queries = 0},
      {.name = "no_rows", .rows = 0},
      {.name = "scores_of_ten_thousand", .slots = 100, .size = 1e4},
  };
  return cases;
}

inline std::vector<int32_t> indices_of(const SelectedCase& c,
                                       std::mt19937_64& bits) {
  constexpr int32_t kNone[] = {-1, INT_MIN, INT_MAX, -77};
  std::vector<int32_t> indices;
  for (int64_t list = 0; list < c.rows * c.queries * c.key_heads; ++list) {
    std::vector<int32_t> keys(static_cast<std::size_t>(c.keys));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = static_cast<int32_t>(i);
    }
    if (c.lists == Lists::growing) {
      keys.resize(static_cast<std::size_t>(list / c.key_heads % c.queries));
    }
    std::ranges::shuffle(keys, bits);
    keys.resize(static_cast<std::size_t>(c.slots), -1);
    const auto key = [&] { return static_cast<int32_t>(bits() % c.keys); };
    switch (c.lists) {
      case Lists::ascending:
      case Lists::growing:
        std::ranges::sort(keys, {}, [](int32_t k) { return uint32_t(k); });
        break;
      case Lists::shuffled:
        std::ranges::shuffle(keys, bits);
        break;
      case Lists::repeated:
        for (int32_t& slot : keys) slot = key();
        break;
      case Lists::wild:
        for (int32_t& slot : keys) {
          const uint64_t kind = bits() % 8;
          slot = kind < 4      ? kNone[kind]
                 : kind == 4   ? static_cast<int32_t>(c.keys)
                 : c.keys == 0 ? 0
                               : key();
        }
        break;
      case Lists::empty:
        for (int32_t& slot : keys) slot = kNone[bits() % 4];
        break;
    }
    indices.insert(indices.end(), keys.begin(), keys.end());
  }
  return indices;
}

struct SelectedInputs {
  oracle::SelectedProblem problem;
  std::vector<double> dout;
};

inline SelectedInputs selected_inputs(const SelectedCase& c, ElementType type) {
  std::mt19937_64 bits(11);
  SelectedInputs inputs;
  oracle::SelectedProblem& p = inputs.problem;
  p.rows = c.rows;
  p.queries = c.queries;
  p.keys = c.keys;
  p.heads = c.heads;
  p.key_heads = c.key_heads;
  p.slots = c.slots;
  p.head_dim = c.head_dim;
  p.value_dim = c.value_dim;
  p.scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  p.indices = indices_of(c, bits);
  const int64_t heads = c.rows * c.queries * c.heads;
  p.q = normals(bits, type, heads * c.head_dim, c.size);
  p.kv = normals(bits, type, c.rows * c.keys * c.key_heads * c.head_dim);
  inputs.dout = normals(bits, type, heads * c.value_dim);
  if (c.sink) p.sink = normals(bits, ElementType::float32, c.heads);
  return inputs;
}

/// What a kernel computes, by name. `dkv` had 1 in it before.
struct SelectedResult {
  Values out, lse, dq, dkv, weights;
};
inline constexpr std::array kSelectedParts{
    &SelectedResult::out, &SelectedResult::lse, &SelectedResult::dq,
    &SelectedResult::dkv, &SelectedResult::weights};
inline constexpr std::array kSelectedNames{"out", "lse", "dq", "dkv",
                                           "weights"};

template <class T>
SelectedResult slow_result(const SelectedInputs& inputs) {
  const auto as_double = [](const std::vector<T>& values) {
    return Values(values.begin(), values.end());
  };
  const auto forward = oracle::selected_attention<T>(inputs.problem);
  const auto backward =
      oracle::selected_backward<T>(inputs.problem, inputs.dout);
  SelectedResult result{as_double(forward.out), as_double(forward.lse),
                        as_double(backward.dq), as_double(backward.dkv),
                        as_double(forward.weights)};
  for (double& value : result.dkv) value += 1;
  return result;
}

/// The nearest number of a type, ties to even.
inline double nearest(ElementType type, double value) {
  if (!std::isfinite(value)) return value;
  if (type == ElementType::bfloat16) return nearest_bfloat16(value);
  if (type == ElementType::float16) {
    const int exponent = std::max(std::ilogb(value), -14);
    const double step = std::ldexp(1.0, exponent - 10);
    const double result = value == 0 ? 0 : std::nearbyint(value / step) * step;
    return std::abs(result) > 65504 ? std::copysign(INFINITY, value) : result;
  }
  return value;
}

/// Everything a kernel reads and writes for one problem, in one element type.
struct SelectedArrays {
  Array q, kv, dout, out, lse, lse_with_sink, delta, dq, dkv, weights;
  std::vector<int32_t> indices;  // with gaps that name no key, or no gaps
  int64_t list_stride;
  std::vector<float> sink;
  std::vector<double> sink_in_double;

  SelectedArrays(const SelectedInputs& inputs, ElementType type,
                 Strides strides)
      : SelectedArrays(inputs.problem, type, strides) {
    const oracle::SelectedProblem& p = inputs.problem;
    q.fill(p.q);
    kv.fill(p.kv);
    dout.fill(inputs.dout);
    dkv.fill(1.0);
    list_stride = p.slots + (strides == Strides::gapped ? 5 : 0);
    const auto slots = static_cast<std::size_t>(p.slots);
    for (std::size_t i = 0; i < p.indices.size(); ++i) {
      indices.push_back(p.indices[i]);
      if ((i + 1) % slots == 0) {
        indices.resize(
            indices.size() + static_cast<std::size_t>(list_stride - p.slots),
            INT_MAX);
      }
    }
    sink.assign(p.sink.begin(), p.sink.end());
    sink_in_double = p.sink;
  }

 private:
  SelectedArrays(const oracle::SelectedProblem& p, ElementType type, Strides s)
      : q(type, s, p.rows, p.queries, p.heads, p.head_dim),
        kv(type, s, p.rows, p.keys, p.key_heads, p.head_dim),
        dout(type, s, p.rows, p.queries, p.heads, p.value_dim),
        out(dout),
        lse(accumulation(type), s, p.rows, p.queries, p.heads, 1),
        lse_with_sink(lse),
        delta(lse),
        dq(q),
        dkv(accumulation(type), s, p.rows, p.keys, p.key_heads, p.head_dim),
        weights(accumulation(type), s, p.rows, p.queries, p.key_heads, p.slots),
        list_stride(0) {}
};

inline void set_shape(SelectedAttentionArgs& args,
                      const oracle::SelectedProblem& p, ElementType type,
                      const SelectedArrays& arrays) {
  args.type = type;
  args.rows = p.rows;
  args.queries = p.queries;
  args.keys = p.keys;
  args.heads = p.heads;
  args.key_heads = p.key_heads;
  args.slots = p.slots;
  args.head_dim = static_cast<int>(p.head_dim);
  args.value_dim = static_cast<int>(p.value_dim);
  args.scale = p.scale;
  args.q = arrays.q;
  args.kv = arrays.kv;
  args.indices = {arrays.indices.data(),
                  p.queries * p.key_heads * arrays.list_stride,
                  p.key_heads * arrays.list_stride, arrays.list_stride};
}

template <class T>
void finish_forward(const oracle::SelectedProblem& p, SelectedArrays& arrays) {
  const Values lse = arrays.lse.values(), out = arrays.out.values();
  const Values dout = arrays.dout.values();
  Values with_sink, delta;
  const auto heads = static_cast<std::size_t>(p.heads);
  const auto value_dim = static_cast<std::size_t>(p.value_dim);
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const T here = static_cast<T>(lse[i]);
    T sum = 0;
    for (std::size_t c = i * value_dim; c < (i + 1) * value_dim; ++c) {
      sum += static_cast<T>(out[c]) * static_cast<T>(dout[c]);
    }
    delta.push_back(static_cast<double>(sum));
    const bool counts = !p.sink.empty() && !std::isinf(lse[i]);
    with_sink.push_back(static_cast<double>(
        counts ? oracle::log_add(here, static_cast<T>(p.sink[i % heads]))
               : here));
  }
  arrays.lse_with_sink.fill(with_sink);
  arrays.delta.fill(delta);
}

/// All three, into `arrays`.
inline void run_selected(const SelectedAttentionKernels& kernels,
                         const oracle::SelectedProblem& p, ElementType type,
                         SelectedArrays& arrays,
                         const ParallelFor& parallel_for = serial_for) {
  const bool in_double = type == ElementType::float64;
  SelectedForwardArgs forward;
  set_shape(forward, p, type, arrays);
  if (!p.sink.empty()) {
    forward.sink = arrays.sink.data();
    if (in_double) forward.sink = arrays.sink_in_double.data();
  }
  forward.out = arrays.out;
  forward.lse = arrays.lse;
  kernels.forward(forward, parallel_for);
  if (in_double) {
    finish_forward<double>(p, arrays);
  } else {
    finish_forward<float>(p, arrays);
  }
  SelectedBackwardArgs backward;
  set_shape(backward, p, type, arrays);
  backward.dout = arrays.dout;
  backward.lse = arrays.lse_with_sink;
  backward.delta = arrays.delta;
  backward.dq = arrays.dq;
  backward.dkv = arrays.dkv;
  kernels.backward(backward, parallel_for);
  SelectedWeightsArgs weights;
  set_shape(weights, p, type, arrays);
  weights.lse = arrays.lse_with_sink;
  weights.weights = arrays.weights;
  kernels.weights(weights, parallel_for);
}

inline SelectedResult result_in(const SelectedArrays& arrays) {
  return {arrays.out.values(), arrays.lse.values(), arrays.dq.values(),
          arrays.dkv.values(), arrays.weights.values()};
}

/// Twice what a plain computation with such weights is off by, and a few last
/// bits of the largest terms where that is luckily exact; 1e-12 of those in
/// double.
inline SelectedResult tolerances_of(const SelectedInputs& inputs,
                                    const SelectedResult& exact,
                                    ElementType type, Weights weights) {
  const bool in_double = type == ElementType::float64;
  SelectedInputs rounded = inputs;
  rounded.problem.storing = [=](double value) { return nearest(type, value); };
  if (weights == Weights::bfloat16) {
    rounded.problem.rounding = nearest_bfloat16;
  }
  const SelectedResult plain = in_double ? exact : slow_result<float>(rounded);
  // dq and dkv are sums of products with dP - delta, which may be equal, and
  // weights come from score - lse.
  const oracle::SelectedProblem& p = inputs.problem;
  const double dscore = p.scale * std::sqrt(static_cast<double>(p.value_dim));
  const double listed =
      std::sqrt(static_cast<double>(p.queries * p.heads * p.slots));
  const double sizes[] = {
      largest(exact.out), largest(exact.lse),
      std::max(largest(exact.dq), dscore * largest(p.kv)),
      std::max(largest(exact.dkv), dscore * largest(p.q) * listed),
      largest(exact.weights) * (1 + largest(exact.lse))};
  SelectedResult result;
  for (std::size_t i = 0; i < kSelectedParts.size(); ++i) {
    const auto part = kSelectedParts[i];
    const bool rounds = weights == Weights::bfloat16 &&
                        part != &SelectedResult::lse &&
                        part != &SelectedResult::weights;
    const bool stored =
        part == &SelectedResult::out || part == &SelectedResult::dq;
    const double bit = rounds                                    ? 0x1p-10
                       : stored && type == ElementType::bfloat16 ? 0x1p-11
                       : stored && type == ElementType::float16
                           ? 0x1p-14
                           : std::numeric_limits<float>::epsilon();
    const double twice = 2 * largest_error(plain.*part, exact.*part);
    result.*part = {in_double ? 1e-12 * std::max(1.0, sizes[i])
                              : std::max(twice, 4 * bit * sizes[i])};
  }
  return result;
}

inline void expect_result(const SelectedResult& result,
                          const SelectedResult& exact,
                          const SelectedResult& tolerances,
                          const std::string& who) {
  for (std::size_t i = 0; i < kSelectedParts.size(); ++i) {
    const auto part = kSelectedParts[i];
    expect_near(result.*part, exact.*part, (tolerances.*part)[0],
                who + " " + kSelectedNames[i]);
  }
}

inline bool gaps_kept(const SelectedArrays& arrays) {
  return arrays.out.gaps_kept() && arrays.lse.gaps_kept() &&
         arrays.dq.gaps_kept() && arrays.dkv.gaps_kept() &&
         arrays.weights.gaps_kept();
}

inline bool same_bits(const SelectedArrays& a, const SelectedArrays& b) {
  return a.out.bytes() == b.out.bytes() && a.lse.bytes() == b.lse.bytes() &&
         a.dq.bytes() == b.dq.bytes() && a.dkv.bytes() == b.dkv.bytes() &&
         a.weights.bytes() == b.weights.bytes();
}

/// Whatever an infinity or a NaN reaches in the oracle's answer, and nothing
/// else, is infinite or NaN.
inline void expect_poison_as_in_oracle(const SelectedAttentionKernels& kernels,
                                       const SelectedInputs& inputs,
                                       ElementType type) {
  const SelectedResult exact = slow_result<double>(inputs);
  SelectedArrays arrays(inputs, type, Strides::contiguous);
  run_selected(kernels, inputs.problem, type, arrays);
  const SelectedResult result = result_in(arrays);
  for (std::size_t i = 0; i < kSelectedParts.size(); ++i) {
    const Values &values = result.*kSelectedParts[i],
                 &wanted = exact.*kSelectedParts[i];
    ASSERT_EQ(values.size(), wanted.size());
    for (std::size_t j = 0; j < wanted.size(); ++j) {
      ASSERT_EQ(std::isfinite(values[j]), std::isfinite(wanted[j]))
          << kSelectedNames[i] << " at " << j << " is " << values[j] << ", not "
          << wanted[j];
    }
  }
}

inline void expect_poison_reaches_those_who_list_it(
    const SelectedAttentionKernels& kernels, ElementType type) {
  const SelectedCase c{.name = "",
                       .queries = 6,
                       .keys = 40,
                       .heads = 5,
                       .slots = 10,
                       .head_dim = 20,
                       .value_dim = 12};
  const SelectedInputs clean = selected_inputs(c, type);
  constexpr std::size_t kKey = 7, kHead = 2 * 5 + 1;  // head 1 of query 2
  for (double poison : {NAN, INFINITY, -INFINITY}) {
    for (std::size_t channel : {3u, 17u}) {
      SelectedInputs inputs = clean;
      inputs.problem.kv[kKey * 20 + channel] = poison;
      expect_poison_as_in_oracle(kernels, inputs, type);
      inputs = clean;
      inputs.problem.q[kHead * 20 + channel] = poison;
      expect_poison_as_in_oracle(kernels, inputs, type);
    }
    SelectedInputs inputs = clean;
    inputs.dout[kHead * 12 + 3] = poison;
    expect_poison_as_in_oracle(kernels, inputs, type);
  }
}

}  // namespace longspan::test
