#include "longspan/ops/checks.h"

#include <ATen/ATen.h>
#include <ATen/FuncTorchTLS.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "longspan/core/detail/check.h"

namespace longspan {

bool is_integral(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
}

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text << (i == 0 ? "" : ", ") << tensor.sym_size(i);
  }
  text << ']';
  return text.str();
}

Description::operator std::string() const {
  if (!tensor_.defined()) return "no tensor";
  // The names that Python prints: Long is int64, Half is float16, ...
  const auto names = c10::getDtypeNames(tensor_.scalar_type());
  return std::string(names.first) + " " + shape_of(tensor_);
}

std::ostream& operator<<(std::ostream& to, const Description& text) {
  return to << std::string(text);
}

void refuse_transforms(const char* who) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const std::exception&) {
    throw std::invalid_argument(
        join(who,
             ": torch.func.grad, vjp, jvp and what is made of them cannot look "
             "through it; call backward or torch.autograd.grad instead"));
  }
}

void refuse_forward_mode(const char* who) {
  throw std::invalid_argument(
      join(who,
           ": there is no forward-mode derivative (jvp, dual tensors); call "
           "backward or torch.autograd.grad instead"));
}

bool has_tangent(const at::Tensor& t) {
  return t.defined() && t._fw_grad(/*level=*/0).defined();
}

bool fits(const at::Scalar& value, at::ScalarType dtype) {
  if (value.isBoolean() || value.equal(0) || value.equal(1)) return true;
  if (value.isComplex()) return at::isComplexType(dtype);
  if (value.isIntegral(/*includeBool=*/true) && dtype == at::kLong) return true;
  try {
    const double held = at::scalar_tensor(value, at::TensorOptions(dtype))
                            .to(at::kDouble)
                            .item<double>();
    const double asked = value.toDouble();
    return at::isIntegralType(dtype, /*includeBool=*/true)
               ? held == asked
               : std::isfinite(held) == std::isfinite(asked);
  } catch (const std::exception&) {  // torch found it out of range
    return false;
  }
}

}  // namespace longspan
