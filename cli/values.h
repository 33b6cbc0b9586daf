#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/packing.h"
#include "longspan/core/token_range.h"

namespace longspan::cli {

/// Argument texts as values. Each throws a Refusal that names the flag, what
/// came, and what is expected.

/// A whole number in [least, most].
int64_t whole_number(const std::string& flag, const std::string& text,
                     int64_t least, int64_t most);

/// Numbers separated by commas, at least one, each in [least, most].
std::vector<int64_t> number_list(const std::string& flag,
                                 const std::string& text, int64_t least,
                                 int64_t most);

/// Words separated by commas, at least one.
std::vector<std::string> word_list(const std::string& flag,
                                   const std::string& text);

/// Ranges of tokens separated by commas, each begin-end with the end left out:
/// "3-9,12-20".
std::vector<TokenRange> range_list(const std::string& flag,
                                   const std::string& text, int64_t most);

/// Documents separated by commas, each a length or length/slot: "5,3/8,0/4".
Packing document_list(const std::string& flag, const std::string& text,
                      int64_t most);

}  // namespace longspan::cli
