// Times attention to listed keys, without torch: one JSON object a line for
// each kernel, element type and direction, the best of several runs, in time of
// the clock and of the processor (all threads together).
//
//   selected_bench [--queries 64] [--keys 8192] [--heads 64] [--slots 2048]
//                  [--head_dim 576] [--value_dim 512] [--threads 2] [--runs 5]
//                  [--kernels NAME] [--type bfloat16]
//
// Lists are random and ascending. Each kernel first answers a small problem
// like the portable one does.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "longspan/kernels/common/threads.h"
#include "longspan/kernels/levels/levels.h"

namespace {

using namespace longspan;

struct Options {
  int64_t queries = 64, keys = 8192, heads = 64, slots = 2048;
  int64_t head_dim = 576, value_dim = 512, threads = 2, runs = 5;
  std::string kernels, type;
};

constexpr const char* kTypeNames[] = {"float32", "bfloat16", "float16",
                                      "float64"};

uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_of(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

/// An array of float32 or bfloat16.
class Elements {
 public:
  Elements(ElementType type, int64_t count)
      : bytes_(type == ElementType::float32 ? 4 : 2),
        data_(static_cast<std::size_t>(count) * bytes_) {}

  void fill(std::mt19937& bits) {
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < size(); ++i) put(i, normal(bits));
  }
  std::size_t size() const { return data_.size() / bytes_; }
  float get(std::size_t i) const {
    float value;
    uint16_t half;
    std::memcpy(&half, &data_[i * bytes_], sizeof half);
    if (bytes_ == 2) return float_of(half);
    std::memcpy(&value, &data_[i * bytes_], sizeof value);
    return value;
  }
  void* data() { return data_.data(); }

 private:
  void put(std::size_t i, float value) {
    const uint16_t half = bfloat16_bits(value);
    std::memcpy(&data_[i * bytes_],
                bytes_ == 2 ? static_cast<const void*>(&half) : &value, bytes_);
  }

  std::size_t bytes_;
  std::vector<std::byte> data_;
};

/// One problem, with room for all answers.
class Problem {
 public:
  Problem(ElementType type, const Options& o)
      : type_(type),
        o_(o),
        q_(type, o.queries * o.heads * o.head_dim),
        kv_(type, o.keys * o.head_dim),
        dout_(type, o.queries * o.heads * o.value_dim),
        out_(dout_),
        dq_(q_),
        dkv_(static_cast<std::size_t>(o.keys * o.head_dim)),
        lse_(static_cast<std::size_t>(o.queries * o.heads)),
        delta_(lse_.size(), 0.1f),
        weights_(static_cast<std::size_t>(o.queries * o.slots)) {
    std::mt19937 bits(1);
    for (Elements* array : {&q_, &kv_, &dout_}) array->fill(bits);
    std::vector<int32_t> keys(static_cast<std::size_t>(o.keys));
    std::iota(keys.begin(), keys.end(), 0);
    for (int64_t query = 0; query < o.queries; ++query) {
      std::ranges::sample(keys, std::back_inserter(indices_), o.slots, bits);
    }
  }

  void forward(const AttentionKernels& kernels, const ParallelFor& threads) {
    SelectedForwardArgs args;
    shape(args);
    args.out = heads<void*>(out_.data(), o_.value_dim);
    args.lse = heads<void*>(lse_.data(), 1);
    kernels.selected.forward(args, threads);
  }

  void backward(const AttentionKernels& kernels, const ParallelFor& threads) {
    std::ranges::fill(dkv_, 0.0f);
    SelectedBackwardArgs args;
    shape(args);
    args.dout = heads<const void*>(dout_.data(), o_.value_dim);
    args.lse = heads<const void*>(lse_.data(), 1);
    args.delta = heads<const void*>(delta_.data(), 1);
    args.dq = heads<void*>(dq_.data(), o_.head_dim);
    args.dkv = {dkv_.data(), 0, o_.head_dim, 0};
    kernels.selected.backward(args, threads);
  }

  void weigh(const AttentionKernels& kernels, const ParallelFor& threads) {
    SelectedWeightsArgs args;
    shape(args);
    args.lse = heads<const void*>(lse_.data(), 1);
    args.weights = {weights_.data(), 0, o_.slots, 0};
    kernels.selected.weights(args, threads);
  }

  /// The largest difference between answers.
  double difference(const Problem& other) const {
    double worst = 0;
    const auto differ = [&](float a, float b) {
      worst = std::max<double>(worst, std::abs(a - b));
    };
    for (auto array : {&Problem::out_, &Problem::dq_}) {
      const Elements &a = this->*array, &b = other.*array;
      for (std::size_t i = 0; i < a.size(); ++i) differ(a.get(i), b.get(i));
    }
    for (auto array : {&Problem::lse_, &Problem::dkv_, &Problem::weights_}) {
      const auto &a = this->*array, &b = other.*array;
      for (std::size_t i = 0; i < a.size(); ++i) differ(a[i], b[i]);
    }
    return worst;
  }

  /// Of direction 0, 1 or 2: forward, backward, weights.
  double flops(int direction) const {
    const int64_t d = o_.head_dim, dv = o_.value_dim;
    const int64_t channels[] = {d + dv, 3 * d + 2 * dv, d};
    return 2.0 * static_cast<double>(o_.queries * o_.heads * o_.slots *
                                     channels[direction]);
  }

 private:
  template <class Pointer>
  TokenArray<Pointer> heads(Pointer data, int64_t channels) const {
    return {data, 0, o_.heads * channels, channels};
  }
  void shape(SelectedAttentionArgs& args) {
    args.type = type_;
    args.rows = 1;
    args.queries = o_.queries;
    args.keys = o_.keys;
    args.heads = o_.heads;
    args.slots = o_.slots;
    args.head_dim = static_cast<int>(o_.head_dim);
    args.value_dim = static_cast<int>(o_.value_dim);
    args.scale = 1 / std::sqrt(static_cast<double>(o_.head_dim));
    args.q = heads<const void*>(q_.data(), o_.head_dim);
    args.kv = {kv_.data(), 0, o_.head_dim, 0};
    args.indices = {indices_.data(), 0, o_.slots, 0};
  }

  ElementType type_;
  Options o_;
  Elements q_, kv_, dout_, out_, dq_;
  std::vector<float> dkv_, lse_, delta_, weights_;
  std::vector<int32_t> indices_;
};

void run(Problem& problem, int direction, const AttentionKernels& kernels,
         const ParallelFor& threads) {
  if (direction == 0) problem.forward(kernels, threads);
  if (direction == 1) problem.backward(kernels, threads);
  if (direction == 2) problem.weigh(kernels, threads);
}

/// To the portable kernel's answer on a small problem.
double difference(const AttentionKernels& kernels, ElementType type,
                  Options options) {
  options.queries = 3;
  options.keys = 150;
  options.slots = 100;
  Problem ours(type, options), portable = ours;
  for (int direction = 0; direction < 3; ++direction) {
    run(ours, direction, kernels, serial_for);
    run(portable, direction, attention_kernels().front(), serial_for);
  }
  return ours.difference(portable);
}

Options parse(int count, char** words) {
  Options options;
  const std::pair<std::string, int64_t*> numbers[] = {
      {"--queries", &options.queries},   {"--keys", &options.keys},
      {"--heads", &options.heads},       {"--slots", &options.slots},
      {"--head_dim", &options.head_dim}, {"--value_dim", &options.value_dim},
      {"--threads", &options.threads},   {"--runs", &options.runs}};
  for (int i = 1; i < count; i += 2) {
    const std::string name = words[i],
                      value = i + 1 < count ? words[i + 1] : "";
    if (name == "--kernels") {
      options.kernels = value;
      continue;
    }
    if (name == "--type") {
      options.type = value;
      continue;
    }
    const auto* number = std::ranges::find(
        numbers, name, &std::pair<std::string, int64_t*>::first);
    if (number == std::end(numbers) || std::atoll(value.c_str()) < 1) {
      std::fprintf(stderr, "selected_bench: cannot use '%s %s'\n", words[i],
                   value.c_str());
      std::exit(2);
    }
    *number->second = std::atoll(value.c_str());
  }
  return options;
}

void report(const AttentionKernels& kernels, ElementType type,
            const Options& options) {
  const char* type_name = kTypeNames[static_cast<int>(type)];
  const std::string name(kernels.name);
  const double error = difference(kernels, type, options);
  if (!(error < (type == ElementType::float32 ? 1e-3 : 0.2))) {
    std::fprintf(stderr,
                 "selected_bench: %s answers %s otherwise than portable, "
                 "by %g\n",
                 name.c_str(), type_name, error);
    std::exit(1);
  }
  Problem problem(type, options);
  const ParallelFor threads = on_threads(options.threads);
  constexpr const char* kDirections[] = {"forward", "backward", "weights"};
  double best[3] = {1e30, 1e30, 1e30}, cpu[3] = {1e30, 1e30, 1e30};
  for (int64_t i = 0; i < options.runs; ++i) {
    for (int direction = 0; direction < 3; ++direction) {
      const auto start = std::chrono::steady_clock::now();
      const std::clock_t cpu_start = std::clock();
      run(problem, direction, kernels, threads);
      const std::chrono::duration<double> took =
          std::chrono::steady_clock::now() - start;
      best[direction] = std::min(best[direction], took.count());
      cpu[direction] = std::min(
          cpu[direction],
          static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC);
    }
  }
  for (int direction = 0; direction < 3; ++direction) {
    std::printf(
        "{\"kernels\": \"%s\", \"type\": \"%s\", \"direction\": \"%s\", "
        "\"queries\": %lld, \"keys\": %lld, \"heads\": %lld, \"slots\": %lld, "
        "\"threads\": %lld, \"ms\": %.2f, \"gflops\": %.1f, "
        "\"cpu_ms\": %.2f, \"difference\": %.2g}\n",
        name.c_str(), type_name, kDirections[direction],
        static_cast<long long>(options.queries),
        static_cast<long long>(options.keys),
        static_cast<long long>(options.heads),
        static_cast<long long>(options.slots),
        static_cast<long long>(options.threads), best[direction] * 1e3,
        problem.flops(direction) / best[direction] * 1e-9, cpu[direction] * 1e3,
        error);
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
