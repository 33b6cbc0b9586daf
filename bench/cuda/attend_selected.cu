#include "bench/cuda/timing.cuh"
#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "tests/kernels/cuda/any_shape.cuh"
#include "tests/kernels/cuda/one_key_head_backward.cuh"

namespace longspan::bench {

void time_attention(bool all) {
  struct Line {
    AttentionShape shape;
    double bar, goal;
  };
  std::vector<Line> lines = {
      {{4096, 4096, 64, 2048, 576, false}, 760, 860},
      {{16384, 16384, 64, 2048, 576, false}, 580, 660},
      {{16384, 16384, 64, 640, 512, true}, 480, 600},
  };
  if (all) {
    lines.push_back({{65536, 65536, 64, 2048, 576, false}, 520, 600});
    lines.push_back({{16384, 16384, 128, 2048, 576, false}, 570, 660});
    lines.push_back({{65536, 65536, 128, 256, 576, false}, 0, 0});
  }
  for (const Line& line : lines) {
    const AttentionShape& shape = line.shape;
    AttentionData data(shape);
    Device<bf16> out(shape.queries * shape.heads * shape.value_dim);
    Device<float> lse(shape.queries * shape.heads);
    const SelectedForwardArgs args = data.forward_args(out, lse);
    const double ms =
        time_ms([&] { hopper::selected_attention_forward(args, nullptr); }, 5);
    const double flop = 2.0 * shape.queries * shape.heads * shape.slots *
                        (shape.head_dim + shape.value_dim);
    std::printf("forward %s: %8.3f ms, %6.1f TFLOP/s (bar %.0f, goal %.0f)\n",
                shape.name().c_str(), ms, flop / ms / 1e9, line.bar, line.goal);
    if (!all) {
      const double generic = time_ms(
          [&] { ampere::selected_attention_forward(args, nullptr); }, 3);
      std::printf("  the generic kernel: %8.3f ms, %6.1f TFLOP/s\n", generic,
                  flop / generic / 1e9);
      hopper::selected_attention_forward(args, nullptr);
    }
    const int64_t T = shape.queries;
    report_forward(data, out, lse, {0, 1, 63, 64, 1000, T / 2, T - 2, T - 1},
                   "forward " + shape.name());
  }
}

void time_attention_backward(bool all) {
  struct Line {
    AttentionShape shape;
    double bar;
  };
  std::vector<Line> lines = {
      {{4096, 4096, 64, 2048, 576, false}, 200},
      {{16384, 16384, 64, 2048, 576, false}, 200},
  };
  if (all) {
    lines.push_back({{65536, 65536, 64, 2048, 576, false}, 180});
    lines.push_back({{16384, 16384, 128, 2048, 576, false}, 0});
    lines.push_back({{16384, 16384, 64, 640, 512, true}, 0});
  }
  for (const Line& line : lines) {
    const AttentionShape& shape = line.shape;
    AttentionData data(shape);
    Step step(data);
    const double ms = time_ms([&] { step.run(); }, 3);
    const double flop = 2.0 * shape.queries * shape.heads * shape.slots *
                        (3 * shape.head_dim + 2 * 512);
    std::printf("backward %s: %8.3f ms, %6.1f TFLOP/s (bar %.0f)\n",
                shape.name().c_str(), ms, flop / ms / 1e9, line.bar);
    const std::string name = "backward " + shape.name();
    step.compare_dq(0, 4, name);
    step.compare_dq(shape.queries - 3, 3, name);
  }
}

void time_attention_of_any_shape(bool all) {
  std::vector<AnyShape> shapes = {{1, 4096, 4096, 64, 1, 2048, 576, 512},
                                  {1, 4096, 4096, 64, 1, 1024, 192, 128},
                                  {1, 4096, 4096, 64, 8, 512, 128, 128}};
  if (all) {
    shapes.push_back({1, 16384, 16384, 64, 1, 2048, 576, 512});
    shapes.push_back({1, 4096, 4096, 128, 1, 2048, 576, 512});
    shapes.push_back({1, 4096, 4096, 16, 1, 2048, 576, 512});
    shapes.push_back({1, 4096, 4096, 32, 4, 1024, 256, 256});
  }
  for (const AnyShape& shape : shapes) {
    ListedCase<bf16> data(shape, false);
    randomize(data.delta, 36, 0.1f);
    const double pairs =
        2.0 * data.tokens * shape.heads * static_cast<double>(shape.slots);
    const auto line = [&](const char* what, double channels,
                          const std::function<void()>& run) {
      const double ms = time_ms(run, 3);
      std::printf("%s %s: %8.3f ms, %6.1f TFLOP/s\n", what, data.name.c_str(),
                  ms, pairs * channels / ms / 1e9);
    };
    const double d = shape.head_dim, v = shape.value_dim;
    line("forward", d + v, [&] {
      ampere::selected_attention_forward(data.forward_args(), nullptr);
    });
    ok(cudaMemcpy(data.lse.data, data.only_lse.data, data.places * 4,
                  cudaMemcpyDefault),
       "logs");
    data.dkv.zero();
    line("backward", 3 * d + 2 * v, [&] {
      ampere::selected_attention_backward(data.backward_args(), nullptr);
    });
    line("weights", d,
         [&] { ampere::selected_weights(data.weights_args(), nullptr); });
    const auto check_sum = [&] {
      double sum = 0;
      for (const float x : data.weights.host()) sum += x;
      report(std::abs(sum / static_cast<double>(data.places) - 1) < 1e-5,
             "weights of a head sum to 1");
    };
    check_sum();
    if (hopper::why_not_attend_selected(data.forward_args())) continue;
    data.weights.poison();
    line("weights on Hopper", d,
         [&] { hopper::selected_weights(data.weights_args(), nullptr); });
    check_sum();
    data.backward();
    const size_t last = 64 * shape.heads * shape.head_dim;  // queries
    const auto some_dq = [&] {
      return widened_all(data.dq.host(data.dq.size - last));
    };
    const auto dq = some_dq(), dkv = widened_all(data.dkv.host());
    data.dq.poison();
    data.dkv.zero();
    hopper::selected_attention_backward(data.backward_args(), nullptr);
    const double dq_apart = distance(some_dq(), dq);
    const double dkv_apart = distance(data.dkv.host(), dkv);
    report(dq_apart < 1e-2 && dkv_apart < 1e-2,
           text("apart from the Hopper kernel: dq %.1e, dkv %.1e", dq_apart,
                dkv_apart));
  }
}

}  // namespace longspan::bench
