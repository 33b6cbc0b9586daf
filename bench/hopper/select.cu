#include <atomic>

#include "bench/hopper/selection_truth.cuh"
#include "longspan/kernels/select_keys/hopper/select_keys.h"
#include "longspan/kernels/top_keys/top_keys.h"

namespace longspan::bench {

namespace {

struct Case {
  int64_t queries, keys;
  int heads, dim;
};

struct Data {
  Case shape;
  Device<bf16> q, k;
  Device<float> weights;

  explicit Data(const Case& shape)
      : shape(shape),
        q(shape.queries * shape.heads * shape.dim),
        k(shape.keys * shape.dim),
        weights(shape.queries * shape.heads) {
    randomize(q, 1);
    randomize(k, 2);
    randomize(weights, 3);
  }

  SelectKeysArgs args(int64_t slots, const int32_t* start, const int32_t* end,
                      int32_t* indices, float* scores) const {
    SelectKeysArgs args;
    args.type = ElementType::bfloat16;
    args.rows = 1;
    args.queries = shape.queries;
    args.keys = shape.keys;
    args.heads = shape.heads;
    args.head_dim = shape.dim;
    args.slots = slots;
    args.q = array<const void*>(q.data, shape.queries, shape.heads, shape.dim);
    args.k = {k.data, 0, shape.dim, 0};
    args.weights = {weights.data, 0, shape.heads, 1};
    args.start = {start, 0, 1, 0};
    args.end = {end, 0, 1, 0};
    args.indices = {indices, 0, slots, 0};
    args.scores = {scores, 0, slots, 0};
    return args;
  }
};

void run(const SelectKeysArgs& args) {
  Device<uint8_t> workspace(hopper::select_keys_workspace(args));
  hopper::select_keys(args, workspace.data, nullptr);
  ok(cudaDeviceSynchronize(), "select_keys");
}

__global__ void true_scores(const bf16* q, const bf16* k, const float* weights,
                            double* to, int64_t queries, int64_t keys,
                            int heads, int dim) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= queries * keys) return;
  const int64_t query = i / keys, key = i % keys;
  double sum = 0;
  for (int h = 0; h < heads; ++h) {
    double dot = 0;
    for (int d = 0; d < dim; ++d) {
      dot += static_cast<double>(
                 __bfloat162float(q[(query * heads + h) * dim + d])) *
             static_cast<double>(__bfloat162float(k[key * dim + d]));
    }
    sum += weights[query * heads + h] * (dot > 0 ? dot : 0);
  }
  to[i] = sum;
}

void check_case(const Case& shape, int64_t slots) {
  const Data data(shape);
  const int64_t T = shape.queries, S = shape.keys;
  const std::string name =
      text("select %lldx%lld heads %dx%d slots %lld", (long long)T,
           (long long)S, shape.heads, shape.dim, (long long)slots);
  // Every score, as the kernel has them.
  Device<int32_t> all_keys(T * S);
  Device<float> all_scores(T * S);
  run(data.args(S, nullptr, nullptr, all_keys.data, all_scores.data));
  const auto scores = all_scores.host();
  Device<double> truth(T * S);
  true_scores<<<static_cast<unsigned>((T * S + 255) / 256), 256>>>(
      data.q.data, data.k.data, data.weights.data, truth.data, T, S,
      shape.heads, shape.dim);
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
    Case part = shape;
    part.queries -= 3;
    part.keys -= 5;
    SelectKeysArgs args =
        data.args(S - 5, nullptr, nullptr, all_keys.data, all_scores.data);
    args.queries = part.queries;
    args.keys = part.keys;
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

}  // namespace

void check_selection() {
  for (const int64_t keys : {1, 7, 2049, 5000, 8192, 8193, 20011, 70001}) {
    for (const int64_t slots : {1, 64, 2048}) check_rows(keys, slots);
  }
  check_rows(140001, 2048);
  check_rows(30001, 5000);
  check_case({1, 1, 32, 128}, 4);
  check_case({67, 301, 32, 128}, 16);
  check_case({130, 1003, 64, 128}, 100);
  check_case({61, 515, 16, 64}, 32);
  check_case({75, 700, 8, 128}, 64);
  check_case({50, 257, 64, 64}, 300);
  check_case({33, 256, 8, 64}, 8);
  check_case({40, 999, 32, 64}, 64);
  check_case({45, 1500, 16, 128}, 512);
  check_case({300, 12345, 32, 128}, 2048);
}

void check_few_selections() {
  check_rows(2049, 64);
  check_rows(9001, 2048);
  check_case({61, 515, 16, 64}, 32);
  check_case({35, 1003, 32, 128}, 100);
}

void time_selection(bool all) {
  struct Bar {
    int64_t tokens;
    double bar, goal;
  };
  std::vector<Bar> bars = {{4096, .35, .25}, {16384, 2.8, 2.2}};
  if (all) bars.push_back({65536, 38, 30});
  for (const Bar& bar : bars) {
    const int64_t T = bar.tokens, slots = 2048;
    const Data data({T, T, 32, 128});
    const CausalWindows windows(T);
    Device<int32_t> indices(T * slots);
    const SelectKeysArgs args = data.args(
        slots, windows.start.data, windows.end.data, indices.data, nullptr);
    Device<uint8_t> workspace(hopper::select_keys_workspace(args));
    const double ms =
        time_ms([&] { hopper::select_keys(args, workspace.data, nullptr); }, 5);
    // The same from a graph.
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    hopper::select_keys(args, workspace.data, stream);
    ok(cudaStreamEndCapture(stream, &graph), "capture");
    ok(cudaGraphInstantiate(&exec, graph, 0), "graph");
    const double replayed =
        time_ms([&] { ok(cudaGraphLaunch(exec, nullptr), "replay"); }, 5);
    std::printf(
        "select_keys %6lld causal 32x128 k 2048: %8.3f ms, %8.3f in a graph "
        "(bar %.2f, goal %.2f), workspace %.1f MB\n",
        (long long)T, ms, replayed, bar.bar, bar.goal, workspace.size / 1e6);
    std::fflush(stdout);
    // Some rows against a sort of the kernel's scores, by way of windows.
    const int64_t rows[] = {0, 1, 2047, 2048, 2049, T / 2 + 3, T - 2, T - 1};
    const auto count = static_cast<int64_t>(std::size(rows));
    Device<float> scores(T);
    Device<int32_t> places(T);
    int64_t wrong = 0;
    for (const int64_t t : rows) {
      SelectKeysArgs one =
          data.args(T, nullptr, nullptr, places.data, scores.data);
      one.queries = 1;
      one.q.data = data.q.data + t * 32 * 128;
      one.weights.data = data.weights.data + t * 32;
      run(one);
      const auto row = scores.host();
      const auto want = sorted_choice(row.data(), T, 0, t + 1, slots);
      const auto got = indices.host(t * slots, slots);
      for (int64_t j = 0; j < slots; ++j) wrong += want[j] != got[j];
    }
    report(wrong == 0, text("select_keys %lld: %lld of %lld rows' slots differ",
                            (long long)T, (long long)wrong, (long long)count));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    // The selection alone, on scores of the last chunk.
    const int64_t chunk = std::min<int64_t>(T, (32 << 20) / 4 / T);
    Device<float> many(chunk * T);
    randomize(many, 9);
    TopKeysArgs top;
    top.queries = chunk;
    top.keys = T;
    top.slots = slots;
    top.scores = many.data;
    top.stride = T;
    top.indices = indices.data;
    const double alone = time_ms([&] { top_keys(top, nullptr); }, 5);
    std::printf("top_keys alone, %lld rows of %lld: %.4f ms, %.3f us a row\n",
                (long long)chunk, (long long)T, alone, 1e3 * alone / chunk);
    std::fflush(stdout);
  }
}

/// One chunk of scores and the selection from it, for a profiler: the last
/// queries of 16384 and of 65536 tokens.
void profile_selection() {
  for (const int64_t T : {16384, 65536}) {
    const int64_t queries = (32 << 20) / 4 / T, slots = 2048;
    const Data data({queries, T, 32, 128});
    std::vector<int32_t> start(queries, 0), end(queries);
    std::iota(end.begin(), end.end(), static_cast<int32_t>(T - queries + 1));
    const Device<int32_t> starts(start), ends(end);
    Device<int32_t> indices(queries * slots);
    const SelectKeysArgs args =
        data.args(slots, starts.data, ends.data, indices.data, nullptr);
    Device<uint8_t> workspace(hopper::select_keys_workspace(args));
    const double ms =
        time_ms([&] { hopper::select_keys(args, workspace.data, nullptr); }, 5);
    std::printf("one chunk, %lld queries of %lld: %.4f ms\n",
                (long long)queries, (long long)T, ms);
  }
}

}  // namespace longspan::bench
