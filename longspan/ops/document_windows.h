#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "longspan/ops/key_windows.h"

namespace longspan {

/// Causal key windows of a stream of documents, int32 [tokens], made where the
/// offsets are: once a batch, and nothing is read back to the host.
///
/// cu are the offsets of the documents, integers [documents + 1] from 0 on.
/// With pads between them, slots begin and end at cu_padded: a token sees the
/// real keys of its document up to itself, and a pad all of them. In a document
/// without tokens every pad sees the first one, so no window is empty. Tokens
/// behind the last offset see only themselves. Entries below 0 at the end of
/// either list are ignored. The offsets are taken as they come: those that
/// fall, or documents longer than their slots, give meaningless windows.
///
/// torch.ops.longspan.document_windows(cu, cu_padded, tokens) -> (start, end)
KeyWindows document_windows(const at::Tensor& cu,
                            const std::optional<at::Tensor>& cu_padded,
                            int64_t tokens);

}  // namespace longspan
