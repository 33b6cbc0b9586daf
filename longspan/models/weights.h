#pragma once

#include <filesystem>
#include <string>

namespace torch::nn {
class Module;
}

namespace longspan {

/// Whether numbers may be rounded to the types of the parameters.
enum class Rounding { refused, allowed };

/// Fills the parameters and buffers of a module with the tensors that are
/// called `prefix` + their name ("model.layers.3.self_attn." in a checkpoint).
/// They keep their devices and types.
///
/// `path` is a safetensors file, or a folder, of which all such files are one.
/// Refused, before anything is changed: a name that is missing, a name with the
/// prefix that the module does not have, another shape, and a type that would
/// round, such as F32 for a bfloat16 parameter, unless that is allowed.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path,
                  const std::string& prefix = "",
                  Rounding rounding = Rounding::refused);

/// The inverse: all parameters and buffers, whole or not there.
void save_weights(const torch::nn::Module& module,
                  const std::filesystem::path& path,
                  const std::string& prefix = "");

}  // namespace longspan
