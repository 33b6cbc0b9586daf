#include "longspan/comm/agree.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "longspan/comm/detail/backends.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/detail/call_history.h"
#include "longspan/comm/detail/carry.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

constexpr uint64_t kPlace = 0x9e3779b97f4a7c15;
constexpr uint64_t kFirst = 0xd6e8feb86659fd93;
constexpr uint64_t kSecond = 0xa0761d6478bd642f;

int64_t as_int(uint64_t bits) {
  return std::bit_cast<int64_t>(bits);
}

/// A word at a place. Words are summed, so that devices may take any order.
uint64_t mixed(uint64_t word, uint64_t place) {
  uint64_t bits = (word ^ (place * kPlace)) * kFirst;
  bits ^= bits >> 32;
  return bits * kSecond;
}

uint64_t combined(uint64_t hash, uint64_t next) {
  return mixed(next, hash ^ kSecond) + hash * kFirst;
}

/// "rank 1 differs" or "ranks 1, 3 and 4 differ".
std::string who_differs(const std::vector<int>& ranks) {
  return join(ranks_named(ranks), ranks.size() == 1 ? " differs" : " differ",
              " from rank 0");
}

/// Every rank's row of hashes, one row for each.
at::Tensor gathered(const at::Tensor& mine, const Group& group) {
  // A group of NCCL alone moves no tensors of the CPU.
  const bool host =
      has_backend(group, at::kCPU) || !has_backend(group, at::kCUDA);
  const at::Tensor row = host ? mine : mine.to(at::kCUDA);
  const std::vector<int64_t> ones(static_cast<std::size_t>(group.size()), 1);
  return gather_tokens(row.unsqueeze(0), 0, ones, group, {.purpose = "agree"})
      .cpu();
}

std::vector<int> ranks_that_differ(const at::Tensor& rows, int64_t column) {
  const auto entry = rows.accessor<int64_t, 2>();
  std::vector<int> ranks;
  for (int rank = 1; rank < rows.size(0); ++rank) {
    if (entry[rank][column] != entry[0][column]) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

void agree(const Group& group,
           const std::vector<std::pair<std::string, uint64_t>>& fields) {
  check(std::ssize(fields) <= kMostFields, "agree: ", fields.size(),
        " fields; expected at most ", kMostFields);
  if (group.size() == 1) return;
  // Entry 0 stands for the names: other entries compare where names agree.
  at::Tensor mine = at::zeros({1 + kMostFields}, at::TensorOptions(at::kLong));
  int64_t* const entry = mine.mutable_data_ptr<int64_t>();
  uint64_t names = fields.size();
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto& [name, hash] = fields[i];
    names = combined(names, hash_bytes(name.data(), name.size()));
    entry[i + 1] = as_int(hash);
  }
  entry[0] = as_int(names);
  const at::Tensor rows = as_call(group, "agree", [&](CallScope& call) {
    call.begin([] { return "on fields"; });
    return gathered(mine, group);
  });

  const auto strangers = ranks_that_differ(rows, 0);
  if (!strangers.empty()) {
    throw DifferentFields(join(
        "agree: the ranks of the group compare different fields (",
        who_differs(strangers), "); call it with the same names everywhere"));
  }
  std::string text;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto ranks = ranks_that_differ(rows, static_cast<int64_t>(i) + 1);
    if (ranks.empty()) continue;
    text += join(text.empty() ? "" : " and ", "`", fields[i].first, "` (",
                 who_differs(ranks), ")");
  }
  check(text.empty(), "agree: the ranks of the group were given different ",
        text, "; feed every rank of a group the same batch");
}

uint64_t hash_bytes(const void* data, std::size_t bytes, uint64_t seed) {
  const auto* const from = static_cast<const unsigned char*>(data);
  uint64_t sum = seed + bytes * kSecond;
  for (std::size_t place = 0; place * 8 < bytes; ++place) {
    uint64_t word = 0;
    std::memcpy(&word, from + place * 8,
                std::min<std::size_t>(8, bytes - place * 8));
    sum += mixed(word, place);
  }
  return sum;
}

uint64_t hash_of(std::span<const int64_t> numbers) {
  return hash_bytes(numbers.data(), numbers.size_bytes());
}

uint64_t hash_bytes_by_operations(const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.contiguous().view({-1}).view(at::kByte);
  const int64_t count = bytes.numel();
  const int64_t words = (count + 7) / 8;
  const uint64_t start = static_cast<uint64_t>(count) * kSecond;
  if (words == 0) return start;
  const at::Tensor word =
      at::constant_pad_nd(bytes, {0, words * 8 - count}).view(at::kLong);
  const at::Tensor place =
      at::arange(words, word.options()).mul_(as_int(kPlace));
  at::Tensor bits = place.bitwise_xor_(word).mul_(as_int(kFirst));
  bits.bitwise_xor_(at::bitwise_right_shift(bits, 32).bitwise_and_(0xffffffff));
  bits.mul_(as_int(kSecond));
  return start + std::bit_cast<uint64_t>(bits.sum().item<int64_t>());
}

uint64_t hash_of(const at::Tensor& tensor) {
  check(tensor.defined(), "hash_of: no tensor");
  uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
  const at::IntArrayRef shape = tensor.sizes();
  hash = combined(
      hash, hash_of(std::span<const int64_t>(shape.data(), shape.size())));
  const at::Tensor plain = tensor.detach().contiguous();
  return combined(hash, plain.is_cpu()
                            ? hash_bytes(plain.const_data_ptr(), plain.nbytes())
                            : hash_bytes_by_operations(plain));
}

uint64_t hash_of(const Packing& packing) {
  std::vector<int64_t> numbers = {packing.tokens()};
  for (int64_t document = 0; document < packing.documents(); ++document) {
    numbers.push_back(packing.length(document));
    numbers.push_back(packing.padded_length(document));
  }
  return hash_of(std::span<const int64_t>(numbers));
}

uint64_t hash_of(const Ownership& ownership) {
  std::vector<int64_t> numbers = {static_cast<int64_t>(ownership.kind()),
                                  ownership.tokens(), ownership.ranks()};
  if (ownership.kind() == OwnershipKind::ranges) {
    for (int rank = 0; rank < ownership.ranks(); ++rank) {
      const auto ranges = ownership.ranges_of(rank);
      numbers.push_back(std::ssize(ranges));
      for (const TokenRange range : ranges) {
        numbers.push_back(range.begin);
        numbers.push_back(range.end);
      }
    }
  }
  return combined(hash_of(std::span<const int64_t>(numbers)),
                  hash_of(ownership.packing()));
}

}  // namespace longspan
