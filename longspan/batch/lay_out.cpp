#include "longspan/batch/lay_out.h"

#include <algorithm>
#include <utility>

#include "longspan/core/detail/check.h"

namespace longspan {

PackedBatch pad(const PackedBatch& batch, const NamedLayout& layout, int ranks,
                int64_t share) {
  check(batch.form == layout.form, "pad: layout '", layout.name, "' cuts ",
        to_string(layout.form), ", but the batch is ", to_string(batch.form));
  return pad(batch, padding_for(layout.kind, layout.form, ranks, share));
}

PackedBatch pad(const PackedBatch& batch, const Ownership& ownership) {
  const bool longer = ownership.tokens() > batch.tokens() && batch.tokens() > 0;
  return longer ? pad(batch, PadTo{.total_multiple = ownership.tokens()})
                : batch;
}

LaidOut lay_out(RowBatch batch, const NamedLayout& layout, int ranks,
                int64_t share) {
  PackedBatch packed =
      pad(pack(std::move(batch), layout.form), layout, ranks, share);
  const Packing cut = layout.form == Form::stream
                          ? packed.packings.front()
                          : Packing::single(packed.tokens());
  return {std::move(packed), Ownership::of(layout.kind, cut, ranks)};
}

const NamedLayout& fitting_layout(const RowBatch& batch, int ranks,
                                  int64_t share) {
  const NamedLayout& rows = layout_named("fitting_layout", "head-tail");
  const NamedLayout& documents =
      layout_named("fitting_layout", "per-document-head-tail");
  const bool shared = std::ranges::any_of(
      pack(batch, Form::rows).packings,
      [](const Packing& row) { return row.documents() > 1; });
  // One rank has no work to share out, and keeps one form for all batches.
  if (!shared || ranks == 1) return rows;
  const PackedBatch stream = pack(batch, Form::stream);
  const int64_t pads =
      pad(stream, documents, ranks, share).tokens() - stream.tokens();
  return pads * 50 < stream.tokens() ? documents : rows;
}

LaidOut lay_out(RowBatch batch, const Ownership& ownership, Form form) {
  return {pad(pack(std::move(batch), form), ownership), ownership};
}

}  // namespace longspan
