#include "longspan/ops/sinkhorn.h"

#include <ATen/ATen.h>

#include <ranges>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/sinkhorn/sinkhorn.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/threads.h"

namespace longspan {

namespace {

constexpr int64_t kMostRepeats = 10'000;
/// Up to this size the kernel holds a matrix in the cache; larger ones, and
/// those on a device, take torch's operations.
constexpr int64_t kKernelNumbers = 4096;

void check_sinkhorn(const at::Tensor& x, int64_t repeat, double eps) {
  const char* const who = "sinkhorn_normalize";
  check(x.is_floating_point() && x.dim() >= 2, who, ": `x` is ", describe(x),
        "; expected floating [.., rows, columns]");
  check(repeat >= 1 && repeat <= kMostRepeats, who, ": `repeat` is ", repeat,
        "; expected 1 to ", kMostRepeats);
  check(eps >= 0, who, ": `eps` is ", eps, "; expected 0 or more");
}

SinkhornSize size_of_matrices(const at::Tensor& x, int64_t repeat, double eps) {
  const int64_t numbers = x.size(-1) * x.size(-2);
  return {.matrices = numbers == 0 ? 0 : x.numel() / numbers,
          .rows = x.size(-2),
          .columns = x.size(-1),
          .repeat = repeat,
          .eps = eps};
}

/// In what sums are kept in, and contiguous.
at::Tensor sinkhorn_input(const at::Tensor& x) {
  return x.to(accumulation_type(x.scalar_type())).contiguous();
}

template <class Body>
void with_numbers(const at::Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kDouble) {
    body(double());
  } else {
    body(float());
  }
}

bool has_sinkhorn_kernel(const at::Tensor& x) {
  return x.is_cpu() && x.size(-1) * x.size(-2) <= kKernelNumbers;
}

/// The steps made of torch's operations; keeps what it divided by.
at::Tensor sinkhorn_by_torch(const at::Tensor& x, int64_t repeat, double eps,
                             Tensors* divisors) {
  at::Tensor y = at::softmax(x, -1).add_(eps);
  const auto divide = [&](int64_t axis) {
    at::Tensor sum = y.sum(axis, /*keepdim=*/true).add_(eps);
    y.div_(sum);
    if (divisors != nullptr) divisors->push_back(std::move(sum));
  };
  divide(-2);
  for (int64_t step = 1; step < repeat; ++step) {
    divide(-1);
    divide(-2);
  }
  return y;
}

at::Tensor sinkhorn_backward_by_torch(const at::Tensor& x,
                                      const at::Tensor& dout, int64_t repeat,
                                      double eps) {
  Tensors divisors;
  at::Tensor y = sinkhorn_by_torch(x, repeat, eps, &divisors);
  at::Tensor g = dout.clone();
  int64_t axis = -2;
  for (const at::Tensor& sum : std::views::reverse(divisors)) {
    g.sub_((g * y).sum(axis, /*keepdim=*/true)).div_(sum);
    y.mul_(sum);
    axis = axis == -2 ? -1 : -2;
  }
  return at::_softmax_backward_data(g, at::softmax(x, -1), -1, g.scalar_type());
}

struct SinkhornBackward {
  at::Tensor dout, x;
  int64_t repeat = 1;
  double eps = 0;

  using Result = at::Tensor;
  static constexpr auto kDerivativeOf = "sinkhorn_normalize";
  static constexpr auto kSchema =
      "sinkhorn_normalize_backward(Tensor dout, Tensor x, int repeat, "
      "float eps) -> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.dout, self.x, self.repeat, self.eps);
  }
  Result meta() const { return empty_as(x); }
  Result run() const {
    check_sinkhorn(x, repeat, eps);
    const at::Tensor from = sinkhorn_input(x);
    const at::Tensor given = sinkhorn_input(dout.to(x.scalar_type()));
    if (!has_sinkhorn_kernel(x)) {
      return sinkhorn_backward_by_torch(from, given, repeat, eps)
          .to(x.scalar_type());
    }
    at::Tensor dx = at::empty_like(given);
    const SinkhornSize size = size_of_matrices(x, repeat, eps);
    with_numbers(from, [&]<class T>(T) {
      sinkhorn_backward(size, from.const_data_ptr<T>(),
                        given.const_data_ptr<T>(), dx.mutable_data_ptr<T>(),
                        threads_for(6 * x.numel() * repeat));
    });
    return dx.to(x.scalar_type());
  }
};

struct SinkhornNormalize {
  at::Tensor x;
  int64_t repeat = 1;
  double eps = 0;

  using Result = at::Tensor;
  static constexpr auto kSchema =
      "sinkhorn_normalize(Tensor x, int repeat, float eps) -> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.x, self.repeat, self.eps);
  }
  Result meta() const {
    check_sinkhorn(x, repeat, eps);
    return empty_as(x);
  }
  Result run() const {
    check_sinkhorn(x, repeat, eps);
    const at::Tensor from = sinkhorn_input(x);
    if (!has_sinkhorn_kernel(x)) {
      return sinkhorn_by_torch(from, repeat, eps, nullptr).to(x.scalar_type());
    }
    at::Tensor out = at::empty_like(from);
    const SinkhornSize size = size_of_matrices(x, repeat, eps);
    with_numbers(from, [&]<class T>(T) {
      sinkhorn(size, from.const_data_ptr<T>(), out.mutable_data_ptr<T>(),
               threads_for(2 * x.numel() * repeat));
    });
    return out.to(x.scalar_type());
  }

  Tensors keep(const Tensors& /*outputs*/) const { return {}; }
  Tensors gradients(const Tensors& /*kept*/, const Tensors& grads) const {
    return {Operator<SinkhornBackward>::call({grads[0], x, repeat, eps})};
  }
};

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<SinkhornNormalize>::add_to(m);
  Operator<SinkhornBackward>::add_to(m);
}

}  // namespace

at::Tensor sinkhorn_normalize(const at::Tensor& x, int64_t repeat, double eps) {
  return Operator<SinkhornNormalize>::call({x, repeat, eps});
}

}  // namespace longspan
