#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"

namespace longspan {

/// Most fields that one call compares.
inline constexpr int kMostFields = 63;

/// The ranks compare different fields: a mistake in the calls themselves.
class DifferentFields : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Checks that all ranks were given equal fields, by name and hash: one small
/// exchange (512 bytes to every other rank). Where they differ, every rank
/// throws the same std::invalid_argument, which names the fields and the ranks
/// that differ from rank 0. Every rank must call it.
void agree(const Group& group,
           const std::vector<std::pair<std::string, uint64_t>>& fields);

/// Hashes are equal on all machines of one byte order. They guard against
/// mistakes, not against malice.
uint64_t hash_bytes(const void* data, std::size_t bytes, uint64_t seed = 0);
uint64_t hash_of(std::span<const int64_t> numbers);

/// Type, shape and bytes; not the device. Hashed where it lies: from a GPU only
/// 8 bytes are read.
uint64_t hash_of(const at::Tensor& tensor);

uint64_t hash_of(const Packing& packing);
uint64_t hash_of(const Ownership& ownership);

/// The hash of a tensor's bytes by tensor operations, as devices other than the
/// CPU make it; here so that it can be tested without one.
uint64_t hash_bytes_by_operations(const at::Tensor& tensor);

}  // namespace longspan
