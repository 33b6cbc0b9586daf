#pragma once

#include <span>
#include <string>
#include <string_view>

namespace longspan {

/// What somebody may have meant who wrote `given`, or "": the one of `names`
/// that papers and other libraries call so, or the one that a slip of the hand
/// makes of it: one letter in three wrong, missing, too much, or two swapped.
/// The first of those that are equally near. Case and - or _ do not matter.
std::string_view nearest_name(std::string_view given,
                              std::span<const std::string_view> names);

/// The end of a refusal: "; did you mean head-tail?", or nothing.
std::string did_you_mean(std::string_view given,
                         std::span<const std::string_view> names);

}  // namespace longspan
