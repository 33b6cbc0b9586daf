#include "compat/nemo/cpp/reference.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "longspan/batch/cut.h"
#include "longspan/batch/detail/host.h"
#include "longspan/batch/row_batch.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/core/multiple.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/ops/checks.h"

namespace longspan::nemo {

namespace {

using Lengths = std::vector<int64_t>;

void check_integers(const char* who, const char* key, const at::Tensor& tensor,
                    int64_t axes) {
  check(is_integral(tensor) && tensor.dim() == axes, who, ": `", key, "` is ",
        describe(tensor), "; expected integers with ", axes,
        axes == 1 ? " axis" : " axes");
}

Lengths running_sums(const Lengths& lengths) {
  Lengths sums{0};
  for (int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

at::Tensor int32_on(const Lengths& values, const at::Tensor& like) {
  at::Tensor list =
      at::empty({std::ssize(values)}, at::TensorOptions(at::kInt));
  int32_t* out = list.mutable_data_ptr<int32_t>();
  for (int64_t value : values) {
    check(value >= std::numeric_limits<int32_t>::min() &&
              value <= std::numeric_limits<int32_t>::max(),
          "thd_lengths: an offset of ", value,
          " tokens does not fit 32 bits; use fewer tokens in a stream");
    *out++ = static_cast<int32_t>(value);
  }
  return list.to(like.device());
}

/// Everything the corrected rule knows: real lengths and slots in stream
/// order, and the pads of every row.
struct Corrected {
  Lengths lengths;
  Lengths slots;
  bool slots_moved = false;  // a row's tail went to a slot
  std::vector<TokenRange> real;
};

int64_t checked_sum(const char* key, const Lengths& lengths, int64_t row,
                    int64_t length) {
  int64_t total = 0;
  for (int64_t entry : lengths) {
    check(entry >= 0, "thd_lengths: `", key, "` of row ", row, " holds ", entry,
          "; lengths are not negative (is this the sentinel?)");
    check(entry <= length - total, "thd_lengths: `", key, "` of row ", row,
          " takes ", total, " + ", entry, " tokens but the row has ", length,
          "; shorten the lengths or widen the row");
    total += entry;
  }
  return total;
}

void add_row(Corrected& all, Lengths real, Lengths slots, bool slots_given,
             int64_t row, int64_t length, bool is_last) {
  const int64_t first = row * length;
  const int64_t covered = checked_sum(
      slots_given ? "seq_lens_padded" : "seq_lens", slots, row, length);
  const int64_t real_total = checked_sum("seq_lens", real, row, length);
  int64_t begin = first;
  if (real.size() == slots.size()) {
    for (std::size_t i = 0; i < real.size(); ++i) {
      check(real[i] <= slots[i], "thd_lengths: document ", i, " of row ", row,
            " has ", real[i], " tokens but a slot of ", slots[i]);
      append_range(all.real, {begin, begin + real[i]});
      begin += slots[i];
    }
  } else {
    check(slots.size() == 1 && real_total <= slots[0], "thd_lengths: row ", row,
          " has ", real.size(), " entries in `seq_lens` but ", slots.size(),
          " in `seq_lens_padded`; expected one for each document");
    append_range(all.real, {begin, begin + real_total});
  }
  const int64_t tail = length - covered;
  if (tail > 0 && !is_last) {
    if (slots.empty() && all.slots.empty()) {
      real.push_back(0);
      slots.push_back(0);
    }
    (slots.empty() ? all.slots : slots).back() += tail;
    all.slots_moved = true;
  }
  all.lengths.insert(all.lengths.end(), real.begin(), real.end());
  all.slots.insert(all.slots.end(), slots.begin(), slots.end());
}

at::Tensor pads_outside(const std::vector<TokenRange>& real, int64_t tokens,
                        const at::Tensor& like) {
  at::Tensor pads = at::ones({tokens}, at::TensorOptions(at::kBool));
  bool* out = pads.mutable_data_ptr<bool>();
  for (TokenRange range : real) {
    std::fill(out + range.begin, out + range.end, false);
  }
  return pads.to(like.device());
}

/// Drops what follows the last real entry of a list with sentinels.
Lengths without_tail(Lengths list) {
  const auto end = std::ranges::find_if(list, [](int64_t x) { return x < 0; });
  list.erase(end, list.end());
  return list;
}

Lengths differences(const char* who, const Lengths& cu) {
  check(!cu.empty() && cu[0] == 0, who, ": cumulative lengths start with 0");
  Lengths lengths;
  for (std::size_t i = 1; i < cu.size(); ++i) {
    check(cu[i] >= cu[i - 1], who, ": cumulative lengths fall from ", cu[i - 1],
          " to ", cu[i]);
    lengths.push_back(cu[i] - cu[i - 1]);
  }
  return lengths;
}

void check_fits_windows(const char* who, const Packing& packing) {
  check(packing.tokens() <= std::numeric_limits<int32_t>::max(), who, ": ",
        packing.tokens(), " tokens do not fit 32-bit windows");
}

}  // namespace

ThdLengths thd_lengths(const at::Tensor& seq_lens,
                       const std::optional<at::Tensor>& seq_lens_padded,
                       int64_t sentinel, int64_t rows, int64_t length,
                       Rule rule) {
  const bool padded_given = seq_lens_padded.has_value();
  const at::Tensor& padded_table = padded_given ? *seq_lens_padded : seq_lens;
  check_integers("thd_lengths", "seq_lens", seq_lens, seq_lens.dim());
  check_integers("thd_lengths", "seq_lens_padded", padded_table,
                 padded_table.dim());
  const auto [real_table, slot_table] = host_lists(seq_lens, padded_table);

  Lengths lengths;
  Lengths slots;
  bool has_slots = padded_given;
  ThdLengths result;
  if (rule == Rule::reference) {
    lengths = row_entries(real_table, 0, std::ssize(real_table), sentinel);
    slots = row_entries(slot_table, 0, std::ssize(slot_table), sentinel);
  } else {
    const auto check_rows = [&](const char* key, const at::Tensor& table) {
      check(table.dim() == 2 && table.size(0) == rows, "thd_lengths: `", key,
            "` is ", describe(table), "; expected [", rows, ", documents]");
    };
    check_rows("seq_lens", seq_lens);
    check_rows("seq_lens_padded", padded_table);
    Corrected all;
    const auto slots_of = [&](int64_t row) {
      return row_entries(slot_table, row, padded_table.size(1), sentinel);
    };
    // Behind the last document nothing has to be where it lies.
    int64_t last = rows - 1;
    while (last >= 0 && slots_of(last).empty()) --last;
    for (int64_t row = 0; row < rows; ++row) {
      add_row(all, row_entries(real_table, row, seq_lens.size(1), sentinel),
              slots_of(row), padded_given, row, length, row >= last);
    }
    lengths = std::move(all.lengths);
    slots = std::move(all.slots);
    has_slots = padded_given || all.slots_moved;
    result.padding_mask = pads_outside(all.real, rows * length, seq_lens);
  }
  Lengths cu = running_sums(lengths);
  Lengths cu_padded = running_sums(slots);
  // Pads that only follow the last document become part of it.
  if (padded_given && cu.size() == cu_padded.size() && cu.size() > 1 &&
      std::equal(cu.begin(), cu.end() - 1, cu_padded.begin()) &&
      cu.back() < rows * length) {
    cu.back() = rows * length;
    cu_padded = cu;
  }
  result.cu = int32_on(cu, seq_lens);
  if (has_slots && cu_padded != cu) {
    result.cu_padded = int32_on(cu_padded, seq_lens);
  }
  if (cu.size() > 1) {
    int64_t longest = std::numeric_limits<int64_t>::min();
    for (std::size_t i = 1; i < cu.size(); ++i) {
      longest = std::max(longest, cu[i] - cu[i - 1]);
    }
    result.max_seqlen = int32_on({longest}, seq_lens).squeeze(0);
  }
  return result;
}

at::Tensor document_partition(const at::Tensor& cu, int64_t total, int ranks,
                              int rank, Rule rule) {
  const char* const who = "document_partition";
  check(cu.dim() == 1 && cu.scalar_type() == at::kInt && cu.size(0) >= 2, who,
        ": `cu` is ", describe(cu), "; expected int32 [documents + 1]");
  check(ranks >= 1 && rank >= 0 && rank < ranks, who, ": rank ", rank, " of ",
        ranks);
  const int64_t multiple =
      tokens_multiple(OwnershipKind::per_document_head_tail, ranks);
  check(total > 0 && total % multiple == 0, who, ": ", total,
        " tokens do not split over ", ranks,
        " ranks in 2 equal parts each; pad to ",
        round_up(std::max<int64_t>(total, 1), multiple));
  const Lengths offsets = host_list(cu);
  for (int64_t offset : offsets) {
    check(offset % multiple == 0, who, ": offset ", offset,
          " is not a multiple of 2 x ", ranks,
          " ranks; pad every document to one");
  }
  at::Tensor tokens;
  if (rule == Rule::corrected || offsets.back() >= total) {
    const Lengths slots = differences(who, offsets);
    const Packing packing = Packing::of(slots, slots, total);
    tokens =
        token_indices(Ownership::per_document_head_tail(packing, ranks), rank);
  } else {
    // The reference lets tokens past the last offset count on from what a rank
    // holds of the last document, which doubles some and loses others.
    const Lengths slots = differences(who, offsets);
    const Ownership cut =
        Ownership::per_document_head_tail(Packing::of(slots), ranks);
    const int64_t share =
        Ownership::contiguous(total, ranks).local_tokens(rank);
    const int64_t known = cut.local_tokens(rank);
    const int64_t last =
        slots.back() > 0 ? cut.global_of(rank, known - 1) : cut.tokens() - 1;
    tokens = at::empty({share}, at::TensorOptions(at::kLong));
    int64_t* out = tokens.mutable_data_ptr<int64_t>();
    for (int64_t t = 0; t < share; ++t) {
      *out++ = t < known ? cut.global_of(rank, t) : last + 1 + t - known;
    }
  }
  return tokens.to(cu.device(), at::kInt);
}

KeyWindows padded_windows(const at::Tensor& cu, const at::Tensor& cu_padded) {
  const char* const who = "padded_windows";
  check_integers(who, "cu_seqlens", cu, 1);
  check_integers(who, "cu_seqlens_padded", cu_padded, 1);
  const auto [real_list, slot_list] = host_lists(cu, cu_padded);
  const Lengths lengths = differences(who, without_tail(real_list));
  const Lengths slots = differences(who, without_tail(slot_list));
  check(lengths.size() == slots.size(), who, ": ", lengths.size(),
        " documents in `cu_seqlens` but ", slots.size(),
        " in `cu_seqlens_padded`");
  const Packing packing = Packing::of(lengths, slots);
  check_fits_windows(who, packing);
  KeyWindows windows = key_windows(
      Mask::causal(packing).with_pad_queries(PadQueries::see_document));
  // A document without real tokens shows its first pad.
  for (int64_t d = 0; d < packing.documents(); ++d) {
    const TokenRange slot = packing.slot(d);
    if (packing.length(d) > 0 || slot.empty()) continue;
    windows.begin.narrow(0, slot.begin, slot.size()).fill_(slot.begin);
    windows.end.narrow(0, slot.begin, slot.size()).fill_(slot.begin + 1);
  }
  return {windows.begin.to(cu.device()), windows.end.to(cu.device())};
}

KeyWindows compact_windows(const at::Tensor& cu) {
  check_integers("compact_windows", "cu_seqlens", cu, 1);
  const Packing packing =
      Packing::of(differences("compact_windows", without_tail(host_list(cu))));
  check_fits_windows("compact_windows", packing);
  const KeyWindows windows = key_windows(Mask::causal(packing));
  return {windows.begin.to(cu.device(), at::kInt),
          windows.end.to(cu.device(), at::kLong)};
}

at::Tensor pads_of_mask(const at::Tensor& mask, Rule rule) {
  if (rule == Rule::corrected) return pads_of_attention_mask(mask);
  if (mask.dim() != 4) return mask.to(at::kBool).logical_not();
  const at::Tensor diagonal = mask.select(1, 0).diagonal(0, -2, -1);
  return mask.scalar_type() == at::kBool ? diagonal.logical_not()
                                         : diagonal.ne(0);
}

at::Tensor dense_causal_mask(const at::Tensor& position_ids, int64_t keys,
                             at::ScalarType dtype,
                             const std::optional<at::Tensor>& pads,
                             std::optional<int64_t> window) {
  const char* const who = "dense_causal_mask";
  check(is_integral(position_ids) &&
            (position_ids.dim() == 1 || position_ids.dim() == 2),
        who, ": `position_ids` is ", describe(position_ids),
        "; expected integers [rows, tokens]");
  check(keys >= 0, who, ": ", keys, " keys");
  check(at::isFloatingType(dtype), who,
        ": the mask is additive, so its type is floating point");
  const at::Tensor query =
      (position_ids.dim() == 1 ? position_ids.unsqueeze(0) : position_ids)
          .unsqueeze(-1);
  const at::Tensor key = at::arange(keys, query.options());
  at::Tensor allowed = key.le(query);
  if (window) allowed = allowed.logical_and((query - key).lt(*window));
  if (pads) {
    check(pads->dim() == 2 && pads->size(0) == query.size(0) &&
              pads->size(1) == keys,
          who, ": the padding mask is ", describe(*pads), "; expected [",
          query.size(0), ", ", keys, "]");
    allowed = allowed.logical_and(
        pads->to(query.device(), at::kBool).logical_not().unsqueeze(1));
  }
  // Widened, because the smallest bfloat16 is not the smallest float.
  const double lowest = AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "dense_causal_mask", [] {
        return static_cast<double>(std::numeric_limits<scalar_t>::lowest());
      });
  return at::zeros(allowed.sizes(), query.options().dtype(dtype))
      .masked_fill_(allowed.logical_not(), lowest)
      .unsqueeze(1);
}

}  // namespace longspan::nemo
