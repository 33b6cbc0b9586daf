#include "bench/cuda/timing.cuh"
#include "longspan/kernels/select_keys/ampere/select_keys.h"
#include "tests/kernels/cuda/score_inputs.cuh"

namespace longspan::bench {

namespace {

void time_case(int64_t T, int64_t heads, int dim, int64_t slots) {
  ScoreInputs<bf16> data({1, T, T, heads, slots, dim});
  fill_lists<<<static_cast<unsigned>(T), 256>>>(data.lists.data, T, slots, T,
                                                5);
  Device<float> scores(data.dscores.size), dk(data.k.size),
      dweights(data.weights.size);
  Device<bf16> dq(data.q.size);
  dk.zero();
  const auto forward = data.forward(scores.data);
  const auto backward = data.backward(dq.data, dk.data, dweights.data);
  const double ms =
      time_ms([&] { ampere::score_selected(forward, nullptr); }, 5);
  const double back =
      time_ms([&] { ampere::score_selected_backward(backward, nullptr); }, 5);
  const double pairs = 1.0 * T * slots;
  std::printf(
      "score_selected %6lld, %lld x %d, k %lld: %.3f ms (%.2f TB/s gathered), "
      "backward %.3f ms (%.2f TB/s added)\n",
      (long long)T, (long long)heads, dim, (long long)slots, ms,
      pairs * dim * 2 / ms / 1e9, back, pairs * dim * 4 / back / 1e9);
  std::fflush(stdout);
}

}  // namespace

void time_scores(bool all) {
  time_case(4096, 32, 128, 2048);
  time_case(16384, 32, 128, 2048);
  time_case(16384, 64, 128, 2048);
  time_case(16384, 16, 64, 2048);
  if (all) time_case(65536, 32, 128, 2048);
}

}  // namespace longspan::bench
