#include <cuda_fp16.h>

#include "bench/hopper/selection_truth.cuh"
#include "longspan/kernels/select_keys/ampere/select_keys.h"

namespace longspan::bench {

namespace {

struct Case {
  int64_t rows, queries, keys, heads;
  int dim;
  int64_t slots;
};

template <class Element>
__global__ void true_scores(const Element* q, const Element* k,
                            const float* weights, Case shape, double* to) {
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
struct Data {
  Case shape;
  Device<Element> q, k;
  Device<float> weights;

  explicit Data(const Case& shape)
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
    const Case& s = shape;
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

void run(const SelectKeysArgs& args) {
  Device<uint8_t> workspace(ampere::select_keys_workspace(args));
  ampere::select_keys(args, workspace.data, nullptr);
  ok(cudaDeviceSynchronize(), "select_keys");
}

template <class Element>
void check_case(const Case& shape) {
  const Data<Element> data(shape);
  const int64_t T = shape.rows * shape.queries, S = shape.keys;
  const int64_t slots = shape.slots;
  const std::string name =
      text("generic select %s %lldx%lldx%lld heads %lldx%d slots %lld",
           std::is_same_v<Element, bf16> ? "bf16" : "fp16",
           (long long)shape.rows, (long long)shape.queries, (long long)S,
           (long long)shape.heads, shape.dim, (long long)slots);
  // Every score, as the kernel has them.
  Device<int32_t> all_keys(T * S);
  Device<float> all_scores(T * S);
  run(data.args(S, nullptr, nullptr, all_keys.data, all_scores.data));
  const auto scores = all_scores.host();
  Device<double> truth(T * S);
  true_scores<<<static_cast<unsigned>((T * S + 255) / 256), 256>>>(
      data.q.data, data.k.data, data.weights.data, shape, truth.data);
  const double error = distance(scores, truth.host());

  const auto [start, end] = windows_of_every_kind(T, shape.queries, S, slots);
  const Device<int32_t> starts(start), ends(end);
  Device<int32_t> indices(T * slots);
  Device<float> chosen(T * slots), again(T * slots);
  run(data.args(slots, starts.data, ends.data, indices.data, chosen.data));
  const auto got = indices.host();
  const auto got_scores = chosen.host();
  int64_t wrong = 0, wrong_scores = 0;
  for (int64_t t = 0; t < T; ++t) {
    const auto want = sorted_choice(&scores[t * S], S, start[t], end[t], slots);
    for (int64_t j = 0; j < slots; ++j) {
      wrong += want[j] != got[t * slots + j];
      wrong_scores += (want[j] < 0 ? -INFINITY : scores[t * S + want[j]]) !=
                      got_scores[t * slots + j];
    }
  }
  const SelectKeysArgs args =
      data.args(slots, starts.data, ends.data, indices.data, nullptr);
  ScoreSelectedArgs listed{args, {}, {}};
  listed.indices = {indices.data, shape.queries * slots, slots, 0};
  listed.scores = {again.data, shape.queries * slots, slots, 0};
  ampere::score_selected(listed, nullptr);
  const bool alike = same_bits(got_scores, again.host());
  indices.poison();
  run(args);
  const bool same = same_bits(got, indices.host());
  report(error < 1e-6 && wrong == 0 && wrong_scores == 0 && alike && same,
         name + text(": scores differ by %.1e, %lld slots and %lld scores from "
                     "a sort; score_selected %s, %s again",
                     error, (long long)wrong, (long long)wrong_scores,
                     alike ? "alike" : "differs", same ? "same" : "other"));
}

}  // namespace

void check_generic_select() {
  check_case<bf16>({1, 1, 1, 32, 128, 4});
  check_case<bf16>({2, 67, 301, 32, 128, 16});
  check_case<bf16>({1, 61, 515, 1, 64, 32});
  check_case<bf16>({1, 75, 700, 5, 128, 64});
  check_case<bf16>({3, 33, 256, 24, 40, 8});
  check_case<bf16>({1, 45, 1500, 96, 128, 512});
  check_case<bf16>({1, 45, 777, 20, 256, 100});
  check_case<__half>({1, 300, 12345, 32, 128, 2048});
  check_case<__half>({2, 50, 257, 64, 64, 300});
  check_case<__half>({1, 40, 999, 8, 200, 64});
}

void check_few_generic_selections() {
  check_case<bf16>({2, 7, 301, 5, 40, 16});
  check_case<__half>({1, 9, 515, 24, 128, 100});
}

void time_generic_select(bool all) {
  std::vector<int64_t> tokens = {4096, 16384};
  if (all) tokens.push_back(65536);
  for (const int64_t T : tokens) {
    const int64_t slots = 2048;
    const Data<__half> data({1, T, T, 32, 128, slots});
    const CausalWindows windows(T);
    Device<int32_t> indices(T * slots);
    const SelectKeysArgs args = data.args(
        slots, windows.start.data, windows.end.data, indices.data, nullptr);
    Device<uint8_t> workspace(ampere::select_keys_workspace(args));
    const double ms =
        time_ms([&] { ampere::select_keys(args, workspace.data, nullptr); }, 5);
    std::printf(
        "generic select_keys %6lld causal fp16 32x128 k 2048: %.3f ms, "
        "workspace %.1f MB\n",
        (long long)T, ms, workspace.size / 1e6);
    std::fflush(stdout);
  }
}

}  // namespace longspan::bench
