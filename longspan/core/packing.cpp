#include "longspan/core/packing.h"

#include <algorithm>
#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/search.h"

namespace longspan {

namespace {

void check_documents(int64_t documents) {
  check(documents <= Packing::kMostDocuments, "Packing: ", documents,
        " documents; a stream has at most ", Packing::kMostDocuments);
}

}  // namespace

Packing::Packing() : data_(std::make_shared<const Data>(Data{{}, {0}, 0, 0})) {}

Packing Packing::of(std::vector<int64_t> lengths) {
  auto padded = lengths;
  return of(std::move(lengths), std::move(padded));
}

Packing Packing::of(std::vector<int64_t> lengths,
                    std::vector<int64_t> padded_lengths) {
  int64_t tokens = 0;
  for (int64_t padded : padded_lengths) {
    check(padded >= 0, "Packing: a padded length is ", padded,
          "; lengths are not negative (drop sentinels first)");
    check(tokens <= std::numeric_limits<int64_t>::max() - padded,
          "Packing: the padded lengths add up to more than 64 bits hold");
    tokens += padded;
  }
  return of(std::move(lengths), std::move(padded_lengths), tokens);
}

Packing Packing::of(std::vector<int64_t> lengths,
                    std::vector<int64_t> padded_lengths, int64_t tokens) {
  check_documents(std::ssize(lengths));
  check(lengths.size() == padded_lengths.size(), "Packing: ", lengths.size(),
        " lengths but ", padded_lengths.size(),
        " padded lengths; expected one padded length for each document");
  Data data;
  data.offsets.reserve(lengths.size() + 1);
  data.offsets.push_back(0);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    check(lengths[i] >= 0, "Packing: document ", i, " has length ", lengths[i],
          "; lengths are not negative (drop sentinels first)");
    check(lengths[i] <= padded_lengths[i], "Packing: document ", i, " has ",
          lengths[i], " tokens but a slot of ", padded_lengths[i],
          "; the padded length must be at least the length");
    const int64_t offset = data.offsets.back();
    check(offset <= std::numeric_limits<int64_t>::max() - padded_lengths[i],
          "Packing: the padded lengths add up to more than 64 bits hold");
    data.offsets.push_back(offset + padded_lengths[i]);
    data.real_tokens += lengths[i];
  }
  check(data.offsets.back() <= tokens, "Packing: the slots hold ",
        data.offsets.back(), " tokens but the stream has ", tokens,
        "; shorten the documents or lengthen the stream");
  data.lengths = std::move(lengths);
  data.tokens = tokens;
  return Packing(std::make_shared<const Data>(std::move(data)));
}

Packing Packing::single(int64_t tokens) {
  check(tokens >= 0, "Packing: a stream of ", tokens,
        " tokens; expected at least 0");
  return of({tokens});
}

Packing Packing::rows(int64_t rows, int64_t length) {
  check(rows >= 0 && length >= 0, "Packing: ", rows, " rows of ", length,
        " tokens; neither may be negative");
  check_documents(rows);
  return of(std::vector<int64_t>(static_cast<std::size_t>(rows), length));
}

void Packing::check_document(const char* who, int64_t document) const {
  check(document >= 0 && document < documents(), who, ": document ", document,
        " of ", documents());
}

int64_t Packing::length(int64_t document) const {
  check_document("Packing::length", document);
  return data_->lengths[static_cast<std::size_t>(document)];
}

int64_t Packing::padded_length(int64_t document) const {
  return slot(document).size();
}

int64_t Packing::offset(int64_t document) const {
  return slot(document).begin;
}

TokenRange Packing::real(int64_t document) const {
  const int64_t begin = offset(document);
  return {begin, begin + data_->lengths[static_cast<std::size_t>(document)]};
}

TokenRange Packing::slot(int64_t document) const {
  check_document("Packing::slot", document);
  const auto d = static_cast<std::size_t>(document);
  return {data_->offsets[d], data_->offsets[d + 1]};
}

TokenRange Packing::tail() const {
  return {data_->offsets.back(), data_->tokens};
}

Packing::Place Packing::locate(int64_t token) const {
  check(token >= 0 && token < data_->tokens, "Packing::locate: token ", token,
        " of ", data_->tokens);
  const auto& offsets = data_->offsets;
  if (token >= offsets.back()) return {kTail, token - offsets.back()};
  const int64_t document = last_not_above(offsets, token);
  return {document, token - offsets[static_cast<std::size_t>(document)]};
}

int64_t Packing::token_of(Place place) const {
  const TokenRange range =
      place.document == kTail ? tail() : slot(place.document);
  check(place.position >= 0 && place.position < range.size(),
        "Packing::token_of: position ", place.position, " of ", range.size());
  return range.begin + place.position;
}

bool Packing::is_pad(int64_t token) const {
  const Place place = locate(token);
  return place.document == kTail ||
         place.position >=
             data_->lengths[static_cast<std::size_t>(place.document)];
}

std::vector<int64_t> Packing::cumulative_lengths() const {
  std::vector<int64_t> sums{0};
  sums.reserve(data_->offsets.size());
  for (int64_t length : data_->lengths) sums.push_back(sums.back() + length);
  return sums;
}

int64_t Packing::longest() const {
  const auto& lengths = data_->lengths;
  return lengths.empty() ? 0 : *std::ranges::max_element(lengths);
}

int64_t Packing::longest_padded() const {
  int64_t longest = 0;
  for (int64_t d = 0; d < documents(); ++d) {
    longest = std::max(longest, slot(d).size());
  }
  return longest;
}

std::vector<TokenRange> Packing::pads() const {
  std::vector<TokenRange> pads;
  for (int64_t d = 0; d < documents(); ++d) {
    append_range(pads, {real(d).end, slot(d).end});
  }
  append_range(pads, tail());
  return pads;
}

Packing Packing::with_slots_multiple_of(int64_t multiple) const {
  std::vector<int64_t> padded;
  padded.reserve(data_->lengths.size());
  int64_t tokens = round_up(tail().size(), multiple);
  for (int64_t d = 0; d < documents(); ++d) {
    padded.push_back(round_up(slot(d).size(), multiple));
    check(tokens <= std::numeric_limits<int64_t>::max() - padded.back(),
          "Packing: the padded lengths add up to more than 64 bits hold");
    tokens += padded.back();
  }
  return of(data_->lengths, std::move(padded), tokens);
}

Packing Packing::with_tokens_multiple_of(int64_t multiple) const {
  Data data = *data_;
  data.tokens = round_up(tokens(), multiple);
  return Packing(std::make_shared<const Data>(std::move(data)));
}

std::string Packing::to_string() const {
  std::string text = join("Packing(", tokens(), " tokens, ", documents(),
                          documents() == 1 ? " document" : " documents");
  constexpr int64_t kShown = 8;
  for (int64_t d = 0; d < std::min(documents(), kShown); ++d) {
    text += join(d == 0 ? ": " : " ", length(d));
    if (padded_length(d) != length(d)) text += join("/", padded_length(d));
  }
  if (documents() > kShown) text += " ...";
  return text + ")";
}

bool operator==(const Packing& a, const Packing& b) {
  return a.data_ == b.data_ || (a.data_->tokens == b.data_->tokens &&
                                a.data_->lengths == b.data_->lengths &&
                                a.data_->offsets == b.data_->offsets);
}

}  // namespace longspan
