#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/core/multiple.h"
#include "longspan/core/token_range.h"

namespace longspan {

/// Documents laid end to end in one stream of tokens (cu_seqlens, THD, varlen).
///
/// Document d occupies a slot of padded_length(d) tokens, of which the first
/// length(d) are real and the rest are pads. Tokens after the last slot, if
/// any, are the tail: pads that belong to no document.
///
/// Always true: 0 <= length(d) <= padded_length(d); slots follow one another
/// without gaps from token 0; token_of(locate(t)) == t for every token in a
/// slot. Whether a token is a pad follows from the packing alone, never from
/// its value. Copies share storage and are cheap.
class Packing {
 public:
  /// Where a token lies. `document` is kTail for tokens after the last slot,
  /// and `position` then counts from the end of the last slot.
  struct Place {
    int64_t document;
    int64_t position;
    friend bool operator==(Place, Place) = default;
  };
  static constexpr int64_t kTail = -1;

  /// The most documents of a stream: a few hundred megabytes of offsets.
  static constexpr int64_t kMostDocuments = int64_t{1} << 24;

  /// A stream without tokens.
  Packing();

  /// Documents without pads.
  static Packing of(std::vector<int64_t> lengths);

  /// Documents in slots of the given sizes, one slot for each document.
  static Packing of(std::vector<int64_t> lengths,
                    std::vector<int64_t> padded_lengths);

  /// Documents in slots, then a tail up to `tokens` >= the sum of the slots.
  static Packing of(std::vector<int64_t> lengths,
                    std::vector<int64_t> padded_lengths, int64_t tokens);

  /// One document that is the whole stream.
  static Packing single(int64_t tokens);

  /// `rows` documents of `length` tokens each.
  static Packing rows(int64_t rows, int64_t length);

  int64_t documents() const { return std::ssize(data_->lengths); }
  int64_t tokens() const { return data_->tokens; }
  int64_t real_tokens() const { return data_->real_tokens; }

  int64_t length(int64_t document) const;
  int64_t padded_length(int64_t document) const;

  /// First token of a document's slot.
  int64_t offset(int64_t document) const;

  /// Real tokens of a document, its whole slot, and the tail of the stream.
  TokenRange real(int64_t document) const;
  TokenRange slot(int64_t document) const;
  TokenRange tail() const;

  Place locate(int64_t token) const;
  int64_t document_of(int64_t token) const { return locate(token).document; }
  int64_t token_of(Place place) const;
  bool is_pad(int64_t token) const;

  /// documents() + 1 entries: slot d is [offsets()[d], offsets()[d + 1]).
  std::span<const int64_t> offsets() const { return data_->offsets; }
  std::span<const int64_t> lengths() const { return data_->lengths; }

  /// documents() + 1 entries: running sums of the real lengths.
  std::vector<int64_t> cumulative_lengths() const;

  /// Longest real length and longest slot; 0 without documents.
  int64_t longest() const;
  int64_t longest_padded() const;

  /// All pads, tail included, as ascending ranges that do not touch.
  std::vector<TokenRange> pads() const;

  /// Every slot rounded up to a multiple, and the tail too; documents move.
  Packing with_slots_multiple_of(int64_t multiple) const;

  /// The tail lengthened until tokens() is a multiple; no document moves.
  Packing with_tokens_multiple_of(int64_t multiple) const;

  std::string to_string() const;
  friend bool operator==(const Packing& a, const Packing& b);

 private:
  struct Data {
    std::vector<int64_t> lengths;
    std::vector<int64_t> offsets;
    int64_t tokens = 0;
    int64_t real_tokens = 0;
  };

  explicit Packing(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  void check_document(const char* who, int64_t document) const;

  std::shared_ptr<const Data> data_;
};

}  // namespace longspan
