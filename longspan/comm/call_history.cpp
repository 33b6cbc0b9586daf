#include "longspan/comm/detail/call_history.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>

#include "longspan/comm/agree.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

uint64_t hash_after(uint64_t before, std::string_view text) {
  return hash_bytes(text.data(), text.size(), before * 0x9e3779b97f4a7c15 + 1);
}

constexpr std::string_view kRaised = "raised";

std::vector<std::string_view> facts_in(std::string_view text) {
  std::vector<std::string_view> facts;
  for (;;) {
    const auto end = text.find("; ");
    facts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return facts;
    text.remove_prefix(end + 2);
  }
}

/// Who calls, and the facts of a text that not all texts have in that place.
std::string told_apart(const std::string& text,
                       const std::vector<std::string>& texts) {
  const auto mine = facts_in(text);
  std::string words(mine[0]);
  for (std::size_t i = 1; i < mine.size(); ++i) {
    const bool everywhere = std::ranges::all_of(texts, [&](const auto& other) {
      const auto facts = facts_in(other);
      return i < facts.size() && facts[i] == mine[i];
    });
    if (!everywhere) words += join(", ", mine[i]);
  }
  return words;
}

/// Fields of any bytes, each with its length before it.
void put(std::string_view field, std::string& text) {
  text += std::to_string(field.size());
  text += ':';
  text += field;
}

std::optional<std::string_view> take(std::string_view& text) {
  std::size_t size = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), size);
  const auto digits = static_cast<std::size_t>(end - text.data());
  if (error != std::errc() || digits >= text.size() || text[digits] != ':' ||
      text.size() - digits - 1 < size) {
    return std::nullopt;
  }
  const std::string_view field = text.substr(digits + 1, size);
  text.remove_prefix(digits + 1 + size);
  return field;
}

template <class Number>
std::optional<Number> take_number(std::string_view& text) {
  const auto field = take(text);
  Number number = 0;
  if (!field) return std::nullopt;
  const char* const stop = field->data() + field->size();
  const auto [end, error] = std::from_chars(field->data(), stop, number);
  if (error != std::errc() || end != stop) return std::nullopt;
  return number;
}

}  // namespace

std::string ranks_named(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

void CallHistory::begin(std::string text) {
  const uint64_t after = hash_after(hash(), text);
  ++calls_;
  entries_.push_back({after, false, std::move(text)});
  if (entries_.size() > kKept) {
    before_ = entries_.front().after;
    entries_.pop_front();
  }
}

void CallHistory::raise(std::string text, bool under_way) {
  if (!under_way || entries_.empty()) begin("");
  Entry& last = entries_.back();
  const uint64_t before =
      entries_.size() > 1 ? entries_[entries_.size() - 2].after : before_;
  last = {hash_after(before, kRaised), true, std::move(text)};
}

void CallHistory::lose(int rank, std::string why) {
  if (lost_) return;
  lost_ = rank;
  why_lost_ = std::move(why);
}

const CallHistory::Entry* CallHistory::call(int64_t number) const {
  if (number < first_kept() || number > calls_) return nullptr;
  return &entries_[static_cast<std::size_t>(number - first_kept())];
}

std::string CallHistory::encode() const {
  std::string text;
  put(std::to_string(calls_), text);
  put(std::to_string(before_), text);
  put(std::to_string(lost_.value_or(-1)), text);
  put(why_lost_, text);
  for (const Entry& entry : entries_) {
    put(std::to_string(entry.after), text);
    put(entry.raised ? "1" : "0", text);
    put(entry.text, text);
  }
  return text;
}

std::optional<CallHistory> CallHistory::decode(std::string_view text) {
  CallHistory history;
  const auto calls = take_number<int64_t>(text);
  const auto before = take_number<uint64_t>(text);
  const auto lost = take_number<int>(text);
  const auto why = take(text);
  if (!calls || !before || !lost || !why) return std::nullopt;
  history.calls_ = *calls;
  history.before_ = *before;
  if (*lost >= 0) history.lose(*lost, std::string(*why));
  while (!text.empty()) {
    const auto after = take_number<uint64_t>(text);
    const auto raised = take_number<int>(text);
    const auto words = take(text);
    if (!after || !raised || !words) return std::nullopt;
    history.entries_.push_back({*after, *raised != 0, std::string(*words)});
  }
  if (std::ssize(history.entries_) > history.calls_) return std::nullopt;
  return history;
}

bool SeenTexts::add(std::string_view text) {
  const uint64_t hash = hash_after(0, text);
  if (hashes_.contains(hash)) return false;
  if (hashes_.size() >= kMost) hashes_.clear();
  hashes_.insert(hash);
  return true;
}

std::optional<Difference> compare(
    int rank, const CallHistory& mine, bool under_way,
    const std::vector<std::optional<CallHistory>>& ranks) {
  const auto is_other = [&](std::size_t other) {
    return static_cast<int>(other) != rank && ranks[other].has_value();
  };
  int64_t first = std::numeric_limits<int64_t>::max();
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (!is_other(other)) continue;
    const CallHistory& theirs = *ranks[other];
    const int64_t last = std::min(mine.calls(), theirs.calls());
    for (int64_t call = std::max(mine.first_kept(), theirs.first_kept());
         call <= last && call < first; ++call) {
      const auto& here = *mine.call(call);
      const auto& there = *theirs.call(call);
      if (here.after == there.after) continue;
      // It may be about to raise as well.
      if (here.raised && !there.raised && call == theirs.calls()) break;
      first = call;
    }
  }
  if (first == std::numeric_limits<int64_t>::max()) return std::nullopt;

  const CallHistory::Entry& here = *mine.call(first);
  std::map<std::string, std::vector<int>> by_text;
  std::string raised;
  bool all_raised = true;
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    const bool is_me = static_cast<int>(other) == rank;
    if (!is_me && !is_other(other)) continue;
    const CallHistory::Entry* const entry =
        is_me ? &here : ranks[other]->call(first);
    if (entry == nullptr) continue;
    const int number = static_cast<int>(other);
    if (entry->raised && !here.raised) {
      raised +=
          join(raised.empty() ? "" : "; ", "rank ", number, ": ", entry->text);
    } else if (!is_me && entry->after != here.after) {
      all_raised = false;
    }
    by_text[entry->raised ? "raised: " + entry->text : entry->text].push_back(
        number);
  }
  if (!raised.empty() && all_raised) {
    return Difference{
        .call = first,
        .is_common_end = under_way && first == mine.calls(),
        .text = join("in call ", first, " (", facts_in(here.text)[0],
                     ") another rank raised: ", raised)};
  }
  if (by_text.size() == 1) {
    return Difference{
        .call = first,
        .text = join("the ranks of the group did different things before call ",
                     first, ", which is \"", here.text, "\" on all")};
  }
  std::string text =
      join("the ranks of the group do different things in call ", first);
  std::vector<std::string> texts;
  for (const auto& [words, who] : by_text) texts.push_back(words);
  const char* between = ": ";
  for (const auto& [words, who] : by_text) {
    text += join(between, ranks_named(who), ": ", told_apart(words, texts));
    between = "; ";
  }
  return Difference{.call = first, .text = std::move(text)};
}

}  // namespace longspan
