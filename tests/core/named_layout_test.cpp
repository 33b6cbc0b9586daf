#include "longspan/core/named_layout.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;

TEST(NamedLayout, EveryNameGivesItself) {
  std::set<std::string_view> names;
  for (const NamedLayout& layout : named_layouts()) {
    EXPECT_EQ(&layout_named("test", layout.name), &layout);
    EXPECT_NE(layout.kind, OwnershipKind::ranges);
    names.insert(layout.name);
  }
  EXPECT_EQ(names.size(), named_layouts().size());
}

TEST(NamedLayout, SaysHowTokensAreCutAndWhatBecomesOfRows) {
  const NamedLayout& usual = layout_named("test", "head-tail");
  EXPECT_EQ(usual.kind, OwnershipKind::head_tail);
  EXPECT_EQ(usual.form, Form::rows);
  const NamedLayout& stream = layout_named("test", "contiguous-stream");
  EXPECT_EQ(stream.kind, OwnershipKind::contiguous);
  EXPECT_EQ(stream.form, Form::stream);
}

TEST(NamedLayout, RefusesOtherNames) {
  EXPECT_EQ(message_of([] { layout_named("shard", "zigzag"); }),
            "shard: layout 'zigzag' is not one of head-tail, contiguous-rows, "
            "contiguous-stream, head-tail-stream, per-document-head-tail; did "
            "you mean head-tail?");
  EXPECT_EQ(message_of([] { form_named("pack", "grid"); }),
            "pack: form 'grid' is not one of rows, stream");
}

TEST(NamedLayout, FormsHaveNames) {
  for (Form form : {Form::rows, Form::stream}) {
    EXPECT_EQ(form_named("test", to_string(form)), form);
  }
}

}  // namespace
}  // namespace longspan
