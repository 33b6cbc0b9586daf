#include "longspan/models/weights.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/models/safetensors.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

constexpr const char* kLoad = "load_weights";

NamedTensors tensors_of(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_parameters()) {
    found.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    found.emplace_back(item.key(), item.value());
  }
  return found;
}

std::vector<SafetensorsFile> files_of(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) {
    return {SafetensorsFile::open(path)};
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& item : std::filesystem::directory_iterator(path)) {
    if (item.path().extension() == ".safetensors") {
      paths.push_back(item.path());
    }
  }
  check(!paths.empty(), kLoad, ": the folder '", path.string(),
        "' has no file whose name ends with .safetensors");
  std::sort(paths.begin(), paths.end());
  std::vector<SafetensorsFile> files;
  for (const auto& one : paths) files.push_back(SafetensorsFile::open(one));
  return files;
}

struct Found {
  const SafetensorsFile* file = nullptr;
  const SafetensorsFile::Entry* entry = nullptr;
};

/// "'a', 'b' and 3 more".
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  const std::size_t shown = std::min<std::size_t>(names.size(), 5);
  for (std::size_t i = 0; i < shown; ++i) {
    text += join(i == 0 ? "'" : ", '", names[i], "'");
  }
  if (shown < names.size())
    text += join(" and ", names.size() - shown, " more");
  return text;
}

/// All names with a prefix, without it.
std::map<std::string, Found> named(const std::vector<SafetensorsFile>& files,
                                   const std::string& prefix) {
  std::map<std::string, Found> found;
  for (const SafetensorsFile& file : files) {
    for (const SafetensorsFile::Entry& entry : file.entries()) {
      if (!entry.name.starts_with(prefix)) continue;
      const auto [place, fresh] =
          found.emplace(entry.name.substr(prefix.size()), Found{&file, &entry});
      check(fresh, kLoad, ": '", entry.name, "' is in '",
            place->second.file->path().string(), "' and in '",
            file.path().string(), "'");
    }
  }
  return found;
}

bool rounds(at::ScalarType from, at::ScalarType to) {
  return from != to && c10::promoteTypes(from, to) != to;
}

}  // namespace

void load_weights(torch::nn::Module& module, const std::filesystem::path& path,
                  const std::string& prefix, Rounding rounding) {
  const std::vector<SafetensorsFile> files = files_of(path);
  std::map<std::string, Found> there = named(files, prefix);
  const std::string where =
      join("'", path.string(), "'",
           prefix.empty() ? std::string() : " under '" + prefix + "'");
  std::vector<std::pair<at::Tensor, Found>> pairs;
  std::vector<std::string> missing, unexpected;
  for (const auto& [name, tensor] : tensors_of(module)) {
    const auto found = there.find(name);
    if (found == there.end()) {
      missing.push_back(name);
      continue;
    }
    pairs.emplace_back(tensor, found->second);
    there.erase(found);
  }
  for (const auto& [name, found] : there) unexpected.push_back(name);
  check(missing.empty(), kLoad, ": ", where, " has no ", listed(missing),
        unexpected.empty()
            ? std::string()
            : "; it has " + listed(unexpected) + ", which the module lacks");
  check(unexpected.empty(), kLoad, ": ", where, " has ", listed(unexpected),
        ", which the module lacks");
  NamedTensors read;
  for (const auto& [tensor, found] : pairs) {
    const SafetensorsFile::Entry& entry = *found.entry;
    check(at::IntArrayRef(entry.sizes) == tensor.sizes(), kLoad, ": '",
          entry.name, "' is [", c10::Join(", ", entry.sizes), "] in ", where,
          " but ", shape_of(tensor), " in the module");
    read.emplace_back(entry.name, found.file->read(entry));
    const at::Tensor& came = read.back().second;
    check(rounding == Rounding::allowed ||
              !rounds(came.scalar_type(), tensor.scalar_type()),
          kLoad, ": '", entry.name, "' is ", entry.type, " in ", where,
          " and would be rounded to ", describe(tensor),
          "; take the module to that type first, or pass Rounding::allowed");
  }
  const at::NoGradGuard without_gradients;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    pairs[i].first.copy_(read[i].second);
  }
}

void save_weights(const torch::nn::Module& module,
                  const std::filesystem::path& path,
                  const std::string& prefix) {
  NamedTensors tensors = tensors_of(module);
  for (auto& [name, tensor] : tensors) name = prefix + name;
  write_safetensors(path, tensors, {{"format", "pt"}});
}

}  // namespace longspan
