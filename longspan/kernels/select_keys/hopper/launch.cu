#include <algorithm>
#include <stdexcept>

#include "longspan/kernels/common/hopper/checks.h"
#include "longspan/kernels/select_keys/hopper/config.h"
#include "longspan/kernels/select_keys/hopper/select_keys.h"

namespace longspan::hopper {

namespace {

using Launch = cudaError_t (*)(const SelectParams&, int, bool, cudaStream_t);

Launch scores_for(int64_t heads, int dim) {
  if (dim != 64 && dim != 128) return nullptr;
  switch (heads) {
    case 8:
      return dim == 64 ? launch_scores<8, 64> : launch_scores<8, 128>;
    case 16:
      return dim == 64 ? launch_scores<16, 64> : launch_scores<16, 128>;
    case 32:
      return dim == 64 ? launch_scores<32, 64> : launch_scores<32, 128>;
    case 64:
      return dim == 64 ? launch_scores<64, 64> : launch_scores<64, 128>;
    default:
      return nullptr;
  }
}

/// Queries whose scores fit some bytes of scratch, whole groups of them, about
/// as many in every chunk.
int64_t chunk_of(const KeyScoreArgs& args, int64_t bytes) {
  const int64_t group = 256 / std::clamp<int64_t>(args.heads, 1, 256);
  const int64_t fit = bytes / 4 / std::max<int64_t>(score_stride(args.keys), 1);
  if (fit < group) return std::max<int64_t>(fit, 1);
  const int64_t most = std::min<int64_t>(fit / group * group, kMostChunk);
  const int64_t chunks = std::max<int64_t>((args.queries + most - 1) / most, 1);
  const int64_t even = (args.queries + chunks - 1) / chunks;
  return (even + group - 1) / group * group;
}

/// Where scores wait. A long answer lends the place of its last lists, until
/// their turn comes: they are scored in half as much of the caller's.
struct Scratch {
  int64_t chunk;                // of queries
  int64_t own_chunk;            // in the caller's memory
  int64_t lent = 0;             // queries of the last row, 0: none
  float* lent_place = nullptr;  // where those are listed

  explicit Scratch(const SelectKeysArgs& args)
      : chunk(chunk_of(args, kScratchBytes)), own_chunk(chunk) {
    const TokenArray<int32_t*>& to = args.indices;
    const int64_t row_bytes = args.queries * args.slots * 4;
    if (to.token_stride != args.slots || args.slots % 4 != 0 ||
        reinterpret_cast<uintptr_t>(to.data) % 16 != 0 ||
        to.row_stride % 4 != 0 || row_bytes < 8 * kScratchBytes) {
      return;
    }
    const int64_t bytes = chunk * score_stride(args.keys) * 4;
    if (bytes > row_bytes / 4) return;  // one query takes that much
    own_chunk = chunk_of(args, kScratchBytes / 2);
    lent = (bytes + args.slots * 4 - 1) / (args.slots * 4);
    lent_place =
        reinterpret_cast<float*>(to.data + (args.rows - 1) * to.row_stride +
                                 (args.queries - lent) * args.slots);
  }
};

}  // namespace

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& args) {
  if (args.type != ElementType::bfloat16) return "elements are not bfloat16";
  if (scores_for(args.heads, args.head_dim) == nullptr) {
    return "no kernel for " + std::to_string(args.heads) + " heads of " +
           std::to_string(args.head_dim) +
           " channels (has 8, 16, 32, 64 of 64 and 128)";
  }
  if (!fits_32_bits(args.queries) || !fits_32_bits(args.keys) ||
      !fits_32_bits(args.slots)) {
    return "more than 2^30 queries, keys or slots";
  }
  if (!is_aligned(args.q) || !is_aligned(args.k)) {
    return "q or k is not aligned to 16 bytes";
  }
  return why_not_here();
}

size_t select_keys_workspace(const SelectKeysArgs& args) {
  return static_cast<size_t>(Scratch(args).own_chunk *
                             score_stride(args.keys)) *
         4;
}

void select_keys(const SelectKeysArgs& args, void* workspace, void* stream) {
  if (args.rows * args.queries * args.slots == 0) return;
  if (const auto reason = why_not_select_keys(args)) {
    throw std::invalid_argument("select_keys: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  const int processors = processor_count();
  const Launch launch = scores_for(args.heads, args.head_dim);
  const Scratch scratch(args);
  bool follows = false;  // a launch of ours, which it may overlap
  for (int64_t row = 0; row < args.rows; ++row) {
    SelectParams params(args, row);
    // Queries whose lists do not lie where scores are lent a place.
    const int64_t unlent =
        args.queries - (row + 1 == args.rows ? scratch.lent : 0);
    for (int64_t first = 0; first < args.queries; first += params.chunk) {
      const bool borrows = scratch.lent > 0 && first < unlent;
      params.scratch =
          borrows ? scratch.lent_place : static_cast<float*>(workspace);
      const int64_t left = borrows ? unlent - first : args.queries - first;
      params.first = static_cast<int>(first);
      params.chunk = static_cast<int>(
          std::min(left, borrows ? scratch.chunk : scratch.own_chunk));
      if (args.keys > 0) {
        check_launch("select_keys", launch(params, processors, follows, on));
        follows = true;
      }
      check_launch("select_keys",
                   launch_top_keys(params, processors, follows, on));
      follows = true;
    }
  }
}

}  // namespace longspan::hopper
