#include "longspan/ops/rotate_channels.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace {

constexpr const char* kWho = "rotate_channels";

void check_table(const char* name, const at::Tensor& table,
                 const at::Tensor& x) {
  check(table.is_floating_point() && table.dim() >= 1 &&
            table.dim() <= x.dim() && table.device() == x.device(),
        kWho, ": `", name, "` is ", describe(table), " on ", table.device(),
        " but `x` ", describe(x), " on ", x.device(),
        "; expected [.., pairs] with axes that broadcast to those of x");
  for (int64_t axis = 2; axis <= table.dim(); ++axis) {
    check(table.sym_size(-axis) == 1 ||
              table.sym_size(-axis) == x.sym_size(-axis),
          kWho, ": `", name, "` is ", describe(table), " but `x` ", describe(x),
          "; axis ", -axis, " does not broadcast");
  }
}

/// The first channel that turns.
c10::SymInt check_rotate(const at::Tensor& x, const at::Tensor& cos,
                         const at::Tensor& sin, int64_t first) {
  check(x.is_floating_point() && x.dim() >= 1, kWho, ": `x` is ", describe(x),
        "; expected floating [.., channels]");
  check_table("cos", cos, x);
  check_table("sin", sin, x);
  check(cos.sym_size(-1) == sin.sym_size(-1), kWho, ": `cos` is ",
        describe(cos), " but `sin` ", describe(sin), "; the pairs differ");
  const c10::SymInt begin =
      first < 0 ? x.sym_size(-1) + first : c10::SymInt(first);
  check(begin >= 0 && begin <= x.sym_size(-1) - cos.sym_size(-1) * 2, kWho,
        ": ", cos.sym_size(-1), " pairs from channel ", first,
        " on do not fit the ", x.sym_size(-1), " channels of `x`");
  return begin;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, int64_t first, bool interleaved,
                  bool inverse) {
  const int64_t begin = check_rotate(x, cos, sin, first).expect_int();
  const int64_t pairs = cos.size(-1), end = begin + 2 * pairs;
  const auto sums = accumulation_type(x.scalar_type());
  at::Tensor out = at::empty(x.sizes(), x.options());
  out.slice(-1, 0, begin).copy_(x.slice(-1, 0, begin));
  out.slice(-1, end).copy_(x.slice(-1, end));
  const auto half = [&](const at::Tensor& t, int64_t which) {
    return interleaved ? t.slice(-1, begin + which, end, 2)
                       : t.narrow(-1, begin + which * pairs, pairs);
  };
  const at::Tensor a = half(x, 0).to(sums), b = half(x, 1).to(sums);
  const at::Tensor c = cos.to(sums);
  const at::Tensor s = inverse ? sin.to(sums).neg() : sin.to(sums);
  half(out, 0).copy_((a * c).sub_(b * s));
  half(out, 1).copy_((a * s).add_(b * c));
  return out;
}

at::Tensor rotate_meta(const at::Tensor& x, const at::Tensor& cos,
                       const at::Tensor& sin, int64_t first,
                       bool /*interleaved*/, bool /*inverse*/) {
  check_rotate(x, cos, sin, first);
  return at::empty_symint(x.sym_sizes(), x.options());
}

const auto& rotate_op() {
  static const auto op = find_op<decltype(rotate)>("longspan::rotate_channels");
  return op;
}

class RotateFunction : public torch::autograd::Function<RotateFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, int64_t first,
                            bool interleaved, bool inverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["first"] = first;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["inverse"] = inverse;
    return rotate_op().call(x, cos, sin, first, interleaved, inverse);
  }

  /// Through the dispatcher, so that the derivative has one too.
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {rotate_op().call(grads[0], saved[0], saved[1],
                             ctx->saved_data["first"].toInt(),
                             ctx->saved_data["interleaved"].toBool(),
                             !ctx->saved_data["inverse"].toBool()),
            {},
            {},
            {},
            {},
            {}};
  }
};

at::Tensor rotate_autograd(const at::Tensor& x, const at::Tensor& cos,
                           const at::Tensor& sin, int64_t first,
                           bool interleaved, bool inverse) {
  check(!at::GradMode::is_enabled() ||
            !(cos.requires_grad() || sin.requires_grad()),
        kWho, ": `cos` and `sin` carry no gradient; detach them");
  refuse_transforms(kWho);
  if (has_tangent(x)) refuse_forward_mode(kWho);
  return RotateFunction::apply(x, cos, sin, first, interleaved, inverse);
}

}  // namespace

at::Tensor rotate_channels(const at::Tensor& x, const at::Tensor& cos,
                           const at::Tensor& sin,
                           const RotateOptions& options) {
  return rotate_op().call(x, cos, sin, options.first,
                          options.pairs == ChannelPairs::interleaved,
                          options.inverse);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "rotate_channels(Tensor x, Tensor cos, Tensor sin, int first, "
      "bool interleaved, bool inverse) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("rotate_channels", rotate_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("rotate_channels", rotate);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("rotate_channels", rotate);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("rotate_channels", rotate_autograd);
}

}  // namespace longspan
