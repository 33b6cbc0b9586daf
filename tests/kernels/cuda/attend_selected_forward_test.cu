#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "tests/kernels/cuda/on_device.h"
#include "tests/kernels/cuda/one_key_head.cuh"

namespace longspan::test {

namespace {

using Kernel = void (*)(const SelectedForwardArgs&, void*);

void check_case(const AttentionShape& shape,
                Kernel forward = hopper::selected_attention_forward) {
  AttentionData data(shape);
  data.wild_lists();
  Device<bf16> out(shape.queries * shape.heads * shape.value_dim);
  Device<float> lse(shape.queries * shape.heads);
  const SelectedForwardArgs args = data.forward_args(out, lse);
  forward(args, nullptr);
  ok(cudaDeviceSynchronize(), "forward");
  std::vector<int64_t> queries(shape.queries);
  for (int64_t t = 0; t < shape.queries; ++t) queries[t] = t;
  const std::string name = "forward " + shape.name();
  report_forward(data, out, lse, queries, name);
  const auto first = out.host();
  const auto first_lse = lse.host();
  bool same = true;
  for (int i = 0; i < 20; ++i) {
    out.poison();
    lse.poison();
    forward(args, nullptr);
    same = same && same_bits(first, out.host()) &&
           same_bits(first_lse, lse.host());
  }
  report(same, name + ": twenty times the same");
  // A rank that has some of the queries, and all keys.
  const int64_t half = shape.queries / 2, rest = shape.queries - half;
  SelectedForwardArgs part = args;
  part.queries = rest;
  part.q.data = data.q.data + half * shape.heads * shape.head_dim;
  part.indices.data = data.list.data + half * shape.slots;
  out.poison();
  lse.poison();
  forward(part, nullptr);
  const auto some = out.host(0, rest * shape.heads * shape.value_dim);
  const auto some_lse = lse.host(0, rest * shape.heads);
  same = std::equal(
      reinterpret_cast<const char*>(some.data()),
      reinterpret_cast<const char*>(some.data() + some.size()),
      reinterpret_cast<const char*>(first.data() + first.size() - some.size()));
  same = same && std::equal(some_lse.begin(), some_lse.end(),
                            first_lse.end() - some_lse.size());
  report(same, name + ": the same for some of the queries");
  // Two rows that share their keys.
  if (half == 0) return;
  SelectedForwardArgs rows = args;
  rows.rows = 2;
  rows.queries = half;
  rows.q.row_stride = half * shape.heads * shape.head_dim;
  rows.kv.row_stride = 0;
  rows.indices.row_stride = half * shape.slots;
  rows.out.row_stride = half * shape.heads * shape.value_dim;
  rows.lse.row_stride = half * shape.heads;
  out.poison();
  lse.poison();
  forward(rows, nullptr);
  const int64_t both = 2 * half * shape.heads;
  const auto out_of_both = out.host(0, both * shape.value_dim);
  const auto lse_of_both = lse.host(0, both);
  same = std::equal(
      reinterpret_cast<const char*>(out_of_both.data()),
      reinterpret_cast<const char*>(out_of_both.data() + out_of_both.size()),
      reinterpret_cast<const char*>(first.data()));
  same = same &&
         std::equal(lse_of_both.begin(), lse_of_both.end(), first_lse.begin());
  report(same, name + ": the same as two rows");
}

using AttendSelectedOnAmpere = OnAmpere;
using AttendSelectedOnHopper = OnHopper;

TEST_F(AttendSelectedOnHopper, ForwardErrsAtMostTwiceAsPlain) {
  check_case({1, 1, 64, 1, 576, false});
  check_case({700, 70, 64, 64, 576, false});
  check_case({700, 300, 64, 200, 512, true});
  check_case({5, 70, 64, 65, 576, true});
  check_case({9, 300, 64, 128, 512, false});
  check_case({150, 500, 64, 200, 512, true});
  check_case({300, 3000, 64, 2048, 576, false});
  check_case({140, 1000, 128, 321, 576, true});
  check_case({20, 200, 16, 100, 576, false});
  check_case({20, 200, 8, 640, 512, true});
  check_case({20, 200, 80, 33, 576, false});
  check_case({3, 40000, 64, 36000, 576, false});
}

TEST_F(AttendSelectedOnAmpere, ForwardErrsAtMostTwiceAsPlain) {
  const auto check = [](const AttentionShape& shape) {
    check_case(shape, ampere::selected_attention_forward);
  };
  check({1, 1, 1, 1, 8, false, 8});
  check({9, 300, 64, 128, 576, false});
  check({150, 500, 64, 200, 512, true});
  check({20, 200, 8, 640, 512, true});
  check({20, 200, 80, 33, 576, false});
  check({33, 200, 5, 100, 72, true, 40});
  check({33, 200, 17, 100, 192, false, 128});
  check({33, 200, 20, 70, 256, true, 256});
}

TEST_F(AttendSelectedOnHopper, ForwardOfAFew) {
  check_case({9, 70, 64, 65, 576, true});
  check_case({12, 200, 80, 133, 512, true});
}

}  // namespace

}  // namespace longspan::test
