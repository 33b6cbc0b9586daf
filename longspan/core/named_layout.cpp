#include "longspan/core/named_layout.h"

#include <array>
#include <string>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/nearest.h"

namespace longspan {

namespace {

constexpr std::array kNamedLayouts{
    NamedLayout{"head-tail", OwnershipKind::head_tail, Form::rows},
    NamedLayout{"contiguous-rows", OwnershipKind::contiguous, Form::rows},
    NamedLayout{"contiguous-stream", OwnershipKind::contiguous, Form::stream},
    NamedLayout{"head-tail-stream", OwnershipKind::head_tail, Form::stream},
    NamedLayout{"per-document-head-tail", OwnershipKind::per_document_head_tail,
                Form::stream},
};

}  // namespace

std::string_view to_string(Form form) {
  return form == Form::rows ? "rows" : "stream";
}

Form form_named(std::string_view who, std::string_view name) {
  check(name == "rows" || name == "stream", who, ": form '", name,
        "' is not one of rows, stream");
  return name == "rows" ? Form::rows : Form::stream;
}

std::span<const NamedLayout> named_layouts() {
  return kNamedLayouts;
}

const NamedLayout& layout_named(std::string_view who, std::string_view name) {
  std::string list;
  std::vector<std::string_view> names;
  for (const NamedLayout& layout : kNamedLayouts) {
    if (layout.name == name) return layout;
    list += join(list.empty() ? "" : ", ", layout.name);
    names.push_back(layout.name);
  }
  throw std::invalid_argument(join(who, ": layout '", name, "' is not one of ",
                                   list, did_you_mean(name, names)));
}

}  // namespace longspan
