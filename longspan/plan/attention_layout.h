#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "longspan/core/mask.h"
#include "longspan/core/ownership.h"

namespace longspan {

/// Who owns which token and who may see whom, for one attention: all that the
/// strategies know about the tokens.
///
/// Always true: there is at least one mask, keys of the masks are tokens, and
/// masks and ownership have the same number of tokens. One mask holds for every
/// row of a batch; otherwise there is one for each row.
struct AttentionLayout {
  Ownership ownership;
  std::vector<Mask> masks;

  /// Checks the promises.
  static AttentionLayout of(Ownership ownership, std::vector<Mask> masks);

  const Mask& mask_of(int64_t row) const {
    return masks.size() == 1 ? masks[0] : masks.at(static_cast<size_t>(row));
  }

  /// The keys that some query sees in some row; ascending, pads between them
  /// included.
  std::vector<TokenRange> needed_by(
      const std::vector<TokenRange>& queries) const;

  /// This layout as a list of numbers, as operators take it, and back.
  /// decode() refuses anything that encode() did not write.
  std::vector<int64_t> encode() const;
  static AttentionLayout decode(std::span<const int64_t> code);
};

}  // namespace longspan
