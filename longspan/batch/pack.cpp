#include "longspan/batch/pack.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/multiple.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/move_tokens.h"

namespace longspan {

namespace {

/// The documents of one row inside `tokens` tokens. Pads before the first
/// document are a document without real tokens; pads after one are its own.
Packing pack_row(std::span<const RowDocument> documents, int64_t row_begin,
                 int64_t tokens) {
  std::vector<int64_t> lengths;
  std::vector<int64_t> slots;
  int64_t next = row_begin;
  for (const RowDocument& document : documents) {
    const int64_t lead = document.real.begin - next;
    if (lead > 0 && lengths.empty()) {
      lengths.push_back(0);
      slots.push_back(lead);
    } else if (lead > 0) {
      slots.back() += lead;
    }
    lengths.push_back(document.real.size());
    slots.push_back(document.slot.end - document.real.begin);
    next = document.slot.end;
  }
  if (lengths.empty()) return Packing::of({0}, {tokens});
  slots.back() += row_begin + tokens - next;
  return Packing::of(std::move(lengths), std::move(slots));
}

/// Rows of `tokens` tokens.
void lay_rows(PackedBatch& batch, int64_t tokens) {
  const RowBatch& source = batch.source;
  const std::span<const RowDocument> documents = source.documents;
  batch.packings.clear();
  std::size_t first = 0;
  for (int64_t row = 0; row < source.rows; ++row) {
    const int64_t begin = row * source.length;
    std::size_t last = first;
    while (last < documents.size() && documents[last].row == row) ++last;
    batch.packings.push_back(
        pack_row(documents.subspan(first, last - first), begin, tokens));
    first = last;
  }
  batch.placement = Moves::of({{0, 0, source.length}}, source.length, tokens);
}

void lay_stream(PackedBatch& batch) {
  const RowBatch& source = batch.source;
  std::vector<int64_t> lengths;
  std::vector<int64_t> slots;
  std::vector<Run> runs;
  int64_t next = 0;
  for (const RowDocument& document : source.documents) {
    const int64_t loaded = document.slot.end - document.real.begin;
    lengths.push_back(document.real.size());
    slots.push_back(loaded);
    runs.push_back({document.real.begin, next, loaded});
    next += loaded;
  }
  const Packing packing = Packing::of(std::move(lengths), std::move(slots));
  batch.placement =
      Moves::of(std::move(runs), source.rows * source.length, packing.tokens());
  batch.packings = {packing};
}

/// The slots of a stream moved apart.
void widen_stream(PackedBatch& batch, const PadTo& to) {
  const Packing narrow = batch.packings.at(0);
  const Packing wide = padded(narrow, to);
  if (wide == narrow) return;
  std::vector<Run> runs;
  runs.reserve(static_cast<std::size_t>(narrow.documents()));
  for (int64_t d = 0; d < narrow.documents(); ++d) {
    const TokenRange slot = narrow.slot(d);
    runs.push_back({slot.begin, wide.offset(d), slot.size()});
  }
  batch.placement = batch.placement.then(
      Moves::of(std::move(runs), narrow.tokens(), wide.tokens()));
  batch.packings = {wide};
}

/// Placed tokens with counting values in the gaps: each gap continues the
/// token before it, or counts from 0 where its document has none.
at::Tensor place_counting(const at::Tensor& source, int64_t axis,
                          const Moves& placement) {
  at::Tensor placed = move_tokens(source, axis, placement, 0);
  std::vector<int64_t> gap_tokens;
  std::vector<int64_t> anchors;
  std::vector<int64_t> steps;
  for (TokenRange gap : placement.gaps()) {
    for (int64_t token = gap.begin; token < gap.end; ++token) {
      gap_tokens.push_back(token);
      anchors.push_back(std::max<int64_t>(gap.begin - 1, 0));
      steps.push_back(gap.begin == 0 ? token : token - gap.begin + 1);
    }
  }
  const auto list = [&](const std::vector<int64_t>& values) {
    return at::tensor(values, at::TensorOptions(at::kLong)).to(source.device());
  };
  auto shape = std::vector<int64_t>(static_cast<std::size_t>(source.dim()), 1);
  shape[static_cast<std::size_t>(axis)] = std::ssize(steps);
  const at::Tensor values = placed.index_select(axis, list(anchors)) +
                            list(steps).to(source.scalar_type()).view(shape);
  return placed.index_copy(axis, list(gap_tokens), values);
}

}  // namespace

PackedBatch pack(RowBatch batch, Form form) {
  PackedBatch packed;
  packed.source = std::move(batch);
  packed.form = form;
  if (form == Form::rows) {
    lay_rows(packed, packed.source.length);
  } else {
    lay_stream(packed);
  }
  return packed;
}

PackedBatch pad(const PackedBatch& batch, const PadTo& to) {
  PackedBatch padded = batch;
  if (batch.form == Form::rows) {
    check(to.slot_multiple == 1, "pad: documents inside rows do not move; ",
          "slots can only be rounded up in a stream");
    lay_rows(padded, round_up(batch.tokens(), to.total_multiple));
  } else {
    widen_stream(padded, to);
  }
  return padded;
}

PadTo padding_for(OwnershipKind kind, Form form, int ranks, int64_t share) {
  check(kind != OwnershipKind::per_document_head_tail || form == Form::stream,
        "padding_for: per-document head-tail cuts the documents of a stream; "
        "rows have head-tail");
  return padding_for(kind, ranks, share);
}

TokenView token_view(const TokenTensor& row, const at::Tensor& tensor,
                     Form form) {
  const int64_t axis = row.axis_of(tensor);
  if (form == Form::rows) return {tensor, axis};
  return {tensor.flatten(axis - 1, axis), axis - 1};
}

at::Tensor PackedBatch::tensor(std::string_view key) const {
  const at::Tensor loaded = find_tensor(source.tokens, key);
  check(loaded.defined(), "PackedBatch: no per-token tensor '", key, "'");
  const TokenTensor* row = source.table.find(key);
  const TokenView view = token_view(*row, loaded, form);
  if (row->fill.kind == Fill::Kind::counting && !placement.gaps().empty()) {
    return place_counting(view.tensor, view.axis, placement);
  }
  return move_tokens(view.tensor, view.axis, placement, row->fill.value);
}

}  // namespace longspan
