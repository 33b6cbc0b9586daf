#include "longspan/kernels/top_keys/top_keys.h"
#include "tests/kernels/cuda/choice.cuh"
#include "tests/kernels/cuda/on_device.h"

namespace longspan::test {

namespace {

/// Rows that break selectors.
void check_rows(int64_t keys, int64_t slots) {
  const std::vector<std::string> names = {
      "all equal",  "all zero",  "one bin but one", "both zeros", "NaN",
      "infinite",   "ascending", "descending",      "normal",     "negative",
      "few values", "tiny",      "NaN and ties",    "spiked",     "mostly zero",
      "all NaN",    "-inf",      "equal blocks",    "late ones"};
  const int64_t stride = (keys + 3) / 4 * 4, rows = names.size() * 8;
  std::vector<float> scores(rows * stride, NAN);
  std::vector<int32_t> start(rows), end(rows);
  spread_over_cores(rows, [&](int64_t row) {
    const std::string& name = names[row / 8];
    float* to = &scores[row * stride];
    for (int64_t i = 0; i < keys; ++i) {
      const auto z = mixed(row * keys + i);
      const float x = normal(row, i);
      to[i] = x;
      if (name == "all equal") to[i] = 3.25f;
      if (name == "all zero") to[i] = 0.f;
      if (name == "one bin but one") to[i] = i == keys / 2 ? 100.f : 1.f;
      if (name == "both zeros") to[i] = z & 1 ? 0.f : -0.f;
      if (name == "NaN" && z % 50 == 0) to[i] = NAN;
      if (name == "infinite" && z % 9 == 0)
        to[i] = z & 64 ? INFINITY : -INFINITY;
      if (name == "ascending") to[i] = static_cast<float>(i);
      if (name == "descending") to[i] = static_cast<float>(-i);
      if (name == "negative") to[i] = -std::fabs(x) - 5;
      if (name == "few values") to[i] = static_cast<float>(z % 5);
      if (name == "tiny") to[i] = x * 1e-40f;
      if (name == "NaN and ties") to[i] = z % 3 ? 1.f : NAN;
      if (name == "spiked") to[i] = x * (z % 97 == 0 ? 1e30f : 1.f);
      if (name == "mostly zero") to[i] = z % 100 ? 0.f : x;
      if (name == "all NaN") to[i] = z & 1 ? NAN : -NAN;
      if (name == "-inf") to[i] = z % 1000 ? -INFINITY : x;
      if (name == "equal blocks") to[i] = static_cast<float>(i / 700 % 13);
      if (name == "late ones") to[i] = x + (i > keys - slots ? 50.f : 0.f);
    }
    const int64_t sizes[] = {keys,      keys,  0,         1,
                             slots - 1, slots, slots + 1, keys / 2};
    start[row] = row % 8 == 0 ? 0 : static_cast<int32_t>(row % 5);
    end[row] = static_cast<int32_t>(start[row] + sizes[row % 8]);
  });
  const Device<float> on_device(scores);
  const Device<int32_t> starts(start), ends(end);
  Device<int32_t> indices(rows * slots);
  TopKeysArgs args;
  args.queries = rows;
  args.keys = keys;
  args.slots = slots;
  args.scores = on_device.data;
  args.stride = stride;
  args.start = starts.data;
  args.end = ends.data;
  args.indices = indices.data;
  top_keys(args, nullptr);
  ok(cudaDeviceSynchronize(), "top_keys");
  const auto got = indices.host();
  std::vector<char> wrong(rows);
  spread_over_cores(rows, [&](int64_t row) {
    const auto want =
        sorted_choice(&scores[row * stride], keys, start[row], end[row], slots);
    wrong[row] = !std::equal(want.begin(), want.end(), &got[row * slots]);
  });
  std::string bad;
  for (int64_t row = 0; row < rows; ++row) {
    if (wrong[row]) {
      bad += " [" + names[row / 8] + " " + std::to_string(row % 8) + "]";
    }
  }
  report(bad.empty(),
         text("top_keys %lld of %lld:", (long long)slots, (long long)keys) +
             (bad.empty() ? " every odd row" : bad));
}

using TopKeysOnAmpere = OnAmpere;

TEST_F(TopKeysOnAmpere, ChoosesAsASort) {
  for (const int64_t keys : {1, 7, 2049, 5000, 8192, 8193, 20011, 70001}) {
    for (const int64_t slots : {1, 64, 2048}) check_rows(keys, slots);
  }
  check_rows(140001, 2048);
  check_rows(30001, 5000);
}

TEST_F(TopKeysOnAmpere, ChoosesForAFew) {
  check_rows(2049, 64);
  check_rows(9001, 2048);
}

}  // namespace

}  // namespace longspan::test
