#include "longspan/models/safetensors.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/models/detail/safetensors_header.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors are little endian");

constexpr int64_t kLongestHeader = 100'000'000;

constexpr std::array<std::pair<const char*, at::ScalarType>, 14> kTypes = {
    {{"F64", at::kDouble},
     {"F32", at::kFloat},
     {"F16", at::kHalf},
     {"BF16", at::kBFloat16},
     {"I64", at::kLong},
     {"I32", at::kInt},
     {"I16", at::kShort},
     {"I8", at::kChar},
     {"U64", at::kUInt64},
     {"U32", at::kUInt32},
     {"U16", at::kUInt16},
     {"U8", at::kByte},
     {"BOOL", at::kBool},
     {"F8_E4M3", at::kFloat8_e4m3fn}}};

std::optional<at::ScalarType> type_named(const std::string& name) {
  for (const auto& [word, type] : kTypes) {
    if (name == word) return type;
  }
  return std::nullopt;
}

std::string name_of_type(at::ScalarType type) {
  for (const auto& [word, known] : kTypes) {
    if (type == known) return word;
  }
  return "";
}

template <class... Parts>
[[noreturn]] void fail(const std::filesystem::path& path,
                       const Parts&... parts) {
  throw std::runtime_error(
      join("safetensors: '", path.string(), "' ", parts...));
}

/// Bytes of a tensor; nothing where 64 bits do not count them.
std::optional<int64_t> bytes_of(const std::vector<int64_t>& sizes,
                                int64_t each) {
  int64_t bytes = each;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

void check_entries(const std::filesystem::path& path,
                   const std::vector<SafetensorsFile::Entry>& entries,
                   int64_t bytes) {
  int64_t behind = 0;
  for (const SafetensorsFile::Entry& entry : entries) {
    const auto where = join("[", entry.begin, ", ", entry.end, ")");
    if (entry.begin != behind || entry.end < entry.begin) {
      fail(path, "has '", entry.name, "' at bytes ", where,
           " where the tensors before it end at ", behind);
    }
    behind = entry.end;
    const auto type = type_named(entry.type);
    if (!type) continue;  // said when it is read
    const auto expected =
        bytes_of(entry.sizes, static_cast<int64_t>(c10::elementSize(*type)));
    if (expected != entry.end - entry.begin) {
      fail(path, "has '", entry.name, "' at bytes ", where, ", but ",
           entry.type, " [", c10::Join(", ", entry.sizes), "] has ",
           expected ? std::to_string(*expected) : std::string("too many"));
    }
  }
  if (behind != bytes) {
    fail(path, "has ", bytes, " bytes of tensors, but its header lists ",
         behind, "; it was torn or something was added");
  }
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) fail(path, "cannot be read: ", error.message());
  std::ifstream file(path, std::ios::binary);
  uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof(length));
  if (!file) fail(path, "has ", size, " bytes, too few for a header");
  if (length > kLongestHeader || length > size - sizeof(length)) {
    fail(path, "says that its header has ", length, " bytes; there are ",
         size - sizeof(length), ", and ", kLongestHeader, " is the most");
  }
  std::string text(length, ' ');
  file.read(text.data(), static_cast<std::streamsize>(length));
  if (!file) fail(path, "cannot be read");
  SafetensorsFile made;
  made.path_ = path;
  made.data_ = static_cast<int64_t>(sizeof(length) + length);
  try {
    SafetensorsHeader header = read_header(text);
    made.entries_ = std::move(header.entries);
    made.metadata_ = std::move(header.metadata);
  } catch (const std::runtime_error& failure) {
    fail(path, "cannot be used: ", failure.what());
  }
  std::stable_sort(made.entries_.begin(), made.entries_.end(),
                   [](const Entry& a, const Entry& b) {
                     return std::pair(a.begin, a.end) <
                            std::pair(b.begin, b.end);
                   });
  check_entries(path, made.entries_, static_cast<int64_t>(size) - made.data_);
  return made;
}

const SafetensorsFile::Entry* SafetensorsFile::find(
    const std::string& name) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(),
                   [&](const Entry& entry) { return entry.name == name; });
  return found == entries_.end() ? nullptr : &*found;
}

at::Tensor SafetensorsFile::read(const Entry& entry) const {
  const auto type = type_named(entry.type);
  if (!type) {
    fail(path_, "has '", entry.name, "' as ", entry.type,
         ", which is no type of torch");
  }
  at::Tensor made = at::empty(entry.sizes, at::TensorOptions(*type));
  std::ifstream file(path_, std::ios::binary);
  file.seekg(data_ + entry.begin);
  file.read(static_cast<char*>(made.mutable_data_ptr()),
            entry.end - entry.begin);
  if (!file) fail(path_, "ended inside of '", entry.name, "'");
  return made;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const Entry* const entry = find(name);
  check(entry != nullptr, "safetensors: '", path_.string(), "' has no '", name,
        "'");
  return read(*entry);
}

void write_safetensors(const std::filesystem::path& path,
                       const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const char* const who = "write_safetensors";
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) {
    check(names.insert(name).second && name != "__metadata__", who, ": '", name,
          "' cannot be the name of a tensor: it came before, or is reserved");
    check(tensor.defined() && !name_of_type(tensor.scalar_type()).empty(), who,
          ": '", name, "' is ",
          tensor.defined() ? describe(tensor) : std::string("not there"),
          ", which safetensors have no type for");
  }
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return tensors[a].second.element_size() > tensors[b].second.element_size();
  });
  SafetensorsHeader header{.entries = {}, .metadata = metadata};
  int64_t behind = 0;
  for (const std::size_t i : order) {
    const auto& [name, tensor] = tensors[i];
    const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
    header.entries.push_back({name, name_of_type(tensor.scalar_type()),
                              tensor.sizes().vec(), behind, behind + bytes});
    behind += bytes;
  }
  std::string text = write_header(header);
  text.resize((text.size() + 7) / 8 * 8, ' ');

  // Ranks may be threads, and all of them may save.
  static std::atomic<int64_t> written = 0;
  std::filesystem::path partial = path;
  partial += join(".", getpid(), ".", written++, ".part");
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  const uint64_t length = text.size();
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const std::size_t i : order) {
    const at::Tensor plain = tensors[i].second.detach().cpu().contiguous();
    file.write(static_cast<const char*>(plain.const_data_ptr()),
               static_cast<std::streamsize>(plain.nbytes()));
  }
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(partial, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    fail(path, "cannot be written",
         error ? ": " + error.message() : std::string());
  }
}

}  // namespace longspan
