#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "tests/kernels/cuda/any_shape.cuh"
#include "tests/kernels/cuda/on_device.h"

namespace longspan::test {

namespace {

using WeightsKernel = void (*)(const SelectedWeightsArgs&, void*);

template <class Element>
void check_weights_of(ListedCase<Element>& data,
                      const std::vector<double>& want, WeightsKernel kernel,
                      const std::string& who) {
  data.weights.poison();
  kernel(data.weights_args(), nullptr);
  ok(cudaDeviceSynchronize(), "weights");
  const auto got = data.weights.host();
  int64_t misplaced = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    misplaced += want[i] == 0 && got[i] != 0;
  }
  const double error = distance(got, want);
  bool same = true;
  for (int i = 0; i < 5; ++i) {
    data.weights.poison();
    kernel(data.weights_args(), nullptr);
    same = same && same_bits(got, data.weights.host());
  }
  report(error < 1e-5 && misplaced == 0 && same,
         who + data.name +
             text(": %.1e, not 0 %lld, %s", error, (long long)misplaced,
                  same ? "always the same" : "changes"));
}

struct Parts {
  bool forward, backward, weights;
};

template <class Element>
void check_case(const AnyShape& shape, Parts parts) {
  ListedCase<Element> data(shape, true);
  const int64_t slots = data.places * shape.slots;
  Device<double> scores(slots), ddots(slots), out(data.out.size);
  Device<double> only_lse(data.places), weights(data.weights.size);
  Device<double> dq(data.dq.size), plain_dq(data.dq.size);
  Device<double> plain_out(data.out.size);
  Device<double> dkv(shape.rows * shape.keys * shape.key_heads *
                     shape.head_dim);
  Device<double> plain_dkv(dkv.size);
  dkv.zero();
  plain_dkv.zero();
  ListedTruth<Element> truth{};
  data.fill(truth.args);
  truth.dout = data.dout.data;
  truth.sink = shape.sink ? data.sink.data : nullptr;
  truth.scores = scores.data;
  truth.ddots = ddots.data;
  truth.only_lse = only_lse.data;
  truth.lse = data.lse.data;
  truth.delta = data.delta.data;
  truth.weights = weights.data;
  const dim3 grid(static_cast<unsigned>(shape.heads),
                  static_cast<unsigned>(data.tokens));
  for (const bool plain : {false, true}) {
    truth.plain = plain;
    truth.out = plain ? plain_out.data : out.data;
    truth.dq = plain ? plain_dq.data : dq.data;
    truth.dkv = plain ? plain_dkv.data : dkv.data;
    true_listed_scores<<<grid, 128>>>(truth);
    true_listed_derivatives<<<grid, 128>>>(truth);
    ok(cudaDeviceSynchronize(), "truth");
  }
  if (parts.forward) {
    ampere::selected_attention_forward(data.forward_args(), nullptr);
    ok(cudaDeviceSynchronize(), "forward");
    const auto first = data.out.host();
    const auto want = out.host();
    const double error = distance(widened_all(first), want);
    const double plain = distance(plain_out.host(), want);
    const double log_error = distance(data.only_lse.host(), only_lse.host());
    bool same = true;
    for (int i = 0; i < 5; ++i) {
      data.out.poison();
      ampere::selected_attention_forward(data.forward_args(), nullptr);
      same = same && same_bits(first, data.out.host());
    }
    report(error <= 2 * plain && log_error < 1e-6 && same,
           "forward " + data.name +
               text(": %.2e (plain %.2e), lse %.1e, %s", error, plain,
                    log_error, same ? "always the same" : "changes"));
  }
  if (parts.backward) {
    data.backward();
    const auto first = data.dq.host();
    const auto want = dq.host(), want_dkv = dkv.host();
    const double error = distance(widened_all(first), want);
    const double plain = distance(plain_dq.host(), want);
    const double dkv_error = distance(data.packed_dkv(), want_dkv);
    const double dkv_plain = distance(plain_dkv.host(), want_dkv);
    bool same = true;
    for (int i = 0; i < 5; ++i) {
      data.backward();
      same = same && same_bits(first, data.dq.host());
    }
    report(error <= 2 * plain && dkv_error <= 2 * dkv_plain && same,
           "backward " + data.name +
               text(": dq %.2e (plain %.2e), dkv %.2e (plain %.2e), %s", error,
                    plain, dkv_error, dkv_plain,
                    same ? "always the same" : "changes"));
  }
  if (parts.weights) {
    const auto want = weights.host();
    check_weights_of(data, want, ampere::selected_weights, "weights ");
    if (!hopper::why_not_selected_weights(data.weights_args())) {
      check_weights_of(data, want, hopper::selected_weights, "on Hopper ");
    }
  }
}

const AnyShape kShapes[] = {
    {1, 1, 1, 1, 1, 1, 8, 8},
    {2, 3, 5, 4, 2, 0, 64, 64},
    {2, 13, 300, 64, 1, 130, 576, 512},
    {1, 37, 300, 64, 1, 200, 512, 512, true},
    {1, 14, 200, 128, 1, 70, 576, 512, true},
    {1, 23, 90, 24, 1, 65, 576, 576},
    {2, 19, 90, 16, 1, 63, 576, 512},
    {3, 11, 150, 5, 1, 100, 72, 40, true},
    {2, 17, 150, 64, 1, 100, 64, 64},
    {1, 33, 200, 48, 2, 100, 192, 128, true},
    {2, 15, 200, 64, 8, 90, 192, 128},
    {1, 26, 200, 40, 1, 70, 256, 256, true},
    {2, 9, 120, 12, 4, 33, 264, 256},
    {1, 30, 120, 32, 1, 31, 128, 128},
    {1, 21, 120, 2, 2, 64, 96, 96},
};

using AttendSelectedOnHopper = OnHopper;

/// Lists with more tiles than a kernel remembers.
TEST_F(AttendSelectedOnHopper, WeightsOfLongListsAreThoseOfTheOtherKernel) {
  ListedCase<bf16> data({1, 5, 40000, 64, 1, 36000, 576, 512}, true);
  ASSERT_FALSE(hopper::why_not_selected_weights(data.weights_args()));
  ampere::selected_attention_forward(data.forward_args(), nullptr);
  ok(cudaMemcpy(data.lse.data, data.only_lse.data, data.places * 4,
                cudaMemcpyDefault),
     "logs");
  ampere::selected_weights(data.weights_args(), nullptr);
  const auto want = widened_all(data.weights.host());
  check_weights_of(data, want, hopper::selected_weights, "on Hopper ");
}

void check_all(Parts parts) {
  for (const AnyShape& shape : kShapes) {
    check_case<bf16>(shape, parts);
    check_case<__half>(shape, parts);
  }
}

using AttendSelectedOnAmpere = OnAmpere;

TEST_F(AttendSelectedOnAmpere, ForwardOfAnyShapeErrsAtMostTwiceAsPlain) {
  check_all({.forward = true, .backward = false, .weights = false});
}

TEST_F(AttendSelectedOnAmpere, BackwardOfAnyShapeErrsAtMostTwiceAsPlain) {
  check_all({.forward = false, .backward = true, .weights = false});
}

TEST_F(AttendSelectedOnAmpere, WeightsAreThoseOfDouble) {
  check_all({.forward = false, .backward = false, .weights = true});
}

TEST_F(AttendSelectedOnAmpere, AnyShapeOfAFew) {
  const Parts all{.forward = true, .backward = true, .weights = true};
  check_case<bf16>({1, 7, 90, 40, 1, 70, 576, 512, true}, all);
  check_case<__half>({2, 5, 50, 6, 2, 33, 72, 40}, all);
  check_case<bf16>({1, 7, 90, 40, 1, 65, 192, 128}, all);
}

}  // namespace

}  // namespace longspan::test
