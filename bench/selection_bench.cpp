// Times the choice of keys on this CPU, without torch: one JSON object a line
// for each kernel and case, the best of several runs.
//
//   selection_bench [--queries 512] [--keys 65536] [--heads 32]
//                   [--channels 128] [--slots 2048] [--threads 2] [--runs 3]
//                   [--kernels NAME] [--type bfloat16] [--case select]
//
// Cases: select (all keys visible), causal, score and backward (of the chosen
// keys), top_keys (the selection alone, one row on one thread).

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "longspan/kernels/common/threads.h"
#include "longspan/kernels/levels/levels.h"

namespace {

using namespace longspan;

struct Options {
  int64_t queries = 512, keys = 65536, heads = 32, channels = 128;
  int64_t slots = 2048, threads = 2, runs = 3;
  std::string kernels, type, only;
};

std::size_t count_of(int64_t n) {
  return static_cast<std::size_t>(n);
}

uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

class Problem {
 public:
  Problem(ElementType type, const Options& options)
      : type_(type),
        o_(options),
        q_(normals(o_.queries * o_.heads * o_.channels)),
        k_(normals(o_.keys * o_.channels)),
        weights_(count_of(o_.queries * o_.heads)),
        start_(count_of(o_.queries), 0),
        end_(count_of(o_.queries), static_cast<int32_t>(o_.keys)),
        indices_(count_of(o_.queries * o_.slots)),
        scores_(indices_.size()) {
    std::normal_distribution<float> normal;
    for (float& weight : weights_) weight = normal(bits_);
  }

  void causal() {
    for (int64_t i = 0; i < o_.queries; ++i) {
      end_[count_of(i)] = static_cast<int32_t>(o_.keys * (i + 1) / o_.queries);
    }
  }

  void select(const KeySelectionKernels& kernels, const ParallelFor& threads) {
    SelectKeysArgs args;
    shape(args);
    args.start = {start_.data(), 0, 1, 0};
    args.end = {end_.data(), 0, 1, 0};
    args.indices = {indices_.data(), 0, o_.slots, 0};
    kernels.select(args, threads);
  }

  void score(const KeySelectionKernels& kernels, const ParallelFor& threads) {
    ScoreSelectedArgs args;
    shape(args);
    args.indices = {indices_.data(), 0, o_.slots, 0};
    args.scores = {scores_.data(), 0, o_.slots, 0};
    kernels.score(args, threads);
  }

  void backward(const KeySelectionKernels& kernels,
                const ParallelFor& threads) {
    dq_.resize(count_of(o_.queries * o_.heads * o_.channels));
    dk_.resize(count_of(o_.keys * o_.channels));
    dweights_.resize(weights_.size());
    ScoreSelectedBackwardArgs args;
    shape(args);
    args.indices = {indices_.data(), 0, o_.slots, 0};
    args.dscores = {scores_.data(), 0, o_.slots, 0};
    args.dq = {dq_.data(), 0, o_.heads * o_.channels, o_.channels};
    args.dk = {dk_.data(), 0, o_.channels, 0};
    args.dweights = {dweights_.data(), 0, o_.heads, 1};
    kernels.score_backward(args, threads);
  }

 private:
  std::vector<std::byte> normals(int64_t count) {
    std::normal_distribution<float> normal;
    const std::size_t bytes = type_ == ElementType::float32 ? 4 : 2;
    std::vector<std::byte> values(count_of(count) * bytes);
    for (std::size_t i = 0; i < count_of(count); ++i) {
      const float value = normal(bits_);
      const uint16_t half = bfloat16_bits(value);
      const void* from = &value;
      if (bytes == 2) from = &half;
      std::memcpy(values.data() + i * bytes, from, bytes);
    }
    return values;
  }
  void shape(KeyScoreArgs& args) const {
    args.type = type_;
    args.rows = 1;
    args.queries = o_.queries;
    args.keys = o_.keys;
    args.heads = o_.heads;
    args.head_dim = static_cast<int>(o_.channels);
    args.slots = o_.slots;
    args.q = {q_.data(), 0, o_.heads * o_.channels, o_.channels};
    args.k = {k_.data(), 0, o_.channels, 0};
    args.weights = {weights_.data(), 0, o_.heads, 1};
  }

  ElementType type_;
  Options o_;
  std::mt19937 bits_{1};
  std::vector<std::byte> q_, k_;
  std::vector<float> weights_;
  std::vector<int32_t> start_, end_, indices_;
  std::vector<float> scores_, dq_, dk_, dweights_;
};

/// In ms. The processor's time of all threads tells more where others use the
/// machine as well.
struct Times {
  double wall = 1e30, processor = 1e30;
};

Times best_times(int64_t runs, const std::function<void()>& run) {
  Times best;
  for (int64_t i = 0; i < runs; ++i) {
    const std::clock_t processor = std::clock();
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::milli> took =
        std::chrono::steady_clock::now() - start;
    best.wall = std::min(best.wall, took.count());
    best.processor =
        std::min(best.processor, static_cast<double>(std::clock() - processor) *
                                     1e3 / CLOCKS_PER_SEC);
  }
  return best;
}

void print(const AttentionKernels& kernels, const char* type, const char* what,
           const Options& o, int64_t threads, Times ms, double flops) {
  std::printf(
      "{\"kernels\": \"%s\", \"type\": \"%s\", \"case\": \"%s\", "
      "\"queries\": %lld, \"keys\": %lld, \"heads\": %lld, \"channels\": %lld, "
      "\"slots\": %lld, \"threads\": %lld, \"ms\": %.3f, "
      "\"processor_ms\": %.3f, \"gflops_per_core\": %.1f}\n",
      std::string(kernels.name).c_str(), type, what,
      static_cast<long long>(o.queries), static_cast<long long>(o.keys),
      static_cast<long long>(o.heads), static_cast<long long>(o.channels),
      static_cast<long long>(o.slots), static_cast<long long>(threads), ms.wall,
      ms.processor, flops / ms.processor * 1e-6);
  std::fflush(stdout);
}

void report(const AttentionKernels& kernels, ElementType type,
            const Options& o) {
  const char* const name =
      type == ElementType::float32 ? "float32" : "bfloat16";
  const ParallelFor threads = on_threads(o.threads);
  const auto wanted = [&](const char* what) {
    return o.only.empty() || o.only == what;
  };
  const double pair = 2.0 * static_cast<double>(o.heads * o.channels);
  const double all = static_cast<double>(o.queries * o.keys);
  const double chosen = static_cast<double>(o.queries * o.slots);
  Problem problem(type, o);
  const auto time = [&](const char* what, double flops, const auto& run) {
    if (!wanted(what)) return;
    const Times ms =
        best_times(o.runs, [&] { run(problem, kernels.selection, threads); });
    print(kernels, name, what, o, o.threads, ms, flops);
  };
  time("select", pair * all, std::mem_fn(&Problem::select));
  if (!wanted("select")) problem.select(kernels.selection, threads);
  time("score", pair * chosen, std::mem_fn(&Problem::score));
  time("backward", 3 * pair * chosen, std::mem_fn(&Problem::backward));
  problem.causal();
  time("causal", pair * all / 2, std::mem_fn(&Problem::select));
}

/// Gaussian scores, one row at a time.
void report_top_keys(const AttentionKernels& kernels, const Options& o) {
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  std::vector<float> scores(count_of(o.keys));
  for (float& score : scores) score = normal(bits);
  std::vector<int32_t> indices(count_of(o.slots));
  TopKeysArgs args;
  args.queries = 1;
  args.keys = args.stride = o.keys;
  args.slots = o.slots;
  args.scores = scores.data();
  args.indices = indices.data();
  const auto time = [&](const char* what) {
    const Times ms = best_times(
        20 * o.runs, [&] { kernels.selection.top_keys(args, serial_for); });
    Options one = o;
    one.queries = 1;
    one.heads = one.channels = 0;
    print(kernels, "float32", what, one, 1, ms, 0);
  };
  time("top_keys");
  std::ranges::sort(scores);
  time("top_keys of ascending scores");
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string name = words[i],
                      value = i + 1 < count ? words[i + 1] : "";
    if (name == "--kernels") {
      options.kernels = value;
    } else if (name == "--type") {
      options.type = value;
    } else if (name == "--case") {
      options.only = value;
    } else {
      int64_t* number = name == "--queries"    ? &options.queries
                        : name == "--keys"     ? &options.keys
                        : name == "--heads"    ? &options.heads
                        : name == "--channels" ? &options.channels
                        : name == "--slots"    ? &options.slots
                        : name == "--threads"  ? &options.threads
                        : name == "--runs"     ? &options.runs
                                               : nullptr;
      if (number == nullptr || std::atoll(value.c_str()) < 1) {
        std::fprintf(stderr, "selection_bench: cannot use '%s %s'\n", words[i],
                     value.c_str());
        std::exit(2);
      }
      *number = std::atoll(value.c_str());
    }
  }
  return options;
}

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  for (const AttentionKernels& kernels : attention_kernels()) {
    if (!options.kernels.empty() && options.kernels != kernels.name) continue;
    if (options.only.empty() || options.only == "top_keys") {
      report_top_keys(kernels, options);
    }
    if (options.only == "top_keys") continue;
    for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
      const char* name = type == ElementType::float32 ? "float32" : "bfloat16";
      if (!options.type.empty() && options.type != name) continue;
      report(kernels, type, options);
    }
  }
}
