#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "longspan/ops/key_windows.h"

namespace longspan::nemo {

/// The forms in which the reference implementation passes lengths, partitions,
/// windows and masks between functions, made from Packing, Ownership and Mask.
/// The drop-in is built on them; new code uses pack, shard and Mask.

/// Where the reference loses or misplaces tokens, do the right thing, or do
/// exactly what it does.
enum class Rule { corrected, reference };

/// Cumulative lengths of all rows of a table, as a packed batch carries them.
struct ThdLengths {
  at::Tensor cu;                           ///< int32 [documents + 1]
  std::optional<at::Tensor> cu_padded;     ///< only if it differs from cu
  std::optional<at::Tensor> max_seqlen;    ///< int32 [], absent without any
  std::optional<at::Tensor> padding_mask;  ///< bool [tokens], corrected only
};

/// seq_lens and seq_lens_padded: integers [rows, documents], unused entries are
/// `sentinel`. When only the last document has pads, or tokens follow it, they
/// become part of it and cu_padded is absent.
///
/// Rule::corrected also refuses documents that exceed their row, and gives the
/// tokens after the last document of a row to its slot, so that the documents
/// of later rows start where they lie. Rows before the first document are the
/// slot of one more document, of length 0.
ThdLengths thd_lengths(const at::Tensor& seq_lens,
                       const std::optional<at::Tensor>& seq_lens_padded,
                       int64_t sentinel, int64_t rows, int64_t length,
                       Rule rule);

/// What a rank holds of a stream of `total` tokens when every document is cut
/// head-tail; int32 [total / ranks]. `cu` is int32 [documents + 1], and every
/// entry a multiple of 2 * ranks. Tokens after the last entry are one more
/// document for Rule::corrected; the reference maps them into the last one.
at::Tensor document_partition(const at::Tensor& cu, int64_t total, int ranks,
                              int rank, Rule rule);

/// Key windows of every slot token: causal, real keys of the own document, and
/// at least one key. Entries below 0 at the end of the lists are ignored.
KeyWindows padded_windows(const at::Tensor& cu, const at::Tensor& cu_padded);

/// padded_windows for documents without pads; begin int32, end int64.
KeyWindows compact_windows(const at::Tensor& cu);

/// true = pad, [B, S]. Rule::corrected is pads_of_attention_mask; the reference
/// reads integers with four axes as additive and looks at the diagonal only.
at::Tensor pads_of_mask(const at::Tensor& mask, Rule rule);

/// Additive mask [B, 1, L, keys]: 0 where key <= position, within the window
/// and no pad; the most negative number of the type elsewhere.
at::Tensor dense_causal_mask(const at::Tensor& position_ids, int64_t keys,
                             at::ScalarType dtype,
                             const std::optional<at::Tensor>& pads,
                             std::optional<int64_t> window);

}  // namespace longspan::nemo
