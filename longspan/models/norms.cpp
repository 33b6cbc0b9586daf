#include <ATen/ATen.h>

#include "longspan/models/detail/norms.h"
#include "longspan/models/detail/run_chunks.h"

namespace longspan {

at::Tensor rms_normed(const at::Tensor& x, const at::Tensor& weight,
                      double eps) {
  const at::Tensor wide = x.to(sum_type(x));
  const at::Tensor normed =
      wide * (wide * wide).mean(-1, /*keepdim=*/true).add(eps).rsqrt();
  if (!weight.defined()) return normed.to(x.scalar_type());
  return (normed * weight).to(x.scalar_type());
}

}  // namespace longspan
