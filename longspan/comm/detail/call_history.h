#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace longspan {

/// What one rank did over a group, call by call: enough to say where two ranks
/// parted.
///
/// A call has a text, which is the same on all ranks that do the same: who
/// calls, in which pass, with which types, shapes, owners and masks. A call
/// that raised before its end counts too, whatever its error says.
///
/// Always true: of two histories, `hash` after a call is equal exactly where
/// all texts up to that call are (but for a chance of 2^-64).
class CallHistory {
 public:
  /// How many of the last calls keep their text.
  static constexpr std::size_t kKept = 32;

  struct Entry {
    uint64_t after = 0;  ///< the hash after this call
    bool raised = false;
    std::string text;  ///< of the call, or of what it raised
  };

  /// The next call begins.
  void begin(std::string text);

  /// The call under way raises, or something else where none is: that counts
  /// as a call of its own.
  void raise(std::string text, bool under_way);

  /// This rank gave another one up.
  void lose(int rank, std::string why);

  int64_t calls() const { return calls_; }
  uint64_t hash() const {
    return entries_.empty() ? kStart : entries_.back().after;
  }
  std::optional<int> lost() const { return lost_; }
  const std::string& why_lost() const { return why_lost_; }

  /// The n-th call, from 1; null where it is not kept, or did not happen.
  const Entry* call(int64_t number) const;
  int64_t first_kept() const {
    return calls_ - static_cast<int64_t>(entries_.size()) + 1;
  }

  std::string encode() const;
  /// Nothing where the text is not of encode().
  static std::optional<CallHistory> decode(std::string_view text);

 private:
  static constexpr uint64_t kStart = 0x243f6a8885a308d3;

  int64_t calls_ = 0;
  uint64_t before_ = kStart;  // the hash before the first entry kept
  std::deque<Entry> entries_;
  std::optional<int> lost_;
  std::string why_lost_;
};

/// Which texts came before, as far as they are remembered: where lengths change
/// from step to step there is no end of new ones. Ranks that add the same texts
/// forget at the same text, too.
class SeenTexts {
 public:
  static constexpr std::size_t kMost = 1 << 14;

  /// Whether this text is new.
  bool add(std::string_view text);

  std::size_t size() const { return hashes_.size(); }

 private:
  std::set<uint64_t> hashes_;
};

/// "rank 1", or "ranks 1, 3 and 4", for messages.
std::string ranks_named(const std::vector<int>& ranks);

/// A difference between this rank and others.
struct Difference {
  int64_t call = 0;  ///< the first that differs, as far as is known
  /// Others raised in the very call that is under way here, so all ranks can
  /// leave it and go on together.
  bool is_common_end = false;
  std::string text;  ///< for people, without "who:"
};

/// Compares this rank's history with those of others that are known. What the
/// others did last may still be under way there, so that a raise here against
/// it is no difference yet.
std::optional<Difference> compare(
    int rank, const CallHistory& mine, bool under_way,
    const std::vector<std::optional<CallHistory>>& ranks);

}  // namespace longspan
