#include "values.h"

#include <charconv>
#include <utility>

#include "longspan/core/detail/check.h"
#include "outcome.h"

namespace longspan::cli {

namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw Refusal(join(parts...));
}

/// Long texts are cut, so that a sentence stays one.
std::string quoted(const std::string& text) {
  constexpr std::size_t kShown = 40;
  const std::string shown =
      text.size() <= kShown ? text : text.substr(0, kShown) + "...";
  return "'" + shown + "'";
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(at, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

std::vector<std::string> entries(const std::string& flag,
                                 const std::string& text,
                                 const std::string& example) {
  if (text.empty())
    refuse(flag, " is empty; expected a list such as ", example);
  std::vector<std::string> parts = split(text, ',');
  for (const std::string& part : parts) {
    if (part.empty()) {
      refuse(flag, " has an empty entry in ", quoted(text),
             "; expected a list such as ", example);
    }
  }
  return parts;
}

}  // namespace

int64_t whole_number(const std::string& flag, const std::string& text,
                     int64_t least, int64_t most) {
  if (text.empty()) refuse(flag, " is empty; expected a whole number");
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size();
  if (error == std::errc::invalid_argument || !whole) {
    refuse(flag, " is ", quoted(text), "; expected a whole number");
  }
  const bool overflows = error == std::errc::result_out_of_range;
  if (overflows ? text[0] == '-' : value < least) {
    refuse(flag, " is ", quoted(text), "; expected at least ", least);
  }
  if (overflows || value > most) {
    refuse(flag, " is ", quoted(text), "; expected at most ", most);
  }
  return value;
}

std::vector<int64_t> number_list(const std::string& flag,
                                 const std::string& text, int64_t least,
                                 int64_t most) {
  std::vector<int64_t> numbers;
  for (const std::string& part : entries(flag, text, "10,0,6")) {
    numbers.push_back(
        whole_number(join(flag, " entry ", numbers.size()), part, least, most));
  }
  return numbers;
}

std::vector<std::string> word_list(const std::string& flag,
                                   const std::string& text) {
  return entries(flag, text, "ring,needed");
}

std::vector<TokenRange> range_list(const std::string& flag,
                                   const std::string& text, int64_t most) {
  std::vector<TokenRange> ranges;
  for (const std::string& part : entries(flag, text, "3-9,12-20")) {
    const std::string entry = join(flag, " entry ", ranges.size());
    const std::vector<std::string> ends = split(part, '-');
    if (ends.size() != 2) {
      refuse(entry, " is ", quoted(part), "; expected begin-end, such as 3-9");
    }
    ranges.push_back({whole_number(entry, ends.front(), 0, most),
                      whole_number(entry, ends.back(), 0, most)});
  }
  return ranges;
}

Packing document_list(const std::string& flag, const std::string& text,
                      int64_t most) {
  std::vector<int64_t> lengths;
  std::vector<int64_t> slots;
  for (const std::string& part : entries(flag, text, "5,3/8,0/4")) {
    const std::string entry = join(flag, " entry ", lengths.size());
    const std::vector<std::string> numbers = split(part, '/');
    if (numbers.size() > 2) {
      refuse(entry, " is ", quoted(part), "; expected length or length/slot");
    }
    lengths.push_back(whole_number(entry, numbers.front(), 0, most));
    slots.push_back(whole_number(entry, numbers.back(), 0, most));
  }
  return Packing::of(std::move(lengths), std::move(slots));
}

}  // namespace longspan::cli
