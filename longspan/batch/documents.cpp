#include "longspan/batch/documents.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "longspan/batch/detail/host.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, at::kLong).contiguous();
}

void check_has_values(const char* key, const at::Tensor& tensor) {
  check(!tensor.is_meta(), "read_rows: `", key,
        "` is on the meta device, which holds no values; lengths and masks "
        "must be real");
}

/// Lengths of one row of a table, checked.
std::vector<int64_t> lengths_in_row(const std::vector<int64_t>& table,
                                    int64_t row, int64_t width,
                                    int64_t sentinel, const char* key) {
  std::vector<int64_t> lengths = row_entries(table, row, width, sentinel);
  for (int64_t length : lengths) {
    check(length >= 0, "read_rows: `", key, "` of row ", row, " holds ", length,
          "; lengths are not negative, and the sentinel is ", sentinel);
  }
  return lengths;
}

void check_lengths(const at::Tensor& table, const char* key, int64_t rows) {
  check(is_integral(table) && table.dim() == 2 && table.size(0) == rows,
        "read_rows: `", key, "` is ", describe(table), "; expected integers [",
        rows, ", documents]");
  check_has_values(key, table);
}

/// Documents in the order of the lengths; the last slot of a row reaches to
/// its end, so that no loaded token is left without a slot.
std::vector<RowDocument> documents_from_lengths(
    const at::Tensor& seq_lens, const at::Tensor& seq_lens_padded, int64_t rows,
    int64_t length, int64_t sentinel) {
  check_lengths(seq_lens, "seq_lens", rows);
  const bool padded_given = seq_lens_padded.defined();
  if (padded_given) check_lengths(seq_lens_padded, "seq_lens_padded", rows);
  const auto [real, padded] =
      padded_given ? host_lists(seq_lens, seq_lens_padded)
                   : std::pair{host_list(seq_lens), std::vector<int64_t>{}};
  std::vector<RowDocument> documents;
  for (int64_t row = 0; row < rows; ++row) {
    const auto lengths =
        lengths_in_row(real, row, seq_lens.size(1), sentinel, "seq_lens");
    const auto slots =
        padded_given ? lengths_in_row(padded, row, seq_lens_padded.size(1),
                                      sentinel, "seq_lens_padded")
                     : lengths;
    check(lengths.size() == slots.size(), "read_rows: row ", row, " has ",
          lengths.size(), " entries in `seq_lens` but ", slots.size(),
          " in `seq_lens_padded`; expected one slot for each document");
    const TokenRange here{row * length, (row + 1) * length};
    int64_t begin = here.begin;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      check(lengths[i] <= slots[i], "read_rows: document ", i, " of row ", row,
            " has ", lengths[i], " tokens but a slot of ", slots[i]);
      check(slots[i] <= here.end - begin, "read_rows: the documents of row ",
            row, " take ", begin - here.begin, " + ", slots[i],
            " tokens or more but the row has ", length,
            "; shorten the lengths or widen the row");
      documents.push_back(
          {row, {begin, begin + lengths[i]}, {begin, begin + slots[i]}});
      begin += slots[i];
    }
    if (lengths.empty()) {
      documents.push_back({row, {here.begin, here.begin}, here});
    } else {
      documents.back().slot.end = here.end;
    }
  }
  return documents;
}

/// The documents of one row from where they begin and end, as collators for
/// attention with offsets give them: 0, ..., length.
std::vector<RowDocument> documents_from_offsets(const NamedTensors& batch,
                                                int64_t rows, int64_t length) {
  const at::Tensor offsets = find_tensor(batch, "cu_seq_lens_q");
  check(is_integral(offsets) && offsets.dim() == 1 && rows == 1,
        "read_rows: `cu_seq_lens_q` is ", describe(offsets), " beside ", rows,
        " rows; expected integers [documents + 1] of one row");
  check_has_values("cu_seq_lens_q", offsets);
  const at::Tensor keys = find_tensor(batch, "cu_seq_lens_k");
  check(!keys.defined() || keys.equal(offsets),
        "read_rows: `cu_seq_lens_k` is not `cu_seq_lens_q`; queries and keys "
        "are the same tokens here");
  const std::vector<int64_t> ends = host_list(offsets);
  check(std::ranges::is_sorted(ends) && !ends.empty() && ends.front() == 0 &&
            ends.back() == length,
        "read_rows: `cu_seq_lens_q` does not ascend from 0 to the ", length,
        " tokens of the row");
  std::vector<RowDocument> documents;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    const TokenRange range{ends[i], ends[i + 1]};
    documents.push_back({0, range, range});
  }
  return documents;
}

/// Runs of equal non-zero numbers in each row; pads get no slot.
std::vector<RowDocument> documents_from_ids(const at::Tensor& ids) {
  const int64_t rows = ids.size(0);
  const int64_t length = ids.size(1);
  std::vector<RowDocument> documents;
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row, id += length) {
    const std::size_t first = documents.size();
    std::optional<int64_t> previous;
    for (int64_t begin = 0; begin < length;) {
      int64_t end = begin + 1;
      while (end < length && id[end] == id[begin]) ++end;
      if (id[begin] != 0) {
        check(previous != id[begin], "read_rows: row ", row,
              " of the mask has pads inside a document, before column ", begin,
              "; documents are unbroken, so number the parts 1, 2, ... if "
              "they are several");
        previous = id[begin];
        const TokenRange real{row * length + begin, row * length + end};
        documents.push_back({row, real, real});
      }
      begin = end;
    }
    if (documents.size() == first) {
      const int64_t begin = row * length;
      documents.push_back({row, {begin, begin}, {begin, begin}});
    }
  }
  return documents;
}

/// What a mask of queries x keys says about its tokens, still on its device.
struct SquareMask {
  at::Tensor real;      ///< bool [rows, tokens]
  at::Tensor is_plain;  ///< bool []: no more in it than causality and padding
};

SquareMask read_square(const at::Tensor& mask) {
  const bool is_bool = mask.scalar_type() == at::kBool;
  check(is_bool || at::isFloatingType(mask.scalar_type()), "attention_mask is ",
        describe(mask),
        "; with four axes it is bool (true = attend) or additive floating "
        "point (0 = attend), because integers could mean either");
  check(mask.size(1) >= 1 && mask.size(2) == mask.size(3), "attention_mask is ",
        describe(mask), "; expected a square of queries and keys");
  const at::Tensor allowed = is_bool ? mask : mask.eq(0);
  const at::Tensor real = allowed.select(1, 0).diagonal(0, -2, -1);
  // Rows of pad queries may hold anything.
  const at::Tensor expected =
      at::ones({mask.size(2), mask.size(3)}, allowed.options())
          .tril()
          .logical_and(real.unsqueeze(1).unsqueeze(2));
  const at::Tensor agrees = allowed.eq(expected).logical_or(
      real.logical_not().unsqueeze(1).unsqueeze(3));
  if (is_bool) return {real, agrees.all()};
  // Positive numbers mean that 1 = attend was meant, the other way round.
  return {real, agrees.all().logical_and(mask.le(0).all())};
}

/// What CP keeps of the mask is causality and padding; say so when there is
/// more in it.
void check_plain(bool is_plain, const at::Tensor& mask) {
  check(is_plain, "attention_mask ", describe(mask),
        " is more than causal attention with padding",
        mask.is_floating_point() ? ", or not additive (0 = attend)" : "",
        "; give the documents as seq_lens or as numbers in a [rows, tokens] "
        "mask");
}

/// Document numbers of every token on the host, 0 for pads; one copy.
at::Tensor ids_of_mask(const at::Tensor& mask, int64_t rows, int64_t length) {
  const bool is_square = mask.dim() == 4;
  check((mask.dim() == 2 || (is_square && mask.size(2) == length)) &&
            mask.size(0) == rows && mask.size(-1) == length,
        "read_rows: `attention_mask` is ", describe(mask), "; expected [", rows,
        ", ", length, "] or [", rows, ", 1, ", length, ", ", length, "]");
  check_has_values("attention_mask", mask);
  if (is_square) {
    const SquareMask square = read_square(mask);
    const at::Tensor both = on_host(
        at::cat({square.real.reshape({-1}), square.is_plain.view({1})}));
    check_plain(both[rows * length].item<bool>(), mask);
    return both.narrow(0, 0, rows * length).view({rows, length});
  }
  check(!mask.is_complex(), "read_rows: `attention_mask` is ", describe(mask),
        "; expected numbers of documents, 0 = pad");
  if (!mask.is_floating_point()) return on_host(mask);
  const at::Tensor numbers = mask.to(at::kCPU, at::kDouble);
  const at::Tensor whole =
      numbers.isfinite().logical_and_(numbers.trunc().eq(numbers));
  check(whole.all().item<bool>(), "read_rows: `attention_mask` is ",
        describe(mask),
        " with fractions or infinities; with two axes it holds numbers of "
        "documents, 0 = pad");
  return on_host(numbers);
}

/// The positions of every token on the host, or nothing where they say nothing
/// about documents: planes of images, or no values at all.
at::Tensor host_positions(const NamedTensors& batch, int64_t rows,
                          int64_t length) {
  const at::Tensor positions = find_tensor(batch, "position_ids");
  const bool says = positions.defined() && is_integral(positions) &&
                    positions.dim() == 2 && !positions.is_meta() &&
                    positions.size(1) == length &&
                    (positions.size(0) == rows || positions.size(0) == 1);
  return says ? on_host(positions.expand({rows, length})) : at::Tensor();
}

/// Documents without pads of their own, cut where a position is 0.
std::vector<RowDocument> cut_at_restarts(std::vector<RowDocument> documents,
                                         const at::Tensor& positions) {
  if (!positions.defined()) return documents;
  const int64_t* const position = positions.const_data_ptr<int64_t>();
  std::vector<RowDocument> parts;
  for (const RowDocument& document : documents) {
    int64_t begin = document.real.begin;
    for (int64_t i = begin + 1; i < document.real.end; ++i) {
      if (position[i] != 0) continue;
      parts.push_back({document.row, {begin, i}, {begin, i}});
      begin = i;
    }
    const TokenRange last{begin, document.real.end};
    parts.push_back({document.row, last, last});
  }
  return parts;
}

/// What the mask of a batch calls documents: 0 for pads, the same number for
/// neighbours that belong together. Undefined without a mask.
at::Tensor host_ids(const NamedTensors& batch, int64_t rows, int64_t length) {
  const at::Tensor mask = find_tensor(batch, "attention_mask");
  if (mask.defined()) return ids_of_mask(mask, rows, length);
  const at::Tensor pads = find_tensor(batch, "padding_mask");
  if (!pads.defined()) return {};
  check(pads.scalar_type() == at::kBool && pads.dim() == 2 &&
            pads.size(0) == rows && pads.size(1) == length,
        "read_rows: `padding_mask` is ", describe(pads), "; expected bool [",
        rows, ", ", length, "], true = pad");
  check_has_values("padding_mask", pads);
  return on_host(pads.logical_not());
}

}  // namespace

std::vector<RowDocument> find_documents(const NamedTensors& batch, int64_t rows,
                                        int64_t length, int64_t sentinel) {
  const at::Tensor seq_lens = find_tensor(batch, "seq_lens");
  const at::Tensor padded = find_tensor(batch, "seq_lens_padded");
  if (seq_lens.defined()) {
    return documents_from_lengths(seq_lens, padded, rows, length, sentinel);
  }
  check(!padded.defined(),
        "read_rows: `seq_lens_padded` without `seq_lens`; give both");
  if (find_tensor(batch, "cu_seq_lens_q").defined()) {
    return documents_from_offsets(batch, rows, length);
  }
  const at::Tensor ids = host_ids(batch, rows, length);
  std::vector<RowDocument> documents;
  if (ids.defined()) {
    documents = documents_from_ids(ids);
    const bool numbered =
        ids.numel() > 0 && ids.ne(0).logical_and(ids.ne(1)).any().item<bool>();
    if (numbered) return documents;
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      const TokenRange all{row * length, (row + 1) * length};
      documents.push_back({row, all, all});
    }
  }
  return cut_at_restarts(std::move(documents),
                         host_positions(batch, rows, length));
}

at::Tensor pads_of_attention_mask(const at::Tensor& mask) {
  if (mask.dim() != 4) {
    check(mask.dim() == 2, "attention_mask is ", describe(mask),
          "; expected [rows, tokens] or [rows, 1, tokens, tokens]");
    return mask.to(at::kBool).logical_not();
  }
  check(!mask.is_meta(), "attention_mask is ", describe(mask),
        " on the meta device, which holds no values");
  const SquareMask square = read_square(mask);
  check_plain(square.is_plain.item<bool>(), mask);
  return square.real.logical_not();
}

}  // namespace longspan
