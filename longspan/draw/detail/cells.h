#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/draw/draw.h"
#include "longspan/draw/picture.h"

namespace longspan {

class Mask;

/// At most `most` cells that cover [0, tokens) in order, none of them empty.
/// One token each where that fits. Otherwise every border inside the stream is
/// a cut as long as the borders fit; cells are of one size where that respects
/// the borders, and else spread by length.
std::vector<TokenRange> cut_cells(int64_t tokens, std::vector<int64_t> borders,
                                  int64_t most);

/// Where owners change in the stream, ascending; nothing when more than `most`.
std::vector<int64_t> owner_borders(const Ownership& ownership, int64_t most);

/// Where documents and pads begin, ascending; nothing when more than `most`.
std::vector<int64_t> packing_borders(const Packing& packing, int64_t most);

/// The stream of a packing in cells with their owners and pads.
std::vector<StripCell> stream_cells(const Ownership& ownership,
                                    const Packing& packing, int64_t most);

/// Up to `most` of 0 ... count - 1, evenly spaced, both ends included.
std::vector<int> spread(int count, int most);

/// "", or " 16 of 4096 ranks are shown." and " A cell is up to 12 tokens."
std::string shown_note(int shown, int count, const char* what);
std::string cell_note(const std::vector<StripCell>& cells, const char* what);

/// "4 ranks", "1 rank".
std::string counted(int64_t count, const char* what);

/// "causal", "sliding window of 8 keys" and so on.
std::string words_of(const Mask& mask);

/// "head-tail", "uneven" and so on.
std::string words_of(const Ownership& ownership);

/// Throws unless mask and ownership are of one stream that can be drawn, and
/// the options ask for something.
void check_together(const char* who, const Mask& mask,
                    const Ownership& ownership);
void check_options(const DrawOptions& options);

}  // namespace longspan
