// Times the attention kernels of this CPU, without torch: one JSON object a
// line for each kernel, element type and direction, the best of several runs.
//
//   tile_bench [--tokens 4096] [--heads 8] [--channels 128] [--threads 1]
//              [--runs 5] [--kernels NAME] [--type bfloat16]
//
// Causal, arrays lie [tokens, heads, channels]. Each kernel first answers a
// small problem like the portable one does.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "longspan/kernels/common/threads.h"
#include "longspan/kernels/levels/levels.h"

namespace {

using namespace longspan;

struct Options {
  int64_t tokens = 4096, heads = 8, channels = 128, threads = 1, runs = 5;
  std::string kernels, type;
};

constexpr const char* kTypeNames[] = {"float32", "bfloat16", "float16",
                                      "float64"};

uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// One problem, float32 or bfloat16, with room for both directions' answers.
class Problem {
 public:
  Problem(ElementType type, int64_t tokens, int64_t heads, int64_t channels)
      : type_(type), tokens_(tokens), heads_(heads), channels_(channels) {
    std::mt19937 bits(1);
    std::normal_distribution<float> normal;
    for (auto* array : {&q_, &k_, &v_, &dout_}) {
      array->resize(size() * element_bytes());
      for (std::size_t i = 0; i < size(); ++i) put(*array, i, normal(bits));
    }
    for (auto* array : {&out_, &dq_, &dk_, &dv_}) array->resize(size());
    lse_.resize(size() / static_cast<std::size_t>(channels));
    delta_.resize(lse_.size(), 0.1f);
    KeyLines causal;
    causal.queries = {0, tokens};
    causal.end_shift = 1;
    causal.end_max = tokens;
    lines_ = {causal};
  }

  void forward(const AttentionKernels& kernels, const ParallelFor& threads) {
    std::ranges::fill(out_, 0.0f);
    std::ranges::fill(lse_, -INFINITY);
    AttentionForwardArgs args;
    shape(args);
    args.out = array<void*>(out_.data());
    args.lse = {lse_.data(), tokens_ * heads_, heads_, 1};
    kernels.forward(args, threads);
  }

  void backward(const AttentionKernels& kernels, const ParallelFor& threads) {
    for (auto* array : {&dq_, &dk_, &dv_}) std::ranges::fill(*array, 0.0f);
    AttentionBackwardArgs args;
    shape(args);
    args.dout = array<const void*>(dout_.data());
    args.lse = {lse_.data(), tokens_ * heads_, heads_, 1};
    args.delta = {delta_.data(), tokens_ * heads_, heads_, 1};
    args.dq = array<void*>(dq_.data());
    args.dk = array<void*>(dk_.data());
    args.dv = array<void*>(dv_.data());
    kernels.backward(args, threads);
  }

  /// All answers, one after another.
  std::vector<float> answers() const {
    std::vector<float> all;
    for (const auto* array : {&out_, &lse_, &dq_, &dk_, &dv_}) {
      all.insert(all.end(), array->begin(), array->end());
    }
    return all;
  }

  /// Of the visible pairs: 2 products forward, 5 backward.
  double flops(int products) const {
    return static_cast<double>(products * heads_ * channels_) *
           static_cast<double>(tokens_ * (tokens_ + 1));
  }

 private:
  std::size_t size() const {
    return static_cast<std::size_t>(tokens_ * heads_ * channels_);
  }
  std::size_t element_bytes() const {
    return type_ == ElementType::float32 ? 4 : 2;
  }
  void put(std::vector<std::byte>& array, std::size_t i, float value) const {
    const uint16_t half = bfloat16_bits(value);
    const void* from = &value;
    if (type_ != ElementType::float32) from = &half;
    std::memcpy(array.data() + i * element_bytes(), from, element_bytes());
  }
  template <class Pointer>
  TokenArray<Pointer> array(Pointer data) const {
    return {data, tokens_ * heads_ * channels_, heads_ * channels_, channels_};
  }
  void shape(AttentionArgs& args) const {
    args.type = type_;
    args.rows = 1;
    args.queries = args.keys = tokens_;
    args.heads = heads_;
    args.head_dim = args.value_dim = static_cast<int>(channels_);
    args.scale = 1 / std::sqrt(static_cast<double>(channels_));
    args.q = array<const void*>(q_.data());
    args.k = array<const void*>(k_.data());
    args.v = array<const void*>(v_.data());
    args.lines = lines_;
  }

  ElementType type_;
  int64_t tokens_, heads_, channels_;
  std::vector<std::byte> q_, k_, v_, dout_;
  std::vector<float> out_, lse_, delta_, dq_, dk_, dv_;
  std::vector<KeyLines> lines_;
};

/// The largest difference to the portable kernel's answer on a small problem.
double difference(const AttentionKernels& kernels, ElementType type,
                  const Options& options) {
  Problem ours(type, 200, 2, options.channels), portable = ours;
  for (auto [problem, by] : {std::pair{&ours, &kernels},
                             {&portable, &attention_kernels().front()}}) {
    problem->forward(*by, serial_for);
    problem->backward(*by, serial_for);
  }
  const std::vector<float> a = ours.answers(), b = portable.answers();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max<double>(worst, std::abs(a[i] - b[i]));
  }
  return worst;
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
    } else {
      int64_t* number = name == "--tokens"     ? &options.tokens
                        : name == "--heads"    ? &options.heads
                        : name == "--channels" ? &options.channels
                        : name == "--threads"  ? &options.threads
                        : name == "--runs"     ? &options.runs
                                               : nullptr;
      if (number == nullptr || std::atoll(value.c_str()) < 1) {
        std::fprintf(stderr, "tile_bench: cannot use '%s %s'\n", words[i],
                     value.c_str());
        std::exit(2);
      }
      *number = std::atoll(value.c_str());
    }
  }
  return options;
}

void report(const AttentionKernels& kernels, ElementType type,
            const Options& options) {
  const char* type_name = kTypeNames[static_cast<int>(type)];
  const double error = difference(kernels, type, options);
  if (!(error < (type == ElementType::float32 ? 1e-3 : 0.1))) {
    std::fprintf(stderr,
                 "tile_bench: %s answers %s otherwise than portable, "
                 "by %g\n",
                 std::string(kernels.name).c_str(), type_name, error);
    std::exit(1);
  }
  Problem problem(type, options.tokens, options.heads, options.channels);
  const ParallelFor threads = on_threads(options.threads);
  double best[2] = {1e30, 1e30};
  for (int64_t run = 0; run < options.runs; ++run) {
    for (int direction = 0; direction < 2; ++direction) {
      const auto start = std::chrono::steady_clock::now();
      if (direction == 0) {
        problem.forward(kernels, threads);
      } else {
        problem.backward(kernels, threads);
      }
      const std::chrono::duration<double> took =
          std::chrono::steady_clock::now() - start;
      best[direction] = std::min(best[direction], took.count());
    }
  }
  for (int direction = 0; direction < 2; ++direction) {
    std::printf(
        "{\"kernels\": \"%s\", \"type\": \"%s\", \"direction\": \"%s\", "
        "\"mask\": \"causal\", \"tokens\": %lld, \"heads\": %lld, "
        "\"channels\": %lld, \"threads\": %lld, \"ms\": %.2f, "
        "\"gflops\": %.1f, \"difference\": %.2g}\n",
        std::string(kernels.name).c_str(), type_name,
        direction == 0 ? "forward" : "backward",
        static_cast<long long>(options.tokens),
        static_cast<long long>(options.heads),
        static_cast<long long>(options.channels),
        static_cast<long long>(options.threads), best[direction] * 1e3,
        problem.flops(direction == 0 ? 2 : 5) / best[direction] * 1e-9, error);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  for (const AttentionKernels& kernels : attention_kernels()) {
    if (!options.kernels.empty() && options.kernels != kernels.name) continue;
    for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
      const char* name = kTypeNames[static_cast<int>(type)];
      if (!options.type.empty() && options.type != name) continue;
      report(kernels, type, options);
    }
  }
}
