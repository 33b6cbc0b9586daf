#include "tests/kernels/cuda/on_device.h"
#include "tests/kernels/cuda/one_key_head_backward.cuh"

namespace longspan::test {

namespace {

void check_case(const AttentionShape& shape) {
  AttentionData data(shape);
  data.wild_lists();
  Step step(data);
  step.dq.poison();
  step.run();
  ok(cudaDeviceSynchronize(), "backward");
  const std::string name = "backward " + shape.name();
  const int64_t T = shape.queries;
  Device<double> dq(T * shape.heads * shape.head_dim), plain_dq(dq.size);
  Device<double> dkv(shape.keys * shape.head_dim), plain_dkv(dkv.size);
  dkv.zero();
  plain_dkv.zero();
  step.truth(0, T, false, dq, &dkv);
  step.truth(0, T, true, plain_dq, &plain_dkv);
  const auto want_dq = dq.host(), want_dkv = dkv.host();
  const double dq_error = distance(widened(step.dq.host()), want_dq);
  const double dq_plain = distance(plain_dq.host(), want_dq);
  const double dkv_error = distance(step.dkv.host(), want_dkv);
  const double dkv_plain = distance(plain_dkv.host(), want_dkv);
  report(dq_error <= 2 * dq_plain && dkv_error <= 2 * dkv_plain,
         name + text(": dq %.2e (plain %.2e), dkv %.2e (plain %.2e)", dq_error,
                     dq_plain, dkv_error, dkv_plain));
  if (T % 2 == 0) {
    const auto dq_of_one = step.dq.host();
    step.dq.poison();
    step.run(2);
    report(same_bits(dq_of_one, step.dq.host()) &&
               distance(step.dkv.host(), want_dkv) <= 2 * dkv_plain,
           name + ": the same as two rows");
  }
  // delta on the host.
  const auto o = step.out.host(), d = step.dout.host();
  std::vector<double> delta(T * shape.heads);
  for (int64_t i = 0; i < T * shape.heads; ++i) {
    for (int c = 0; c < 512; ++c) {
      delta[i] += static_cast<double>(__bfloat162float(o[i * 512 + c])) *
                  static_cast<double>(__bfloat162float(d[i * 512 + c]));
    }
  }
  const double delta_error = distance(step.delta.host(), delta);
  report(delta_error < 1e-5, name + text(": delta %.1e", delta_error));
}

using AttendSelectedOnHopper = OnHopper;

TEST_F(AttendSelectedOnHopper, BackwardErrsAtMostTwiceAsPlain) {
  check_case({2, 2, 64, 3, 576, false});
  check_case({3, 70, 64, 64, 576, false});
  check_case({5, 70, 64, 65, 576, true});
  check_case({9, 300, 64, 128, 512, false});
  check_case({30, 200, 64, 200, 512, true});
  check_case({40, 500, 64, 200, 576, false});
  check_case({12, 1000, 128, 321, 576, true});
  check_case({20, 200, 16, 100, 576, false});
  check_case({20, 200, 80, 33, 576, false});
}

TEST_F(AttendSelectedOnHopper, BackwardOfAFew) {
  check_case({9, 70, 64, 65, 576, true});
  check_case({12, 200, 80, 133, 512, true});
}

}  // namespace

}  // namespace longspan::test
