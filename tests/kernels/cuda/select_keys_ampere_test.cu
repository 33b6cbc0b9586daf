#include <cuda_fp16.h>

#include "longspan/kernels/select_keys/ampere/select_keys.h"
#include "tests/kernels/cuda/choice.cuh"
#include "tests/kernels/cuda/index_inputs.cuh"
#include "tests/kernels/cuda/on_device.h"

namespace longspan::test {

namespace {

void run(const SelectKeysArgs& args) {
  Device<uint8_t> workspace(ampere::select_keys_workspace(args));
  ampere::select_keys(args, workspace.data, nullptr);
  ok(cudaDeviceSynchronize(), "select_keys");
}

template <class Element>
void check_case(const IndexShape& shape) {
  const IndexInputs<Element> data(shape);
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
  true_index_scores<<<static_cast<unsigned>((T * S + 255) / 256), 256>>>(
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

using SelectKeysOnAmpere = OnAmpere;

TEST_F(SelectKeysOnAmpere, ChoosesAsASortOfItsScores) {
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

TEST_F(SelectKeysOnAmpere, ChoosesForAFew) {
  check_case<bf16>({2, 7, 301, 5, 40, 16});
  check_case<__half>({1, 9, 515, 24, 128, 100});
}

}  // namespace

}  // namespace longspan::test
