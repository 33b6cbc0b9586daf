#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "longspan/core/mask.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/kernels/attention/hopper/attention.h"
#include "tests/kernels/attention/attention_answers.h"
#include "tests/kernels/machine/machine.h"

/// The kernels for Hopper, run on paper, against double precision.
namespace longspan {
namespace {

using test::Answer;
using test::AttentionArrays;
using test::AttentionCase;
using test::CaseInputs;

/// Where the type does not matter.
constexpr auto kType = ElementType::bfloat16;

struct PaperCase : AttentionCase {
  ElementType type = kType;
};

/// What operands in registers are made of.
test::Weights weights_of(ElementType type) {
  return type == ElementType::float16 ? test::Weights::float16
                                      : test::Weights::bfloat16;
}

/// Memory that a kernel keeps its table in; it comes with what was there.
struct TableMemory {
  explicit TableMemory(std::size_t bytes) : words(bytes / 16 + 1) {
    std::ranges::fill(words, Word{{~0ull, ~0ull}});
  }
  void* data() { return words.data(); }
  struct alignas(16) Word {
    uint64_t half[2];
  };
  std::vector<Word> words;
};

/// Queries that see at most so many keys are for narrow blocks: none of them,
/// some, or all; above 128 channels there are none.
std::vector<int64_t> narrow_widths(const CaseInputs& inputs) {
  if (inputs.problem.head_dim > 128 || inputs.problem.value_dim > 128) {
    return {0};
  }
  return {1 << 30, 60, 0};
}

/// From nothing, or from the answer of earlier keys.
void forward(const CaseInputs& inputs, std::span<const KeyLines> lines,
             AttentionArrays& arrays, const test::Array* before,
             int64_t narrow_keys, const float* sink = nullptr) {
  hopper::DenseForwardArgs args;
  test::set_shape(args, inputs.problem, arrays.q.type(), arrays, lines);
  args.out = arrays.out;
  args.out_type = arrays.out.type();
  args.lse = arrays.lse;
  if (before != nullptr) args.before = *before;
  args.sink = sink;
  args.narrow_keys = narrow_keys;
  ASSERT_EQ(hopper::why_not_attention(args), std::nullopt);
  const hopper::ForwardWork work = hopper::forward_work(args);
  TableMemory memory(work.bytes());
  hopper::attention_forward(args, work, memory.data(), nullptr);
}

enum class Order { any, fixed };

void backward(const CaseInputs& inputs, AttentionArrays& arrays, Order order) {
  test::Values delta = test::deltas<float>(arrays, inputs.problem.value_dim);
  const test::Values lse = arrays.lse.values();
  for (std::size_t i = 0; i < delta.size(); ++i) {
    if (lse[i] == -INFINITY) delta[i] = 0;  // as output_delta has it
  }
  arrays.delta.fill(delta);
  hopper::DenseBackwardArgs args;
  test::set_shape(args, inputs.problem, arrays.q.type(), arrays, inputs.lines);
  args.dout = arrays.dout;
  args.lse = arrays.lse;
  args.delta = arrays.delta;
  args.dq = arrays.dq;
  args.dk = arrays.dk;
  args.dv = arrays.dv;
  args.dq_type = arrays.dq.type();
  args.dk_type = arrays.dk.type();
  ASSERT_EQ(hopper::why_not_attention_backward(args), std::nullopt);
  args.in_any_order = order == Order::any;
  args.dq_adds = hopper::adds_up_queries(args);
  // Some blocks head by head, some not.
  args.tiles_apart = 3;
  const hopper::BackwardWork work = hopper::backward_work(args);
  args.dk_adds = work.apart > 0;
  if (args.dk_adds) {
    arrays.dk.fill(0);
    arrays.dv.fill(0);
  }
  TableMemory memory(work.bytes());
  hopper::attention_backward(args, work, memory.data(), nullptr);
}

/// Cases of the CPU that these kernels take, and some at their own edges.
std::vector<AttentionCase> machine_cases() {
  std::vector<AttentionCase> cases;
  std::ranges::copy_if(test::attention_cases(), std::back_inserter(cases),
                       [](const auto& c) {
                         return c.head_dim % 8 == 0 && c.value_dim % 8 == 0 &&
                                c.head_dim <= 512 && c.heads <= 16 &&
                                c.strides == test::Strides::contiguous;
                       });
  const auto wide = [&](int64_t channels, int64_t values, double softcap) {
    AttentionCase c = test::causal_case("causal_" + std::to_string(channels) +
                                            "_" + std::to_string(values) +
                                            (softcap > 0 ? "_soft_cap" : ""),
                                        200, channels);
    c.value_dim = values;
    c.softcap = softcap;
    c.heads_per_key_head = 2;
    cases.push_back(c);
  };
  wide(96, 96, 0);
  wide(128, 128, 0);
  wide(128, 128, 3);
  wide(192, 128, 0);
  wide(256, 256, 0);
  wide(256, 256, 3);
  wide(512, 512, 0);
  wide(512, 512, 3);
  wide(264, 328, 0);
  // Rings of tiles and of records go round.
  cases.push_back({.name = "many_tiles",
                   .queries = 140,
                   .keys = 900,
                   .head_dim = 64,
                   .value_dim = 64,
                   .lines = {test::causal({0, 140}, {0, 900}, 760)}});
  for (const int64_t channels : {256, 512}) {
    cases.push_back(
        {.name = "parts_of_" + std::to_string(channels) + "_channels",
         .queries = 150,
         .keys = 400,
         .heads = 3,
         .heads_per_key_head = 3,
         .head_dim = channels,
         .value_dim = channels,
         .lines = {test::all_of({0, 20}, {0, 70}),
                   test::band({0, 150}, {90, 300}, 100, 9),
                   test::all_of({100, 120}, {0, 60}),
                   test::causal({130, 150}, {310, 400}, 240)}});
  }
  // What a rank computes when the keys of all others have come at once: several
  // runs of keys, some of them seen by nobody here.
  for (const int ranks : {3, 4}) {
    const auto packing = Packing::of({300}, {ranks == 3 ? 300 : 304});
    const Mask mask = Mask::causal(packing);
    const auto owners = ranks == 3 ? Ownership::head_tail(packing.tokens(), 3)
                                   : Ownership::contiguous(packing.tokens(), 4);
    for (int rank = 0; rank < ranks; ++rank) {
      const auto mine = owners.ranges_of(rank);
      std::vector<TokenRange> keys;
      for (int other = 1; other < ranks; ++other) {
        const auto more = owners.ranges_of((rank + other) % ranks);
        keys.insert(keys.end(), more.begin(), more.end());
      }
      const int64_t tokens = packing.tokens() / ranks;
      cases.push_back(
          {.name =
               "share_" + std::to_string(rank) + "_of_" + std::to_string(ranks),
           .queries = tokens,
           .keys = tokens * (ranks - 1),
           .heads = 2,
           .heads_per_key_head = 2,
           .head_dim = 64,
           .value_dim = 64,
           .lines = key_lines(mask, {mine.begin(), mine.end()}, keys)});
    }
  }
  // The last keys of a document share a block with nobody, but lie beside those
  // of the next one.
  for (const int64_t channels : {64, 128}) {
    cases.push_back({.name = "documents_that_see_all_of_themselves_" +
                             std::to_string(channels),
                     .queries = 430,
                     .keys = 430,
                     .head_dim = channels,
                     .value_dim = channels,
                     .lines = {test::all_of({0, 200}, {0, 200}),
                               test::all_of({200, 430}, {200, 430})}});
  }
  for (const int64_t channels : {64, 512}) {
    cases.push_back({.name = "documents_of_every_length_" +
                             std::to_string(channels) + "_channels",
                     .queries = 300,
                     .keys = 300,
                     .head_dim = channels,
                     .value_dim = channels,
                     .lines = test::documents({129, 1, 2, 3, 64, 65, 36})});
  }
  // Above 256 channels two warpgroups take turns from tile to tile.
  const auto widest = [&](const std::string& name, int64_t queries,
                          int64_t keys, double size,
                          const std::vector<KeyLines>& lines) {
    cases.push_back({.name = name + "_of_512_channels",
                     .queries = queries,
                     .keys = keys,
                     .head_dim = 512,
                     .value_dim = 512,
                     .size = size,
                     .lines = lines});
  };
  widest("many_tiles", 70, 900, 1, {test::causal({0, 70}, {0, 900}, 830)});
  widest("one_to_four_tiles", 256, 640, 1,
         {test::all_of({0, 64}, {0, 64}), test::all_of({64, 128}, {64, 192}),
          test::all_of({128, 192}, {192, 384}),
          test::all_of({192, 256}, {384, 640})});
  widest(
      "parts_of_a_tile", 30, 1000, 1,
      {test::all_of({0, 20}, {0, 30}), test::all_of({0, 30}, {200, 264}),
       test::all_of({5, 30}, {400, 401}), test::all_of({0, 30}, {500, 560}),
       test::all_of({0, 9}, {700, 750}), test::all_of({0, 30}, {900, 1000})});
  // Greatest scores are passed that far exceed those before.
  widest("scores_that_rise", 40, 700, 40, {test::all_of({0, 40}, {0, 700})});
  // Heads that share a block of rows.
  for (const int64_t window : {1, 2, 127, 128, 129}) {
    cases.push_back({.name = "packed_window_" + std::to_string(window),
                     .queries = 150,
                     .keys = 150,
                     .heads = 16,
                     .heads_per_key_head = 8,
                     .head_dim = 64,
                     .value_dim = 64,
                     .lines = {test::band({0, 150}, {0, 150}, 0, window)}});
  }
  cases.push_back({.name = "packed_64_of_8",
                   .queries = 40,
                   .keys = 170,
                   .heads = 64,
                   .heads_per_key_head = 8,
                   .head_dim = 64,
                   .value_dim = 64,
                   .lines = {test::band({0, 40}, {0, 170}, 130, 128)}});
  const auto packed = [&](int64_t heads, int64_t group, int64_t offset,
                          int64_t channels) {
    cases.push_back({.name = "packed_" + std::to_string(heads) + "_of_" +
                             std::to_string(group) + "_from_" +
                             std::to_string(offset) + "_channels_" +
                             std::to_string(channels),
                     .rows = 2,
                     .queries = 70,
                     .keys = 90,
                     .heads = heads,
                     .heads_per_key_head = group,
                     .head_offset = offset,
                     .head_dim = channels,
                     .value_dim = channels,
                     .lines = {test::band({2, 30}, {0, 40}, 10, 9),
                               test::all_of({31, 32}, {40, 41}),
                               test::causal({35, 52}, {41, 60}, 8),
                               test::band({54, 70}, {20, 90}, 20, 30)}});
  };
  packed(4, 2, 0, 64);
  packed(6, 3, 0, 64);
  packed(8, 4, 0, 128);
  packed(12, 6, 0, 64);
  packed(16, 16, 0, 128);
  packed(12, 8, 4, 64);  // ends of two groups, in fours
  packed(4, 8, 2, 64);   // some of a group
  packed(5, 8, 3, 128);
  return cases;
}

/// All of them in bfloat16; in float16 one for each kernel.
std::vector<PaperCase> paper_cases() {
  std::vector<PaperCase> cases;
  for (const AttentionCase& c : machine_cases()) cases.push_back({c});
  for (const char* name :
       {"share_1_of_3", "causal_128_128", "causal_128_128_soft_cap",
        "causal_192_128", "causal_256_256", "causal_256_256_soft_cap",
        "causal_264_328", "packed_4_of_2_from_0_channels_64"}) {
    const auto same = std::ranges::find(cases, name, &PaperCase::name);
    PaperCase half = *same;
    half.name += "_float16";
    half.type = ElementType::float16;
    cases.push_back(half);
  }
  return cases;
}

class AttentionOnPaper : public testing::TestWithParam<PaperCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, AttentionOnPaper,
                         testing::ValuesIn(paper_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(AttentionOnPaper, IsTheOraclesAnswerInAnyOrderOfEvents) {
  const CaseInputs inputs = test::inputs_of(GetParam(), GetParam().type);
  const Answer exact = test::slow_answer<double>(inputs);
  const Answer tolerances = test::tolerances_of(inputs, exact, GetParam().type,
                                                weights_of(GetParam().type));
  for (const uint64_t seed : {1, 2, 3}) {
    machine::set_seed(seed);
    AttentionArrays arrays = test::arrays_of(inputs, GetParam().type);
    const std::string who = "seed " + std::to_string(seed);
    for (const int64_t narrow : narrow_widths(inputs)) {
      // Every query is written, whatever was there.
      arrays.out.fill(NAN);
      arrays.lse.fill(NAN);
      forward(inputs, inputs.lines, arrays, nullptr, narrow);
      const Answer answer = test::answer_in(arrays);
      test::expect_near(answer.out, exact.out, tolerances.out[0], who + " out");
      test::expect_near(answer.lse, exact.lse, tolerances.lse[0], who + " lse");
    }
    for (const Order order : {Order::any, Order::fixed}) {
      AttentionArrays copy = arrays;
      if (GetParam().queries > 0) {  // else nothing is launched
        copy.dk.fill(NAN);
        copy.dv.fill(NAN);
      }
      backward(inputs, copy, order);
      test::expect_answer(
          test::answer_in(copy), exact, tolerances,
          who + (order == Order::any ? " any order" : " fixed order"));
    }
  }
}

/// Which thread is first, and when copies and products happen, is not seen.
TEST_P(AttentionOnPaper, HasTheSameBitsInAnyOrderOfEvents) {
  const CaseInputs inputs = test::inputs_of(GetParam(), GetParam().type);
  std::vector<AttentionArrays> made, narrows;
  for (const uint64_t seed : {4, 5, 6}) {
    machine::set_seed(seed);
    made.push_back(test::arrays_of(inputs, GetParam().type));
    if (narrow_widths(inputs).front() > 0) {
      narrows.push_back(made.back());
      forward(inputs, inputs.lines, narrows.back(), nullptr,
              narrow_widths(inputs).front());
      EXPECT_EQ(narrows.front().out.bytes(), narrows.back().out.bytes());
      EXPECT_EQ(narrows.front().lse.bytes(), narrows.back().lse.bytes());
    }
    forward(inputs, inputs.lines, made.back(), nullptr, 0);
    backward(inputs, made.back(), Order::fixed);
    for (const auto part :
         {&AttentionArrays::out, &AttentionArrays::lse, &AttentionArrays::dq,
          &AttentionArrays::dk, &AttentionArrays::dv}) {
      EXPECT_EQ((made.front().*part).bytes(), (made.back().*part).bytes());
    }
  }
}

/// Two sums are the same in either order; here four blocks of keys add to a
/// query, and three heads to a key.
TEST(BackwardOnPaper, AddsInOneOrderWhoeverComesFirst) {
  for (const int64_t channels : {64, 128}) {
    AttentionCase c = test::causal_case("four_blocks", 400, channels);
    c.heads = c.heads_per_key_head = 3;
    const CaseInputs inputs = test::inputs_of(c, kType);
    AttentionArrays arrays = test::arrays_of(inputs, kType);
    forward(inputs, inputs.lines, arrays, nullptr, 0);
    std::vector<AttentionArrays> made;
    for (uint64_t seed = 20; seed < 30; ++seed) {
      machine::set_seed(seed);
      made.push_back(arrays);
      backward(inputs, made.back(), Order::fixed);
      for (const auto part :
           {&AttentionArrays::dq, &AttentionArrays::dk, &AttentionArrays::dv}) {
        EXPECT_EQ((made.front().*part).bytes(), (made.back().*part).bytes());
      }
    }
  }
}

/// Lines of the keys in `keys` alone.
std::vector<KeyLines> clipped(std::vector<KeyLines> lines, TokenRange keys) {
  for (KeyLines& line : lines) {
    for (int64_t KeyLines::* bound :
         {&KeyLines::begin_min, &KeyLines::begin_max, &KeyLines::end_min,
          &KeyLines::end_max}) {
      line.*bound = std::clamp(line.*bound, keys.begin, keys.end);
    }
  }
  return lines;
}

/// Logits without a value, one for each head.
std::vector<float> sink_for(int64_t heads) {
  std::vector<float> sink;
  for (int64_t head = 0; head < heads; ++head) {
    sink.push_back(0.5f * static_cast<float>(head) - 1.f);
  }
  return sink;
}

/// The same answer, whose weights a sink shares.
test::Values out_with_sink(const Answer& answer,
                           const std::vector<float>& sink) {
  test::Values out = answer.out;
  const std::size_t queries = answer.lse.size();
  const std::size_t channels = queries == 0 ? 1 : out.size() / queries;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t query = i / channels;
    out[i] /= 1 + std::exp(sink[query % sink.size()] - answer.lse[query]);
  }
  return out;
}

/// As the steps of a ring do: some keys after others, out and lse in place. The
/// last step may also write elsewhere: in 16 bits, with the sink, and also of
/// queries that see none of its keys.
TEST_P(AttentionOnPaper, GoesOnFromEarlierKeys) {
  const CaseInputs inputs = test::inputs_of(GetParam(), GetParam().type);
  const Answer exact = test::slow_answer<double>(inputs);
  const Answer tolerances = test::tolerances_of(inputs, exact, GetParam().type,
                                                weights_of(GetParam().type));
  const int64_t keys = inputs.problem.keys;
  const std::vector<float> sink = sink_for(inputs.problem.heads);
  const double bit = GetParam().type == kType ? 0x1p-8 : 0x1p-11;
  const auto lines = [&](TokenRange keys) {
    return clipped(inputs.lines, keys);
  };
  machine::set_seed(7);
  for (const int64_t narrow : narrow_widths(inputs)) {
    AttentionArrays arrays = test::arrays_of(inputs, GetParam().type);
    forward(inputs, lines({0, keys / 3}), arrays, nullptr, narrow);
    forward(inputs, lines({keys / 3, keys / 2}), arrays, &arrays.out, narrow);
    AttentionArrays others = arrays;
    others.out = arrays.dout;  // of 16 bits
    others.out.fill(NAN);
    forward(inputs, lines({keys / 2, keys}), others, &arrays.out, narrow,
            sink.data());
    forward(inputs, lines({keys / 2, keys}), arrays, &arrays.out, narrow);
    const Answer answer = test::answer_in(arrays);
    test::expect_near(answer.out, exact.out, tolerances.out[0], "out");
    test::expect_near(answer.lse, exact.lse, tolerances.lse[0], "lse");
    const Answer last = test::answer_in(others);
    test::expect_near(last.out, out_with_sink(exact, sink),
                      tolerances.out[0] + bit * test::largest(exact.out),
                      "out elsewhere");
    test::expect_near(last.lse, exact.lse, tolerances.lse[0], "lse");
  }
}

TEST_P(AttentionOnPaper, SharesWithASinkThatTheLseLeavesOut) {
  CaseInputs inputs = test::inputs_of(GetParam(), GetParam().type);
  const std::vector<float> sink = sink_for(inputs.problem.heads);
  inputs.problem.sink.assign(sink.begin(), sink.end());
  const Answer exact = test::slow_answer<double>(inputs);
  const Answer tolerances = test::tolerances_of(inputs, exact, GetParam().type,
                                                weights_of(GetParam().type));
  machine::set_seed(8);
  for (const int64_t narrow : narrow_widths(inputs)) {
    AttentionArrays arrays = test::arrays_of(inputs, GetParam().type);
    forward(inputs, inputs.lines, arrays, nullptr, narrow, sink.data());
    const Answer answer = test::answer_in(arrays);
    test::expect_near(answer.out, exact.out, tolerances.out[0], "out");
    test::expect_near(answer.lse, exact.lse, tolerances.lse[0], "lse");
  }
}

/// How many channels the kernels have that differ in their order of sums.
class ChannelsOnPaper : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Channels, ChannelsOnPaper, testing::Values(64, 512),
                         testing::PrintToStringParamName());

/// A long document has the bits that it has alone, wherever it stands.
TEST_P(ChannelsOnPaper, HaveTheSameBitsWhateverIsPackedAround) {
  const int64_t channels = GetParam();
  const auto answer = [&](const std::vector<int64_t>& lengths, int64_t before,
                          int64_t narrow) {
    int64_t tokens = 0;
    for (const int64_t length : lengths) tokens += length;
    CaseInputs inputs = test::inputs_of({.name = "packed",
                                         .queries = tokens,
                                         .keys = tokens,
                                         .head_dim = channels,
                                         .value_dim = channels,
                                         .lines = test::documents(lengths)},
                                        kType);
    // The document itself is the same in all of them.
    std::mt19937_64 bits(11);
    const auto place = [&](std::vector<double>& values) {
      const auto own = test::normals(bits, kType, 150 * channels);
      std::ranges::copy(own, values.begin() + before * channels);
    };
    for (auto* values : {&inputs.problem.q, &inputs.problem.k,
                         &inputs.problem.v, &inputs.dout}) {
      place(*values);
    }
    machine::set_seed(static_cast<uint64_t>(tokens));
    AttentionArrays arrays = test::arrays_of(inputs, kType);
    forward(inputs, inputs.lines, arrays, nullptr, narrow);
    backward(inputs, arrays, Order::fixed);
    test::Values mine;
    const Answer all = test::answer_in(arrays);
    for (const auto part :
         {&Answer::out, &Answer::dq, &Answer::dk, &Answer::dv}) {
      const auto first = (all.*part).begin() + before * channels;
      mine.insert(mine.end(), first, first + 150 * channels);
    }
    return mine;
  };
  // At 170 it is narrow and a document beside it is not, at 140 the other way.
  for (const int64_t narrow : {0, 140, 170, 1000}) {
    const test::Values alone = answer({150}, 0, narrow);
    EXPECT_EQ(answer({3, 150, 1, 200}, 3, narrow), alone);
    EXPECT_EQ(answer({130, 150}, 130, narrow), alone);
    EXPECT_EQ(answer({1, 1, 5, 60, 150, 7}, 67, narrow), alone);
  }
}

/// A NaN in a query or a key reaches who sees it, and nobody else's bits.
TEST_P(ChannelsOnPaper, PassNaNsToTheQueriesThatSeeThem) {
  const int64_t channels = GetParam(), queries = 200, query = 70, key = 130;
  const CaseInputs clean =
      test::inputs_of(test::causal_case("causal", queries, channels), kType);
  CaseInputs spoiled = clean;
  const auto spoil = [&](std::vector<double>& values, int64_t token) {
    const auto heads = std::ssize(values) / (queries * channels);
    values[static_cast<std::size_t>(token * heads * channels + 5)] = NAN;
  };
  spoil(spoiled.problem.q, query);
  spoil(spoiled.problem.k, key);
  const auto answer = [](const CaseInputs& inputs) {
    machine::set_seed(9);
    AttentionArrays arrays = test::arrays_of(inputs, kType);
    forward(inputs, inputs.lines, arrays, nullptr, 0);
    return test::answer_in(arrays);
  };
  const Answer exact = test::slow_answer<double>(spoiled);
  const Answer with = answer(spoiled), without = answer(clean);
  int64_t reached = 0;
  for (const auto part : {&Answer::out, &Answer::lse}) {
    for (std::size_t i = 0; i < (with.*part).size(); ++i) {
      const double x = (with.*part)[i];
      ASSERT_EQ(std::isnan(x), std::isnan((exact.*part)[i])) << i;
      if (std::isnan(x)) {
        ++reached;
      } else {
        ASSERT_EQ(x, (without.*part)[i]) << i;
      }
    }
  }
  EXPECT_GT(reached, 0);
}

/// One element that is not finite, backward.
struct SpoiledCase {
  int64_t channels;
  ElementType type = kType;
  double softcap = 0;
  friend void PrintTo(const SpoiledCase& c, std::ostream* out) {
    *out << c.channels << (c.softcap > 0 ? "_soft_cap" : "")
         << (c.type == ElementType::float16 ? "_float16" : "");
  }
};
class SpoiledOnPaper : public testing::TestWithParam<SpoiledCase> {};
INSTANTIATE_TEST_SUITE_P(
    Plans, SpoiledOnPaper,
    testing::Values(SpoiledCase{64}, SpoiledCase{128}, SpoiledCase{256},
                    SpoiledCase{512}, SpoiledCase{64, kType, 3},
                    SpoiledCase{128, ElementType::float16}),
    testing::PrintToStringParamName());

/// Whose derivatives a token may change: a query's its own and those of keys
/// that it sees; a key's those of queries that see it and, by what came back
/// to them, of all keys that they see.
struct Reached {
  std::vector<bool> queries, keys;
};
Reached reached_from(const CaseInputs& inputs, bool is_query, int64_t token) {
  const auto& p = inputs.problem;
  Reached reached{std::vector<bool>(p.queries), std::vector<bool>(p.keys)};
  if (!is_query) reached.keys[token] = true;
  for (int64_t query = 0; query < p.queries; ++query) {
    if (is_query ? query != token : !p.allows(0, query, token)) continue;
    reached.queries[query] = true;
    for (int64_t key = 0; key < p.keys; ++key) {
      if (p.allows(0, query, key)) reached.keys[key] = true;
    }
  }
  return reached;
}

/// What is spoiled at a token, of the first of two heads that share a key head.
struct Spoiled {
  std::string what;
  double value;
  int64_t token;
  bool is_query() const { return what != "k" && what != "v"; }
};

/// Backward from out and lse of the oracle.
Answer derivatives(const CaseInputs& inputs, const Answer& ahead,
                   ElementType type, Order order) {
  machine::set_seed(14);
  AttentionArrays arrays = test::arrays_of(inputs, type);
  arrays.out.fill(ahead.out);
  arrays.lse.fill(ahead.lse);
  backward(inputs, arrays, order);
  return test::answer_in(arrays);
}

/// Others have the derivatives of `without`: their bits, in the fixed order,
/// but for dq that is summed by hand, beside spoiled keys that stay in memory.
void expect_reached_alone(const Answer& with, const Answer& without,
                          const Answer& exact, const Reached& reached,
                          const Spoiled& spoiled, Order order,
                          int64_t channels) {
  for (std::size_t part = 2; part < test::kParts.size(); ++part) {
    const bool is_dq = test::kParts[part] == &Answer::dq;
    const test::Values &found = with.*test::kParts[part],
                       &clean = without.*test::kParts[part],
                       &right = exact.*test::kParts[part];
    const bool by_hand = is_dq && spoiled.what == "k" && channels <= 128;
    const double near =
        order == Order::fixed && !by_hand ? 0 : 1e-5 * test::largest(clean);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::size_t row = i / static_cast<std::size_t>(channels);
      const bool is_reached = is_dq ? reached.queries[row / 2] &&
                                          (!spoiled.is_query() || row % 2 == 0)
                                    : reached.keys[row];
      if (!is_reached) {
        ASSERT_NEAR(found[i], clean[i], near)
            << test::kPartNames[part] << " of row " << row;
      } else if (!std::isfinite(right[i])) {
        ASSERT_FALSE(std::isfinite(found[i]))
            << test::kPartNames[part] << " of row " << row;
      }
    }
  }
}

/// A NaN or an infinity reaches derivatives of who sees it or whom it sees.
/// Beside it in a tile lie queries that do not see a key yet, or no more, and
/// other documents, and tokens of none; below the last keys of a document, in a
/// block, those of the next one.
TEST_P(SpoiledOnPaper, ElementsReachDerivativesOfWhoSeesThem) {
  const auto [channels, type, softcap] = GetParam();
  const CaseInputs clean =
      test::inputs_of({.name = "spoiled",
                       .queries = 250,
                       .keys = 250,
                       .heads = 2,
                       .heads_per_key_head = 2,
                       .head_dim = channels,
                       .value_dim = channels,
                       .softcap = softcap,
                       .lines = {test::all_of({0, 140}, {0, 140}),
                                 test::causal({140, 165}, {140, 165}),
                                 test::band({170, 250}, {170, 250}, 0, 20)}},
                      type);
  std::vector<Spoiled> cases;
  for (const char* what : {"q", "k", "v", "dout", "lse"}) {
    for (const int64_t token : {139, 160, 167, 215}) {
      cases.push_back({what, NAN, token});
    }
    cases.push_back({what, INFINITY, 160});
  }
  std::vector<Order> orders{Order::fixed};
  if (channels <= 128) orders.push_back(Order::any);
  const Answer ahead = test::slow_answer<double>(clean);
  for (const Order order : orders) {
    const Answer without = derivatives(clean, ahead, type, order);
    for (const Spoiled& c : cases) {
      CaseInputs inputs = clean;
      Answer exact = ahead;
      const auto token = static_cast<std::size_t>(c.token);
      if (c.what == "lse") {
        exact.lse[2 * token] = c.value;
      } else {
        const auto row = token * static_cast<std::size_t>(channels);
        if (c.what == "q") inputs.problem.q[2 * row + 7] = c.value;
        if (c.what == "k") inputs.problem.k[row + 7] = c.value;
        if (c.what == "v") inputs.problem.v[row + 7] = c.value;
        if (c.what == "dout") inputs.dout[2 * row + 7] = c.value;
        exact = test::slow_answer<double>(inputs);
      }
      SCOPED_TRACE(c.what + " of token " + std::to_string(c.token) + " is " +
                   std::to_string(c.value) +
                   (order == Order::any ? ", any order" : ", fixed order"));
      const Answer with = derivatives(inputs, exact, type, order);
      expect_reached_alone(with, without, exact,
                           reached_from(inputs, c.is_query(), c.token), c,
                           order, channels);
      if (HasFatalFailure()) return;
      if (std::isnan(c.value) && c.token != 167) {  // which is of none
        const auto& reached =
            c.what == "v" || c.what == "k" ? with.dk : with.dq;
        const auto heads = c.is_query() ? 2u : 1u;
        ASSERT_TRUE(std::isnan(
            reached[token * heads * static_cast<std::size_t>(channels)]));
      }
    }
  }
}

/// A kernel that hides keys, by its plan.
struct SpoiledPlan {
  int64_t head_dim, value_dim;
  ElementType type;
  bool narrow;
};

class SpoiledValuesOnPaper : public testing::TestWithParam<SpoiledPlan> {};
INSTANTIATE_TEST_SUITE_P(
    Plans, SpoiledValuesOnPaper,
    testing::Values(SpoiledPlan{64, 64, kType, false},
                    SpoiledPlan{64, 64, kType, true},
                    SpoiledPlan{128, 128, kType, false},
                    SpoiledPlan{128, 128, kType, true},
                    SpoiledPlan{192, 128, kType, false},
                    SpoiledPlan{256, 256, kType, false},
                    SpoiledPlan{512, 512, kType, false},
                    SpoiledPlan{128, 128, ElementType::float16, false},
                    SpoiledPlan{64, 64, ElementType::float16, true},
                    SpoiledPlan{512, 512, ElementType::float16, false}),
    [](const auto& info) {
      const SpoiledPlan& plan = info.param;
      return std::to_string(plan.head_dim) + "_" +
             std::to_string(plan.value_dim) + (plan.narrow ? "_narrow" : "") +
             (plan.type == kType ? "" : "_float16");
    });

/// Who sees which keys, and three keys whose values are not finite.
struct SpoiledMask {
  std::string name;
  int64_t queries, keys;
  std::vector<KeyLines> lines;
  std::array<int64_t, 3> spoiled;
};

const std::vector<SpoiledMask>& spoiled_masks() {
  static const std::vector<SpoiledMask> masks{
      {"causal", 200, 200, {test::causal({0, 200}, {0, 200})}, {130, 131, 190}},
      // The last of one, and the first of the next.
      {"documents", 210, 210, test::documents({150, 60}), {149, 150, 160}},
      {"documents of a block",
       200,
       200,
       test::documents({70, 50, 80}),
       {69, 70, 119}},
      {"window",
       200,
       200,
       {test::band({0, 200}, {0, 200}, 0, 40)},
       {60, 70, 99}},
      // One that nobody sees, beside the end of a part; queries that see none.
      {"parts",
       150,
       600,
       {test::all_of({0, 140}, {0, 70}),
        test::band({0, 140}, {200, 400}, 200, 60),
        test::all_of({20, 30}, {500, 510})},
       {69, 300, 70}},
      {"parts of a tile",
       150,
       600,
       {test::all_of({0, 70}, {0, 30}), test::all_of({0, 140}, {200, 264}),
        test::all_of({20, 140}, {400, 401})},
       {29, 264, 400}},
  };
  return masks;
}

/// A value that is infinite or NaN reaches who sees its key, and nobody else's
/// bits: a weight of 0 does not hide it.
TEST_P(SpoiledValuesOnPaper, ReachTheQueriesThatSeeThem) {
  const SpoiledPlan plan = GetParam();
  for (const SpoiledMask& mask : spoiled_masks()) {
    const CaseInputs clean = test::inputs_of({.name = mask.name,
                                              .queries = mask.queries,
                                              .keys = mask.keys,
                                              .heads = 2,
                                              .heads_per_key_head = 2,
                                              .head_dim = plan.head_dim,
                                              .value_dim = plan.value_dim,
                                              .lines = mask.lines},
                                             plan.type);
    CaseInputs spoiled = clean;
    const auto spoil = [&](int64_t key, int64_t channel, double value) {
      const int64_t place = key * plan.value_dim + channel;
      spoiled.problem.v[static_cast<std::size_t>(place)] = value;
    };
    // In one channel two infinities, whose sum is NaN.
    const auto [one, two, three] = mask.spoiled;
    spoil(one, 5, NAN);
    spoil(two, 12, INFINITY);
    spoil(two, plan.value_dim - 1, INFINITY);
    spoil(three, plan.value_dim - 1, -INFINITY);
    spoil(three, plan.value_dim - 22, -INFINITY);
    const auto exact = oracle::attention<double>(spoiled.problem);
    for (const uint64_t seed : {9, 10, 11}) {
      SCOPED_TRACE(mask.name + ", seed " + std::to_string(seed));
      const auto answer = [&](const CaseInputs& inputs) {
        machine::set_seed(seed);
        AttentionArrays arrays = test::arrays_of(inputs, plan.type);
        forward(inputs, inputs.lines, arrays, nullptr,
                plan.narrow ? 1 << 30 : 0);
        return test::answer_in(arrays);
      };
      const Answer with = answer(spoiled), without = answer(clean);
      EXPECT_EQ(with.lse, without.lse);
      int64_t nans = 0, infinities = 0;
      for (std::size_t i = 0; i < exact.out.size(); ++i) {
        if (std::isnan(exact.out[i])) {
          ++nans;
          ASSERT_TRUE(std::isnan(with.out[i])) << i << " is " << with.out[i];
        } else if (std::isinf(exact.out[i])) {
          ++infinities;
          ASSERT_EQ(with.out[i], exact.out[i]) << i;
        } else {
          ASSERT_EQ(with.out[i], without.out[i]) << i;
        }
      }
      EXPECT_GT(nans, 0);
      EXPECT_GT(infinities, 0);
    }
  }
}

/// Answers of 16 bits, whose pieces are exchanged on their way out.
class HalvesOnPaper : public testing::TestWithParam<ElementType> {};
INSTANTIATE_TEST_SUITE_P(Types, HalvesOnPaper,
                         testing::Values(ElementType::bfloat16,
                                         ElementType::float16),
                         [](const auto& info) {
                           return info.param == ElementType::float16
                                      ? "float16"
                                      : "bfloat16";
                         });

TEST_P(HalvesOnPaper, AreTheNearestToWhatIsWrittenAsFloats) {
  const auto nearest = GetParam() == ElementType::float16
                           ? test::nearest_float16
                           : test::nearest_bfloat16;
  for (const int64_t channels : {40, 128, 200, 320}) {
    const CaseInputs inputs =
        test::inputs_of(test::causal_case("causal", 70, channels), GetParam());
    machine::set_seed(10);
    AttentionArrays floats = test::arrays_of(inputs, GetParam());
    AttentionArrays halves = floats;
    // Arrays of the same shapes that have the type.
    halves.out = halves.dout;
    if (channels > 128) halves.dq = halves.q;  // else it is added up in floats
    halves.dk = halves.k;
    halves.dv = halves.v;
    for (const int64_t narrow : narrow_widths(inputs)) {
      forward(inputs, inputs.lines, floats, nullptr, narrow);
      forward(inputs, inputs.lines, halves, nullptr, narrow);
      test::Values expected = floats.out.values();
      for (double& x : expected) x = nearest(x);
      EXPECT_EQ(halves.out.values(), expected);
    }
    halves.out = floats.out;  // delta is made of it
    backward(inputs, floats, Order::fixed);
    backward(inputs, halves, Order::fixed);
    Answer expected = test::answer_in(floats);
    for (const auto part : {&Answer::dq, &Answer::dk, &Answer::dv}) {
      if (part == &Answer::dq && channels <= 128) continue;
      for (double& x : expected.*part) x = nearest(x);
      EXPECT_EQ(test::answer_in(halves).*part, expected.*part);
    }
  }
}

/// Beside what a million keys left, each further one weighs a millionth.
TEST_P(HalvesOnPaper, AreEnoughForKeysAfterAMillionOthers) {
  for (const int64_t channels : {64, 512}) {
    const int64_t keys = 256;
    CaseInputs inputs =
        test::inputs_of({.name = "all",
                         .queries = 70,
                         .keys = keys,
                         .head_dim = channels,
                         .value_dim = channels,
                         .lines = {test::all_of({0, 70}, {0, keys})}},
                        GetParam());
    std::ranges::fill(inputs.problem.q, 0);  // all scores are
    std::ranges::fill(inputs.problem.v, 1);
    for (const double before : {1e3, 1e6, 4e6}) {
      machine::set_seed(13);
      AttentionArrays arrays = test::arrays_of(inputs, GetParam());
      arrays.out.fill(0);
      arrays.lse.fill(std::log(before));
      const test::Array earlier = arrays.out;
      forward(inputs, inputs.lines, arrays, &earlier, 0);
      const double exact =
          static_cast<double>(keys) / (before + static_cast<double>(keys));
      const double bit = GetParam() == ElementType::float16 ? 0x1p-11 : 0x1p-8;
      for (const double x : arrays.out.values()) {
        ASSERT_NEAR(x / exact, 1, bit) << channels << ", " << before;
      }
      for (const double x : arrays.lse.values()) {
        ASSERT_NEAR(x, std::log(before + static_cast<double>(keys)), 4e-6);
      }
    }
  }
}

TEST_P(HalvesOnPaper, AreOfTheTypeOfTheQueries) {
  const CaseInputs inputs =
      test::inputs_of(test::causal_case("causal", 9, 8), GetParam());
  AttentionArrays arrays = test::arrays_of(inputs, GetParam());
  const AttentionArrays others = test::arrays_of(
      inputs, GetParam() == ElementType::float16 ? ElementType::bfloat16
                                                 : ElementType::float16);
  const auto message_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was said";
  };
  arrays.dk = others.k;
  EXPECT_EQ(message_of([&] { backward(inputs, arrays, Order::fixed); }),
            "attention backward: dout, dq, dk or dv is not aligned to 16 "
            "bytes, or not float32 and to be added to or of another type than "
            "q");
  arrays.out = others.dout;
  EXPECT_EQ(
      message_of([&] { forward(inputs, inputs.lines, arrays, nullptr, 0); }),
      "attention: out is neither float32 nor of the type of q");
  arrays.out = arrays.dout;
  EXPECT_EQ(
      message_of(
          [&] { forward(inputs, inputs.lines, arrays, &arrays.out, 0); }),
      "attention: out is the float32 that it goes on from, of another type");
  const std::vector<float> sink = sink_for(inputs.problem.heads);
  AttentionArrays floats = test::arrays_of(inputs, GetParam());
  EXPECT_EQ(
      message_of([&] {
        forward(inputs, inputs.lines, floats, &floats.out, 0, sink.data());
      }),
      "attention: out goes on in place, and a sink is for the last step alone");
}

/// float16 ends at 65504: slopes beyond are infinite, sums of them infinite or
/// NaN, and what is finite is right.
TEST(Float16OnPaper, ShowsSlopesThatExceedIt) {
  CaseInputs inputs = test::inputs_of(test::causal_case("causal", 140, 64),
                                      ElementType::float16);
  for (double& x : inputs.dout) x *= 8192;
  for (double& x : inputs.problem.v) x *= 32;
  const Answer exact = test::slow_answer<double>(inputs);
  const Answer tolerances = test::tolerances_of(
      inputs, exact, ElementType::float16, test::Weights::accumulated);
  for (const Order order : {Order::any, Order::fixed}) {
    machine::set_seed(12);
    AttentionArrays arrays = test::arrays_of(inputs, ElementType::float16);
    forward(inputs, inputs.lines, arrays, nullptr, 0);
    backward(inputs, arrays, order);
    const Answer answer = test::answer_in(arrays);
    int64_t infinite = 0;
    for (const auto part : {&Answer::dq, &Answer::dk}) {
      const double near =
          2e-3 * test::largest(exact.*part) + (tolerances.*part)[0];
      for (std::size_t i = 0; i < (exact.*part).size(); ++i) {
        const double x = (answer.*part)[i];
        if (std::isfinite(x)) {
          ASSERT_NEAR(x, (exact.*part)[i], near);
        } else {
          ++infinite;
        }
      }
    }
    EXPECT_GT(infinite, 0);
    test::expect_near(answer.dv, exact.dv, 2e-3 * test::largest(exact.dv),
                      "dv");
  }
}

}  // namespace
}  // namespace longspan
