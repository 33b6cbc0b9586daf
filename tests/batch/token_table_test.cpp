#include "longspan/batch/token_table.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;

TEST(TokenTable, HoldsWhatItsHeaderSays) {
  struct Row {
    std::string key;
    Fill::Kind kind;
    int64_t fill;
  };
  const TokenTable table = TokenTable::standard();
  const std::vector<Row> expected{
      {"input_ids", Fill::Kind::constant, 0},
      {"inputs_embeds", Fill::Kind::constant, 0},
      {"labels", Fill::Kind::constant, -100},
      {"shift_labels", Fill::Kind::constant, -100},
      {"position_ids", Fill::Kind::counting, 0},
      {"padding_mask", Fill::Kind::constant, 1},
      {"loss_mask", Fill::Kind::constant, 0},
      {"token_type_ids", Fill::Kind::constant, 0},
      {"mm_token_type_ids", Fill::Kind::constant, 0},
      {"_packed_seq_ids", Fill::Kind::constant, 0},
      {"per_layer_inputs", Fill::Kind::constant, 0},
  };
  ASSERT_EQ(table.rows().size(), expected.size());
  for (const Row& row : expected) {
    const TokenTensor* found = table.find(row.key);
    ASSERT_NE(found, nullptr) << row.key;
    EXPECT_EQ(found->axis, 1) << row.key;
    EXPECT_EQ(found->fill.kind, row.kind) << row.key;
    EXPECT_EQ(found->fill.value.toLong(), row.fill) << row.key;
    EXPECT_EQ(found->may_have_planes, row.key == "position_ids");
  }
}

TEST(TokenTable, ExtendsIntoANewTable) {
  const TokenTable table = TokenTable::standard();
  const TokenTable wider =
      table.with({.key = "scores", .axis = 2, .fill = {.value = -1}});
  EXPECT_EQ(table.find("scores"), nullptr);
  ASSERT_NE(wider.find("scores"), nullptr);
  EXPECT_EQ(wider.find("scores")->axis, 2);
  EXPECT_EQ(wider.rows().size(), table.rows().size() + 1);
}

TEST(TokenTable, ReplacesAKnownKeyInItsPlace) {
  const TokenTable table = TokenTable::standard();
  const TokenTable other =
      table.with({.key = "labels", .axis = 1, .fill = {.value = -1}});
  ASSERT_EQ(other.rows().size(), table.rows().size());
  for (std::size_t i = 0; i < table.rows().size(); ++i) {
    EXPECT_EQ(other.rows()[i].key, table.rows()[i].key);
  }
  EXPECT_EQ(other.find("labels")->fill.value.toLong(), -1);
  EXPECT_EQ(table.find("labels")->fill.value.toLong(), -100);
}

TEST(TokenTable, KnowsTheAxisOfPlanes) {
  const TokenTensor positions = *TokenTable::standard().find("position_ids");
  EXPECT_EQ(positions.axis_of(at::zeros({2, 8})), 1);
  EXPECT_EQ(positions.axis_of(at::zeros({3, 2, 8})), 2);
  const TokenTensor embeds = *TokenTable::standard().find("inputs_embeds");
  EXPECT_EQ(embeds.axis_of(at::zeros({2, 8, 4})), 1);
}

TEST(TokenTable, RefusesRowsWithoutKeyOrRowAxis) {
  const TokenTable table = TokenTable::standard();
  EXPECT_EQ(message_of([&] { table.with({.key = "", .axis = 1, .fill = {}}); }),
            "TokenTable: a row without a key");
  EXPECT_EQ(
      message_of([&] { table.with({.key = "x", .axis = 0, .fill = {}}); }),
      "TokenTable: 'x' has token axis 0; the row axis stands before it, so "
      "expected at least 1");
}

TEST(FindTensor, GivesTheNamedTensorOrNone) {
  const at::Tensor ids = at::arange(3);
  const NamedTensors tensors{{"input_ids", ids}};
  EXPECT_TRUE(find_tensor(tensors, "input_ids").is_same(ids));
  EXPECT_FALSE(find_tensor(tensors, "labels").defined());
}

}  // namespace
}  // namespace longspan
