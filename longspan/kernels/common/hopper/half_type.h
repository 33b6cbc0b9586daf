#pragma once

#include "longspan/kernels/common/element.h"

namespace longspan::hopper {

/// Types of 16 bits, which wgmma takes.
constexpr bool is_half(ElementType type) {
  return type == ElementType::bfloat16 || type == ElementType::float16;
}

/// Calls body<kType>() for one of them.
template <class Body>
auto with_half_type(ElementType type, const Body& body) {
  if (type == ElementType::float16) {
    return body.template operator()<ElementType::float16>();
  }
  return body.template operator()<ElementType::bfloat16>();
}

}  // namespace longspan::hopper
