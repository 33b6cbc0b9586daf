#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "longspan/batch/token_table.h"

namespace longspan {

/// Tensors by name in a file (safetensors): eight bytes that say how long the
/// header is, the header (JSON), and the tensors as they lie in memory, little
/// endian.
///
/// open() reads and checks the header alone: names, types, shapes and places
/// must make sense and fill the file exactly, without gaps; anything else is a
/// std::runtime_error that names the file. Tensors are read when asked for.
class SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    std::string type;  ///< as the file says it: "F32", "BF16", ...
    std::vector<int64_t> sizes;
    int64_t begin = 0, end = 0;  ///< bytes behind the header
  };

  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }

  /// In the order of their bytes.
  const std::vector<Entry>& entries() const { return entries_; }

  /// nullptr for a name that is not there.
  const Entry* find(const std::string& name) const;

  /// What the file says about itself (__metadata__).
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }

  /// A tensor on the CPU, with memory of its own. Types that torch does not
  /// have are refused by name.
  at::Tensor read(const Entry& entry) const;
  at::Tensor read(const std::string& name) const;

 private:
  std::filesystem::path path_;
  int64_t data_ = 0;  // where the tensors begin
  std::vector<Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// Writes tensors, from any device, the widest types first, so that all are
/// aligned. The file is whole or not there: it takes the place of an old one
/// when everything is written.
void write_safetensors(const std::filesystem::path& path,
                       const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace longspan
