#include "longspan/batch/shard.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/batch/derive.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/move_tokens.h"

namespace longspan {

namespace {

/// One tensor made from each packing of a batch: [L], or stacked to [B, L].
template <class Make>
at::Tensor from_packings(const PackedBatch& batch,
                         const std::vector<TokenRange>& tokens,
                         const Make& make) {
  if (batch.form == Form::stream) return make(batch.packings.at(0), tokens);
  std::vector<at::Tensor> rows;
  for (const Packing& packing : batch.packings) {
    rows.push_back(make(packing, tokens));
  }
  if (rows.empty()) {
    return make(Packing::single(batch.tokens()), tokens)
        .unsqueeze(0)
        .narrow(0, 0, 0);
  }
  return at::stack(rows);
}

/// Whether two tensors differ at most in the size of one axis.
bool are_alike(const at::Tensor& a, const at::Tensor& b, int64_t axis) {
  if (a.dim() != b.dim() || a.scalar_type() != b.scalar_type() ||
      a.device() != b.device()) {
    return false;
  }
  if (axis < 0) axis += a.dim();
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (i != axis && a.size(i) != b.size(i)) return false;
  }
  return true;
}

bool has(const NamedTensors& tensors, std::string_view key) {
  return find_tensor(tensors, key).defined();
}

}  // namespace

at::Tensor take_share(const at::Tensor& tensor, const Ownership& ownership,
                      int rank, int64_t axis) {
  check(axis >= -tensor.dim() && axis < tensor.dim(), "take_share: axis ", axis,
        " of ", describe(tensor));
  if (axis < 0) axis += tensor.dim();
  check(tensor.size(axis) == ownership.tokens(), "take_share: axis ", axis,
        " of ", describe(tensor), " is not the ", ownership.tokens(),
        " tokens of the ", ownership.to_string());
  return move_tokens(tensor, axis, ownership.to_rank(rank)).contiguous();
}

LocalBatch shard(const PackedBatch& batch, const Ownership& ownership,
                 int rank) {
  check(rank >= 0 && rank < ownership.ranks(), "shard: rank ", rank, " of ",
        ownership.ranks());
  check(ownership.tokens() == batch.tokens(), "shard: the ownership has ",
        ownership.tokens(), " tokens but the batch ", batch.tokens(),
        "; make it from the padded batch");
  const std::vector<TokenRange> held = ownership.ranges_of(rank);
  const Moves to_rank = Moves::gather(held, ownership.tokens());
  const TokenMover to_local(batch.placement.then(to_rank));
  const bool has_gaps = !batch.placement.gaps().empty();
  LocalBatch local{.tokens = {},
                   .payload = batch.source.payload,
                   .cut = {.form = batch.form,
                           .rows = batch.source.rows,
                           .length = batch.source.length,
                           .packings = batch.packings,
                           .placement = batch.placement,
                           .ownership = ownership,
                           .rank = rank}};
  for (const auto& [key, loaded] : batch.source.tokens) {
    const TokenTensor& row = *batch.source.table.find(key);
    const TokenView view = token_view(row, loaded, batch.form);
    const bool counts = row.fill.kind == Fill::Kind::counting && has_gaps;
    const at::Tensor share =
        counts ? move_tokens(batch.tensor(key), view.axis, to_rank)
               : to_local(view.tensor, view.axis, row.fill.value);
    // New memory even where every token stays.
    local.tokens.emplace_back(key,
                              share.is_alias_of(loaded)
                                  ? share.clone(at::MemoryFormat::Contiguous)
                                  : share);
  }
  const at::Device device = batch.source.tokens.front().second.device();
  const auto derive = [&](const char* key, const auto& make) {
    if (has(local.tokens, key)) return;
    local.tokens.emplace_back(
        key,
        from_packings(batch, held, make).to(device, /*non_blocking=*/true));
  };
  derive("position_ids", [](const auto& packing, const auto& tokens) {
    return position_ids(packing, tokens);
  });
  derive("padding_mask", [](const auto& packing, const auto& tokens) {
    return padding_mask(packing, tokens);
  });
  return local;
}

at::Tensor unshard(const at::Tensor& shares, const Cut& cut,
                   const UnshardOptions& options) {
  int64_t axis = options.axis.value_or(cut.axis());
  check(axis >= -shares.dim() && axis < shares.dim(), "unshard: axis ", axis,
        " of ", describe(shares));
  if (axis < 0) axis += shares.dim();
  const int64_t tokens = cut.ownership.tokens();
  check(shares.size(axis) == tokens, "unshard: axis ", axis, " of ",
        describe(shares), " holds ", shares.size(axis), " tokens, but the ",
        cut.ranks(), " shares have ", tokens, " together",
        shares.size(axis) == cut.local_tokens()
            ? "; give the tensors of all ranks, in rank order"
            : "");
  Moves back = cut.ownership.to_all_ranks().inverse();
  if (!options.trim) return move_tokens(shares, axis, back, options.fill);
  back = back.then(cut.placement.inverse());
  const at::Tensor whole = move_tokens(shares, axis, back, options.fill);
  if (cut.form == Form::rows) return whole;
  return whole.unflatten(axis, {cut.rows, cut.length});
}

at::Tensor unshard(const std::vector<at::Tensor>& shards, const Cut& cut,
                   const UnshardOptions& options) {
  check(std::ssize(shards) == cut.ranks(), "unshard: ", shards.size(),
        " tensors for ", cut.ranks(), " ranks; give one for each rank");
  int64_t axis = options.axis.value_or(cut.axis());
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    const at::Tensor& shard = shards[static_cast<std::size_t>(rank)];
    check(shard.defined(), "unshard: rank ", rank, " gave no tensor");
    check(axis >= -shard.dim() && axis < shard.dim(), "unshard: axis ", axis,
          " of ", describe(shard), " from rank ", rank);
    const int64_t held = cut.ownership.local_tokens(rank);
    check(shard.size(axis) == held, "unshard: rank ", rank, " gave ",
          describe(shard), "; expected its ", held, " tokens at axis ", axis);
    check(are_alike(shard, shards[0], axis), "unshard: rank ", rank, " gave ",
          describe(shard), " on ", shard.device(), " but rank 0 ",
          describe(shards[0]), " on ", shards[0].device(),
          "; only their tokens may differ");
  }
  return unshard(shards.size() == 1 ? shards[0] : at::cat(shards, axis), cut,
                 options);
}

}  // namespace longspan
