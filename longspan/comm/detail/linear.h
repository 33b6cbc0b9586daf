#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "longspan/comm/group.h"

namespace longspan {

/// A linear function and its adjoint.
using LinearMap = std::function<at::Tensor(const at::Tensor&)>;

/// map(x) below autograd, with `adjoint` as its derivative. Both call
/// operators, so that tracing sees them.
at::Tensor apply_linear(const at::Tensor& x, LinearMap map, LinearMap adjoint);

/// Checks that a tensor has an axis, which may be negative, and returns it.
int64_t checked_axis(const char* who, const at::Tensor& x, int64_t axis);

/// Checks that there is one size for each rank, none negative.
void check_sizes(const char* who, const char* name, c10::SymIntArrayRef sizes,
                 const Group& group);

/// Checks the extent of an axis.
void check_extent(const char* who, const at::Tensor& x, int64_t axis,
                  const c10::SymInt& expected, const std::string& meaning);

c10::SymInt sum_of(c10::SymIntArrayRef sizes);
const c10::SymInt& size_here(c10::SymIntArrayRef sizes, const Group& group);

/// The sizes of x with another extent along an axis.
std::vector<c10::SymInt> resized(const at::Tensor& x, int64_t axis,
                                 c10::SymInt extent);

/// One entry for each rank and one more: where its part begins.
std::vector<int64_t> firsts_of(at::IntArrayRef sizes);

/// What a collective says about its argument: all that is equal on all ranks.
std::string linear_facts(const at::Tensor& x, std::vector<int64_t> axes,
                         std::initializer_list<at::IntArrayRef> sizes);

std::vector<c10::SymInt> sym_ints(at::IntArrayRef sizes);

}  // namespace longspan
