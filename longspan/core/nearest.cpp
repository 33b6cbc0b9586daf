#include <algorithm>
#include <array>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/nearest.h"

namespace longspan {

namespace {

/// Names elsewhere, as in docs/glossary.md, in small letters and with dashes.
struct Elsewhere {
  std::string_view called, name;
};
constexpr auto kElsewhere = std::to_array<Elsewhere>({
    {"zigzag", "head-tail"},
    {"zig-zag", "head-tail"},
    {"dual-chunk-swap", "head-tail"},
    {"zigzag-varlen", "per-document-head-tail"},
    {"zig-zag-varlen", "per-document-head-tail"},
    {"contiguous", "contiguous-rows"},
    {"ring-attention", "ring"},
    {"p2p", "ring"},
    {"all-gather", "gathered"},
    {"allgather", "gathered"},
    {"halo", "needed"},
    {"ulysses", "head_parallel"},
    {"deepspeed-ulysses", "head_parallel"},
    {"all-to-all", "head_parallel"},
    {"alltoall", "head_parallel"},
    {"a2a", "head_parallel"},
    {"usp", "head_parallel_ring"},
    {"2d-attention", "head_parallel_ring"},
    {"a2a+p2p", "head_parallel_ring"},
    {"tokens", "input_ids"},
    {"targets", "labels"},
    {"embeds", "inputs_embeds"},
});

/// Longer ones are no slips.
constexpr std::size_t kMostLetters = 64;

std::string plain(std::string_view name) {
  std::string letters(name);
  for (char& letter : letters) {
    if (letter >= 'A' && letter <= 'Z') letter += 'a' - 'A';
    if (letter == '_' || letter == ' ') letter = '-';
  }
  return letters;
}

/// Letters to change, add, leave out, or swap with their neighbour.
std::size_t slips(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> count(
      a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        count[i][j] = i + j;
        continue;
      }
      const std::size_t changed = a[i - 1] == b[j - 1] ? 0 : 1;
      count[i][j] = std::min({count[i - 1][j] + 1, count[i][j - 1] + 1,
                              count[i - 1][j - 1] + changed});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        count[i][j] = std::min(count[i][j], count[i - 2][j - 2] + 1);
      }
    }
  }
  return count[a.size()][b.size()];
}

}  // namespace

std::string_view nearest_name(std::string_view given,
                              std::span<const std::string_view> names) {
  if (given.size() > kMostLetters) return "";
  const std::string letters = plain(given);
  for (const Elsewhere& other : kElsewhere) {
    if (other.called != letters) continue;
    const auto found = std::ranges::find(names, other.name);
    if (found != names.end()) return *found;
  }
  std::string_view nearest;
  std::size_t least = kMostLetters;
  for (std::string_view name : names) {
    const std::size_t count = slips(letters, plain(name));
    const bool near = 3 * count <= std::max(letters.size(), name.size());
    if (near && count < least) {
      nearest = name;
      least = count;
    }
  }
  return nearest;
}

std::string did_you_mean(std::string_view given,
                         std::span<const std::string_view> names) {
  const std::string_view name = nearest_name(given, names);
  return name.empty() ? "" : join("; did you mean ", name, "?");
}

}  // namespace longspan
