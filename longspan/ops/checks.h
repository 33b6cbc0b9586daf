#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <iosfwd>
#include <string>

namespace longspan {

/// "int64 [2, 8]": what came, for messages. The text is made where it is
/// printed: checks that hold, which is nearly all of them in every call, pay
/// nothing for it. No longer than the tensor lives.
class Description {
 public:
  explicit Description(const at::Tensor& tensor) : tensor_(tensor) {}
  operator std::string() const;  // NOLINT: it is what the text is
  friend std::ostream& operator<<(std::ostream& to, const Description& text);

 private:
  const at::Tensor& tensor_;
};
inline Description describe(const at::Tensor& tensor) {
  return Description(tensor);
}

/// Integers, bool not among them.
bool is_integral(const at::Tensor& tensor);

/// "[2, 8]".
std::string shape_of(const at::Tensor& tensor);

/// Whether tensors of a type can hold a number as it is: not -100 in uint8, nor
/// 0.5 in int64. Floating point may round.
bool fits(const at::Scalar& value, at::ScalarType dtype);

/// Refuses torch.func.grad, vjp and jvp by name: they cannot look through the
/// derivatives of C++ functions. (vmap can: it calls them row by row.)
void refuse_transforms(const char* who);
[[noreturn]] void refuse_forward_mode(const char* who);

/// Whether forward-mode differentiation carries a derivative along with it.
bool has_tangent(const at::Tensor& t);

}  // namespace longspan
