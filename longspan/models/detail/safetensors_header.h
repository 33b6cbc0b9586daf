#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/models/safetensors.h"

namespace longspan {

struct SafetensorsHeader {
  std::vector<SafetensorsFile::Entry> entries;
  std::map<std::string, std::string> metadata;
};

/// Exactly the JSON that headers have: one object of entries, each with dtype,
/// shape and data_offsets, and __metadata__ of strings. Throws
/// std::runtime_error that says what stands where.
SafetensorsHeader read_header(std::string_view text);

std::string write_header(const SafetensorsHeader& header);

}  // namespace longspan
