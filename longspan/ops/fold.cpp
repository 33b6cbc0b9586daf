#include "longspan/ops/fold.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

/// array_of a tensor, or an empty array for an undefined one.
template <class Pointer>
TokenArray<Pointer> array_if(const at::Tensor& tensor) {
  return tensor.defined() ? array_of<Pointer>(tensor) : TokenArray<Pointer>{};
}

std::optional<ElementType> type_of(const at::Tensor& tensor) {
  const auto type = element_type(tensor.scalar_type());
  return type == ElementType::float64 ? std::nullopt : type;
}

bool takes_part(const PartialAttention& part) {
  return part.out.is_cuda() && part.out.dim() == 4 && type_of(part.out) &&
         (part.out.size(3) <= 1 || part.out.stride(3) == 1) &&
         (!part.lse.defined() || part.lse.scalar_type() == at::kFloat);
}

}  // namespace

bool fold_on_device(const PartialAttention* before,
                    std::span<const PlacedPart> parts,
                    const PartialAttention& into) {
  constexpr int64_t kMostRows = 65535;  // of a grid
  if (!takes_part(into) || into.out.size(0) > kMostRows ||
      parts.size() > kMostFolded) {
    return false;
  }
  FoldPartsArgs args{.rows = into.out.size(0),
                     .tokens = into.out.size(1),
                     .heads = into.out.size(2),
                     .channels = static_cast<int>(into.out.size(3)),
                     .count = static_cast<int>(parts.size()),
                     .type = *type_of(into.out),
                     .out = array_of<void*>(into.out),
                     .lse = array_if<float*>(into.lse)};
  if (before != nullptr) {
    if (!takes_part(*before) || before->out.scalar_type() != at::kFloat)
      return false;
    args.before = array_of<const float*>(before->out);
    args.before_lse = array_if<const float*>(before->lse);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [part, token] = parts[i];
    if (!takes_part(part) || part.out.dtype() != parts[0].part.out.dtype()) {
      return false;
    }
    args.part_type = *type_of(part.out);
    args.parts[i] = {.first = token,
                     .tokens = part.out.size(1),
                     .out = array_of<const void*>(part.out),
                     .lse = array_if<const float*>(part.lse)};
  }
  const c10::OptionalDeviceGuard guard(into.out.device());
  if (why_not_fold_parts()) return false;
  const ProfilerRange range([] { return "kernel fold, ampere"; });
  fold_parts(args, current_stream(into.out));
  return true;
}

}  // namespace longspan
