#include <cuda_fp16.h>

#include "bench/cuda/timing.cuh"
#include "longspan/kernels/select_keys/ampere/select_keys.h"
#include "longspan/kernels/select_keys/hopper/select_keys.h"
#include "longspan/kernels/top_keys/top_keys.h"
#include "tests/kernels/cuda/choice.cuh"
#include "tests/kernels/cuda/index_inputs.cuh"

namespace longspan::bench {

namespace {

void run(const SelectKeysArgs& args) {
  Device<uint8_t> workspace(hopper::select_keys_workspace(args));
  hopper::select_keys(args, workspace.data, nullptr);
  ok(cudaDeviceSynchronize(), "select_keys");
}

}  // namespace

void time_select(bool all) {
  struct Bar {
    int64_t tokens;
    double bar, goal;
  };
  std::vector<Bar> bars = {{4096, .35, .25}, {16384, 2.8, 2.2}};
  if (all) bars.push_back({65536, 38, 30});
  for (const Bar& bar : bars) {
    const int64_t T = bar.tokens, slots = 2048;
    const IndexInputs<bf16> data({1, T, T, 32, 128, slots});
    const CausalWindows windows(T);
    Device<int32_t> indices(T * slots);
    const SelectKeysArgs args = data.args(
        slots, windows.start.data, windows.end.data, indices.data, nullptr);
    Device<uint8_t> workspace(hopper::select_keys_workspace(args));
    const double ms =
        time_ms([&] { hopper::select_keys(args, workspace.data, nullptr); }, 5);
    // The call from a CUDA graph.
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
void profile_select(bool /*all*/) {
  for (const int64_t T : {16384, 65536}) {
    const int64_t queries = (32 << 20) / 4 / T, slots = 2048;
    const IndexInputs<bf16> data({1, queries, T, 32, 128, slots});
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

void time_select_on_ampere(bool all) {
  std::vector<int64_t> tokens = {4096, 16384};
  if (all) tokens.push_back(65536);
  for (const int64_t T : tokens) {
    const int64_t slots = 2048;
    const IndexInputs<__half> data({1, T, T, 32, 128, slots});
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
