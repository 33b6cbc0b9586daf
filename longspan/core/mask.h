#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "longspan/core/coverage.h"
#include "longspan/core/packing.h"
#include "longspan/core/token_range.h"

namespace longspan {

struct VisibleKeys;

/// Whether pad queries see what a real token in their place would see, or
/// nothing (then their output is 0 and their log-sum-exp -inf).
enum class PadQueries { see_nothing, see_document };

/// What the tokens of a group see of it: all of it, or no further back than
/// their band goes. Keys after the query are seen up to the end of the group
/// either way, since a window looks back only.
///   whole_group:   (in the band) or same group
///   within_window: (not before the band) and (not after the band or same
///                  group)
/// They differ where a group is longer than the window.
enum class GroupReach { whole_group, within_window };

/// How many keys on each side of a query, itself aside, lie in its band.
struct Band {
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max() / 4;
  int64_t before = kAll;
  int64_t after = 0;
  friend bool operator==(Band, Band) = default;
};

/// Which keys a query may see.
///
/// allows(q, k) defines the mask; all other members answer for whole documents
/// and ranges, never token by token. A query sees a key when
///   - both are in the same document of the packing (a document mask),
///   - the key is not a pad, of the packing or hidden by the caller,
///   - the query is not a pad either, unless PadQueries::see_document,
///   - and the key lies in the query's band, or both lie in one bidirectional
///     group, as far as GroupReach lets it see.
/// A stream of one document is Packing::single(tokens).
///
/// Query and key indices are tokens of the packing. Only a compressed mask has
/// other keys: key p of a document stands for its tokens [p*R, (p+1)*R), slots
/// contribute floor(slot / R) keys in document order, and a query sees key p
/// from the last of these tokens on, if none of them is a pad.
///
/// Copies share storage and are cheap.
class Mask {
 public:
  /// The longest stream whose pairs 64 bits count.
  static constexpr int64_t kMostTokens = 3'000'000'000;

  /// Keys up to and including the query.
  static Mask causal(const Packing& packing);

  /// All keys of the query's document.
  static Mask full(const Packing& packing);

  /// The query and the window - 1 keys before it (sliding window, SWA).
  static Mask sliding(const Packing& packing, int64_t window);

  /// Any band.
  static Mask banded(const Packing& packing, Band band);

  /// Keys that stand for `ratio` tokens each, visible once complete.
  static Mask compressed(const Packing& packing, int64_t ratio);

  /// This mask with these tokens as further pads (left padding, holes).
  Mask with_hidden(const std::vector<TokenRange>& tokens) const;

  /// This mask, but tokens of one group see each other both ways.
  /// Groups are not empty, do not overlap, and may come in any order.
  Mask with_groups(std::vector<TokenRange> groups) const;

  /// This mask, but the first prefix[d] tokens of document d see each other
  /// both ways (prefix LM).
  Mask with_prefix(const std::vector<int64_t>& prefix) const;

  Mask with_group_reach(GroupReach reach) const;
  Mask with_pad_queries(PadQueries pad_queries) const;

  int64_t queries() const { return packing_.tokens(); }
  int64_t keys() const;
  const Packing& packing() const { return packing_; }
  Band band() const { return band_; }
  GroupReach group_reach() const { return group_reach_; }
  PadQueries pad_queries() const { return pad_queries_; }

  /// What with_hidden and with_groups (or with_prefix) added, ascending.
  const std::vector<TokenRange>& hidden() const { return *hidden_; }
  const std::vector<TokenRange>& groups() const { return *groups_; }

  /// Tokens behind each key of a compressed mask; 0 when keys are tokens.
  int64_t ratio() const { return ratio_; }

  bool allows(int64_t query, int64_t key) const;

  /// Whether the keys of every query form one range. Pads between real tokens
  /// of a document break this, even where a band is too narrow to notice;
  /// nothing else does. why_not_one_range() names the document.
  bool is_one_range() const { return torn_document_ < 0; }
  std::string why_not_one_range() const;

  /// The keys of a query as one range, for masks of that kind (error
  /// otherwise); [0, 0) for queries that see nothing.
  TokenRange keys_of(int64_t query) const;

  /// The keys of a query as ascending ranges that do not touch; any mask.
  std::vector<TokenRange> key_ranges_of(int64_t query) const;

  /// A range that holds every key some query of a range sees; the smallest
  /// such range where keys are tokens and pad queries see nothing.
  TokenRange reach(TokenRange queries) const;

  /// Number of visible pairs in queries x keys.
  int64_t pairs(TokenRange queries, TokenRange keys) const;

  Coverage coverage(TokenRange queries, TokenRange keys) const;

  /// Queries of one document whose keys are two straight lines: query q sees
  /// the visible keys in [clamp(q - before, keys.begin, begin_at_most),
  /// clamp(q + after + 1, end_at_least, keys.end)).
  struct Stretch {
    TokenRange queries;
    TokenRange keys;
    int64_t begin_at_most = 0;
    int64_t end_at_least = 0;
  };

  /// All queries of a range that may see something, as stretches in order.
  /// Not for compressed masks.
  void for_each_stretch(TokenRange queries,
                        const std::function<void(const Stretch&)>& visit) const;

  /// The tokens of a range that are not pads, as ascending ranges.
  std::vector<TokenRange> visible_in(TokenRange keys) const;

  std::string to_string() const;

 private:
  Mask(const Packing& packing, Band band, int64_t ratio);
  void rebuild();
  void check_tokens(const char* who, int64_t query,
                    std::optional<int64_t> key) const;
  void check_ranges(const char* who, TokenRange queries, TokenRange keys) const;
  bool is_visible(int64_t token) const;
  bool sees(int64_t query) const;
  TokenRange group_of(int64_t token) const;
  TokenRange band_of(int64_t query) const;
  TokenRange key_slot(int64_t document) const;
  void stretches_in(TokenRange queries, TokenRange keys,
                    const std::function<void(const Stretch&)>& visit) const;
  int64_t complete_pairs(int64_t document, TokenRange queries,
                         TokenRange keys) const;

  Packing packing_;
  Band band_;
  int64_t ratio_ = 0;
  GroupReach group_reach_ = GroupReach::whole_group;
  PadQueries pad_queries_ = PadQueries::see_nothing;
  std::shared_ptr<const std::vector<TokenRange>> hidden_;
  std::shared_ptr<const std::vector<TokenRange>> groups_;
  std::shared_ptr<const VisibleKeys> visible_;
  int64_t torn_document_ = -1;
};

}  // namespace longspan
