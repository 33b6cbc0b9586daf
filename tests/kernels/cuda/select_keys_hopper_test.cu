#include <atomic>

#include "longspan/kernels/select_keys/hopper/select_keys.h"
#include "tests/kernels/cuda/choice.cuh"
#include "tests/kernels/cuda/index_inputs.cuh"
#include "tests/kernels/cuda/on_device.h"

namespace longspan::test {

namespace {

void run(const SelectKeysArgs& args) {
  Device<uint8_t> workspace(hopper::select_keys_workspace(args));
  hopper::select_keys(args, workspace.data, nullptr);
  ok(cudaDeviceSynchronize(), "select_keys");
}

void check_case(const IndexShape& shape) {
  const IndexInputs<bf16> data(shape);
  const int64_t T = shape.queries, S = shape.keys, slots = shape.slots;
  const std::string name =
      text("select %lldx%lld heads %lldx%d slots %lld", (long long)T,
           (long long)S, (long long)shape.heads, shape.dim, (long long)slots);
  // Every score, as the kernel has them.
  Device<int32_t> all_keys(T * S);
  Device<float> all_scores(T * S);
  run(data.args(S, nullptr, nullptr, all_keys.data, all_scores.data));
  const auto scores = all_scores.host();
  Device<double> truth(T * S);
  true_index_scores<<<static_cast<unsigned>((T * S + 255) / 256), 256>>>(
      data.q.data, data.k.data, data.weights.data, shape, truth.data);
  const double error = distance(scores, truth.host());
  report(error < 1e-6, name + text(": scores differ by %.2e", error));

  const auto [start, end] = windows_of_every_kind(T, T, S, slots);
  const Device<int32_t> starts(start), ends(end);
  Device<int32_t> indices(T * slots);
  Device<float> chosen(T * slots);
  run(data.args(slots, starts.data, ends.data, indices.data, chosen.data));
  const auto got = indices.host();
  const auto got_scores = chosen.host();
  std::atomic<int64_t> wrong = 0, wrong_scores = 0;
  spread_over_cores(T, [&](int64_t t) {
    const auto want = sorted_choice(&scores[t * S], S, start[t], end[t], slots);
    for (int64_t j = 0; j < slots; ++j) {
      wrong += want[j] != got[t * slots + j];
      const float score = want[j] < 0 ? -INFINITY : scores[t * S + want[j]];
      wrong_scores += score != got_scores[t * slots + j];
    }
  });
  report(wrong == 0 && wrong_scores == 0,
         name + text(": %lld slots and %lld scores differ from a sort",
                     (long long)wrong.load(), (long long)wrong_scores.load()));

  // Without scores, and again: the same bits.
  bool same = true;
  for (int i = 0; i < 20; ++i) {
    indices.poison();
    run(data.args(slots, starts.data, ends.data, indices.data, nullptr));
    same = same && same_bits(got, indices.host());
  }
  report(same, name + ": twenty times the same");

  // Two rows that share their keys.
  if (T > 1) {
    SelectKeysArgs rows =
        data.args(slots, starts.data, ends.data, indices.data, nullptr);
    rows.rows = 2;
    rows.queries = T / 2;
    rows.q.row_stride = T / 2 * shape.heads * shape.dim;
    rows.k.row_stride = 0;
    rows.weights.row_stride = T / 2 * shape.heads;
    rows.start.row_stride = rows.end.row_stride = T / 2;
    rows.indices.row_stride = T / 2 * slots;
    indices.poison();
    run(rows);
    const auto both = indices.host(0, T / 2 * 2 * slots);
    report(std::equal(both.begin(), both.end(), got.begin()),
           name + ": the same as two rows");
  }

  // A score does not depend on where its query and key lie.
  if (T > 3 && S > 5) {
    SelectKeysArgs args =
        data.args(S - 5, nullptr, nullptr, all_keys.data, all_scores.data);
    args.queries = T - 3;
    args.keys = S - 5;
    args.q.data = data.q.data + 3 * shape.heads * shape.dim;
    args.weights.data = data.weights.data + 3 * shape.heads;
    args.k.data = data.k.data + 5 * shape.dim;
    run(args);
    const auto moved = all_scores.host();
    int64_t differ = 0;
    for (int64_t t = 3; t < T; ++t) {
      for (int64_t s = 5; s < S; ++s) {
        differ += moved[(t - 3) * (S - 5) + s - 5] != scores[t * S + s];
      }
    }
    report(differ == 0, name + text(": %lld scores depend on their place",
                                    (long long)differ));
  }
}

using SelectKeysOnHopper = OnHopper;

TEST_F(SelectKeysOnHopper, ChoosesAsASortOfItsScores) {
  check_case({1, 1, 1, 32, 128, 4});
  check_case({1, 67, 301, 32, 128, 16});
  check_case({1, 130, 1003, 64, 128, 100});
  check_case({1, 61, 515, 16, 64, 32});
  check_case({1, 75, 700, 8, 128, 64});
  check_case({1, 50, 257, 64, 64, 300});
  check_case({1, 33, 256, 8, 64, 8});
  check_case({1, 40, 999, 32, 64, 64});
  check_case({1, 45, 1500, 16, 128, 512});
  check_case({1, 300, 12345, 32, 128, 2048});
}

TEST_F(SelectKeysOnHopper, ChoosesForAFew) {
  check_case({1, 61, 515, 16, 64, 32});
  check_case({1, 35, 1003, 32, 128, 100});
}

}  // namespace

}  // namespace longspan::test
