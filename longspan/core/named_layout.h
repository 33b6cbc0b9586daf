#pragma once

#include <span>
#include <string_view>

#include "longspan/core/ownership.h"

namespace longspan {

/// Whether rows stay rows, [B, S, ...] cut along S (BSHD), or their documents
/// become one stream [T, ...] (THD).
enum class Form { rows, stream };

/// "rows" or "stream", and back; `who` is named in the error for other words.
std::string_view to_string(Form form);
Form form_named(std::string_view who, std::string_view name);

/// A way to cut batches that has a name.
struct NamedLayout {
  std::string_view name;
  OwnershipKind kind;
  Form form;
};

/// "head-tail", "contiguous-rows", "contiguous-stream", "head-tail-stream" and
/// "per-document-head-tail".
std::span<const NamedLayout> named_layouts();

/// The layout of a name; `who` is named in the error when there is none.
const NamedLayout& layout_named(std::string_view who, std::string_view name);

}  // namespace longspan
