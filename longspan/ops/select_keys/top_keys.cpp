#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys.h"
#include "longspan/ops/select_keys/cpu.h"
#include "longspan/ops/select_keys/cuda.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan {

namespace {

struct TopKeys {
  at::Tensor scores;
  c10::SymInt slots = 0;
  OptionalTensor start, end;

  using Result = at::Tensor;
  static constexpr auto kSchema =
      "top_keys(Tensor scores, SymInt slots, Tensor? start, Tensor? end) "
      "-> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.scores, self.slots, self.start, self.end);
  }
  Result run() const;
  Result meta() const;
};

at::Tensor TopKeys::meta() const {
  check(scores.dim() >= 1 && (scores.scalar_type() == at::kFloat ||
                              scores.scalar_type() == at::kDouble),
        "top_keys: `scores` is ", describe(scores),
        "; expected float32 or float64 [.., Tk]");
  check(scores.sym_size(-1) <= std::numeric_limits<int32_t>::max(),
        "top_keys: `scores` is ", describe(scores),
        "; keys are counted in 32 bits");
  check_slots("top_keys", slots);
  check(start.has_value() == end.has_value(),
        "top_keys: one of `start` and `end` is missing; give both or none");
  auto sizes = scores.sym_sizes().vec();
  sizes.pop_back();
  if (start) {
    check_window("top_keys", "start", *start, sizes, scores.device());
    check_window("top_keys", "end", *end, sizes, scores.device());
  }
  sizes.push_back(slots);
  return at::empty_symint(sizes, scores.options().dtype(at::kInt));
}

at::Tensor TopKeys::run() const {
  const at::Tensor checked = meta();  // also the shape of the answer
  const int64_t count = slots.expect_int();
  const int64_t keys = scores.size(-1);
  const at::Tensor rows =
      scores
          .reshape(
              {keys == 0 ? checked.numel() / std::max<int64_t>(count, 1) : -1,
               keys})
          .contiguous();
  const auto ints = scores.options().dtype(at::kInt);
  const auto window = [&](const std::optional<at::Tensor>& border,
                          int64_t otherwise) {
    return border ? as_window(border->reshape({-1}), keys)
                  : at::full({rows.size(0)}, otherwise, ints);
  };
  const at::Tensor from = window(start, 0), to = window(end, keys);
  if (scores.is_cpu()) {
    return top_keys_cpu(rows, count, from, to).view(checked.sizes());
  }
  constexpr int64_t kScores = 4 << 20;  // at a time
  const int64_t most =
      std::max<int64_t>(1, kScores / std::max<int64_t>(keys, 1));
  at::Tensor indices = checked.view({rows.size(0), count});
  if (top_keys_on_device(rows, from, to, indices)) return checked;
  // Kernels read four float32 at a time.
  const bool pads = keys % 4 != 0 && rows.scalar_type() == at::kFloat;
  for (int64_t first = 0; first < rows.size(0); first += most) {
    const int64_t n = std::min(most, rows.size(0) - first);
    const at::Tensor start_of = from.narrow(0, first, n);
    const at::Tensor end_of = to.narrow(0, first, n);
    const at::Tensor some = rows.narrow(0, first, n);
    at::Tensor chosen = indices.narrow(0, first, n);
    if (pads) {
      const at::Tensor wide = at::constant_pad_nd(some, {0, 4 - keys % 4});
      if (top_keys_on_device(wide.narrow(1, 0, keys), start_of, end_of,
                             chosen)) {
        continue;
      }
    }
    chosen.copy_(top_keys_composite(some, count, start_of, end_of));
  }
  return checked;
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<TopKeys>::add_to(m);
}

}  // namespace

at::Tensor top_keys(const at::Tensor& scores, int64_t slots,
                    const at::Tensor& start, const at::Tensor& end) {
  return Operator<TopKeys>::call(
      {scores, slots, optional(start), optional(end)});
}

}  // namespace longspan
