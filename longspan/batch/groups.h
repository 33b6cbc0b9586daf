#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "longspan/batch/pack.h"
#include "longspan/core/token_range.h"

namespace longspan {

/// Runs of neighbouring tokens whose entry in a per-token tensor is one of
/// `kinds`, for Mask::with_groups: one list for each row, or one for the
/// stream, ascending. mm_token_type_ids name the tokens of images 1 and of
/// videos 2. A run may go on into the next document; masks end it there.
///
/// The tensor is [B, S] of whole numbers, as loaded.
std::vector<std::vector<TokenRange>> groups_of(
    const PackedBatch& batch, std::string_view key,
    const std::vector<int64_t>& kinds);

}  // namespace longspan
