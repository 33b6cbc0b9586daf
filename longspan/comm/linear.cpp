#include "longspan/comm/detail/linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "longspan/comm/detail/call.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/gradient_flow.h"

namespace longspan {

namespace {

struct Adjoint : torch::CustomClassHolder {
  explicit Adjoint(LinearMap map) : map(std::move(map)) {}
  LinearMap map;
};

class Linear : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& x, const LinearMap& map,
                            const c10::intrusive_ptr<Adjoint>& adjoint) {
    ctx->saved_data["adjoint"] = c10::IValue::make_capsule(adjoint);
    at::AutoDispatchBelowADInplaceOrView guard;
    return map(x);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto holder = ctx->saved_data["adjoint"].toCapsule();
    return {static_cast<const Adjoint&>(*holder).map(grads[0]), {}, {}};
  }
};

}  // namespace

at::Tensor apply_linear(const at::Tensor& x, LinearMap map, LinearMap adjoint) {
  refuse_transforms("longspan.comm");
  if (has_tangent(x)) refuse_forward_mode("longspan.comm");
  const GradientFlow flow(at::GradMode::is_enabled() && x.requires_grad());
  return Linear::apply(x, map,
                       c10::make_intrusive<Adjoint>(std::move(adjoint)));
}

int64_t checked_axis(const char* who, const at::Tensor& x, int64_t axis) {
  check(x.defined(), who, ": `x` is not a tensor");
  check(axis >= -x.dim() && axis < x.dim(), who, ": axis ", axis,
        " of a tensor with ", x.dim(), " axes");
  return axis < 0 ? axis + x.dim() : axis;
}

void check_sizes(const char* who, const char* name, c10::SymIntArrayRef sizes,
                 const Group& group) {
  check(std::ssize(sizes) == group.size(), who, ": `", name, "` has ",
        sizes.size(), " entries; expected one for each of the ", group.size(),
        " ranks");
  for (const c10::SymInt& size : sizes) {
    check(size >= 0, who, ": `", name, "` has an entry ", size);
  }
}

void check_extent(const char* who, const at::Tensor& x, int64_t axis,
                  const c10::SymInt& expected, const std::string& meaning) {
  check(x.sym_size(axis) == expected, who, ": axis ", axis, " of ", describe(x),
        " is not the ", expected, " ", meaning);
}

c10::SymInt sum_of(c10::SymIntArrayRef sizes) {
  c10::SymInt sum = 0;
  for (const c10::SymInt& size : sizes) sum += size;
  return sum;
}

const c10::SymInt& size_here(c10::SymIntArrayRef sizes, const Group& group) {
  return sizes[static_cast<std::size_t>(group.rank())];
}

std::vector<c10::SymInt> resized(const at::Tensor& x, int64_t axis,
                                 c10::SymInt extent) {
  auto sizes = x.sym_sizes().vec();
  sizes[static_cast<std::size_t>(axis)] = std::move(extent);
  return sizes;
}

std::vector<int64_t> firsts_of(at::IntArrayRef sizes) {
  std::vector<int64_t> firsts = {0};
  for (const int64_t size : sizes) firsts.push_back(firsts.back() + size);
  return firsts;
}

std::string linear_facts(const at::Tensor& x, std::vector<int64_t> axes,
                         std::initializer_list<at::IntArrayRef> sizes) {
  std::string text = facts_of(x, axes);
  for (const int64_t axis : axes) text += join("; axis ", axis);
  for (const at::IntArrayRef each : sizes) text += join("; sizes ", each);
  return text + gradient_facts();
}

std::vector<c10::SymInt> sym_ints(at::IntArrayRef sizes) {
  return {sizes.begin(), sizes.end()};
}

}  // namespace longspan
