#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "longspan/attention/detail/passes.h"
#include "longspan/batch/cut.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/run_ranks.h"
#include "longspan/ops/attend_hopper.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/plan.h"
#include "tests/kernels/attention/attention_answers.h"
#include "tests/kernels/machine/machine.h"

/// Attention over ranks in 16 bits, whose steps are taken by the kernels for
/// Hopper on paper: what they hand on from step to step, and what goes home.
/// This program has the passes and what calls the kernels compiled into it, so
/// that their calls end here.
namespace longspan {

namespace {

/// The card is one, ranks are threads; and how often it was used.
std::mutex card;
int launches = 0;

}  // namespace

void attend_tiles(const AttentionInputs& inputs,
                  std::span<const KeyLines> lines, Accumulator& running) {
  if (lines.empty() || inputs.q.numel() == 0) return;
  const std::lock_guard lock(card);
  ++launches;
  attend_tiles_hopper(inputs, lines, running);
}

void attend_tiles_backward(const AttentionInputs& inputs,
                           std::span<const KeyLines> lines,
                           const AttentionAnswer& answer,
                           AttentionGradients& gradients) {
  if (lines.empty() || inputs.q.numel() == 0) return;
  const std::lock_guard lock(card);
  ++launches;
  attend_tiles_backward_hopper(inputs, lines, answer, gradients);
}

void* current_stream(const at::Tensor& /*tensor*/) {
  return nullptr;
}

namespace {

using test::Answer;
using test::CaseInputs;

constexpr int64_t kTokens = 168;  // halves for 2, 3, 4 and 7 ranks
constexpr int64_t kHeads = 4, kKeyHeads = 2;

struct StepsCase {
  std::string name;
  std::string strategy;
  int ranks = 1;
  Ownership owners = Ownership::contiguous(kTokens, 1);
  Mask mask = Mask::causal(Packing::single(kTokens));
  int64_t channels = 64, value_channels = 64;
  bool has_sink = false;
  bool is_deterministic = false;
  double softcap = 0;
  ElementType type = ElementType::bfloat16;

  at::ScalarType dtype() const {
    return type == ElementType::float16 ? at::kHalf : at::kBFloat16;
  }
};
void PrintTo(const StepsCase& c, std::ostream* out) {
  *out << c.name;
}

std::vector<StepsCase> steps_cases() {
  const auto packing = Packing::of({90, 1, 44, 20}, {92, 4, 48, 24});
  const auto per_document = Packing::of({100, 40}, {112, 56});
  std::vector<int64_t> sizes = {1, 80, 0, 87};
  const Mask packed = Mask::causal(packing),
             window = Mask::sliding(packing, 40),
             whole = Mask::full(Packing::single(kTokens)),
             causal = Mask::causal(per_document);
  std::vector<StepsCase> cases;
  for (const std::string strategy : {"ring", "gathered", "needed"}) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      const auto add = [&](const char* name, const Ownership& owners,
                           const Mask& mask, int64_t channels = 64) {
        cases.push_back({strategy + "_" + std::to_string(ranks) + "_" + name,
                         strategy, ranks, owners, mask, channels, channels,
                         cases.size() % 2 == 0, cases.size() % 3 == 0});
      };
      add("head_tail_packed", Ownership::head_tail(kTokens, ranks), packed);
      if (ranks == 1 || ranks == 7) continue;
      add("contiguous_window", Ownership::contiguous(kTokens, ranks), window);
    }
    const auto add = [&](const char* name, int ranks, const Ownership& owners,
                         const Mask& mask, int64_t channels) {
      cases.push_back({strategy + "_" + name, strategy, ranks, owners, mask,
                       channels, channels, cases.size() % 2 == 0,
                       cases.size() % 3 == 0});
    };
    add("uneven_all_see_all", 4, Ownership::of_sizes(sizes), whole, 128);
    add("per_document", 2, Ownership::per_document_head_tail(per_document, 2),
        causal, 256);
    add("of_512_channels", 3, Ownership::head_tail(kTokens, 3), packed, 512);
  }
  return cases;
}

struct NamedMask {
  std::string name;
  Mask mask;
};

/// Of every kind, and some that hide all keys of a query or a rank.
std::vector<NamedMask> masks_of_all_kinds() {
  const auto packing = Packing::of({90, 1, 44, 20}, {92, 4, 48, 24});
  const Mask causal = Mask::causal(packing);
  const std::vector<TokenRange> images = {{9, 14}, {25, 70}, {80, 88}};
  return {
      {"full", Mask::full(packing)},
      {"window_of_1", Mask::sliding(packing, 1)},
      {"band", Mask::banded(packing, {.before = 20, .after = 9})},
      {"prefix", causal.with_prefix({50, 1, 20, 0})},
      {"groups", Mask::sliding(packing, 6).with_groups(images)},
      {"images_in_a_window", Mask::sliding(packing, 12)
                                 .with_groups(images)
                                 .with_group_reach(GroupReach::within_window)},
      {"holes", causal.with_hidden({{0, 3}, {40, 84}, {85, 86}, {100, 131}})},
      {"window_with_holes",
       Mask::sliding(packing, 30).with_hidden({{10, 30}, {50, 51}})},
      {"pads_that_see", causal.with_pad_queries(PadQueries::see_document)},
      {"mostly_pads", Mask::causal(Packing::of({5}, {kTokens}))},
      {"short_documents", Mask::causal(Packing::rows(kTokens / 3, 3))},
  };
}

/// Every kind of mask in every strategy, and with them numbers of ranks, and
/// the channels, types and caps that have kernels of their own.
std::vector<StepsCase> cases_of_all_masks() {
  struct Kernel {
    std::string name;
    int64_t channels, value_channels;
    double softcap;
    ElementType type;
  };
  const std::vector<Kernel> kernels = {
      {"64", 64, 64, 0, ElementType::bfloat16},
      {"128_float16", 128, 128, 0, ElementType::float16},
      {"192_and_128", 192, 128, 0, ElementType::bfloat16},
      {"128_softcap", 128, 128, 2, ElementType::bfloat16},
      {"256_softcap_float16", 256, 256, 2, ElementType::float16},
      {"40_and_72", 40, 72, 0, ElementType::bfloat16},
      {"512", 512, 512, 0, ElementType::bfloat16},
  };
  const std::vector<int> numbers = {2, 3, 4, 7};
  std::vector<StepsCase> cases;
  std::size_t at = 0;
  for (const NamedMask& mask : masks_of_all_kinds()) {
    for (const std::string strategy : {"ring", "gathered", "needed"}) {
      const Kernel& kernel = kernels[at % kernels.size()];
      const int ranks = numbers[at % numbers.size()];
      const bool head_tail = at % 2 == 0;
      cases.push_back({.name = mask.name + "_" + strategy + "_" +
                               std::to_string(ranks) + "_of_" + kernel.name,
                       .strategy = strategy,
                       .ranks = ranks,
                       .owners = head_tail
                                     ? Ownership::head_tail(kTokens, ranks)
                                     : Ownership::contiguous(kTokens, ranks),
                       .mask = mask.mask,
                       .channels = kernel.channels,
                       .value_channels = kernel.value_channels,
                       .has_sink = at % 5 < 2,
                       .is_deterministic = at % 4 < 2,
                       .softcap = kernel.softcap,
                       .type = kernel.type});
      ++at;
    }
  }
  return cases;
}

class StepsOnPaper : public testing::TestWithParam<StepsCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, StepsOnPaper, testing::ValuesIn(steps_cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Masks, StepsOnPaper,
                         testing::ValuesIn(cases_of_all_masks()),
                         [](const auto& info) { return info.param.name; });

/// A problem over all tokens.
CaseInputs inputs_of(const StepsCase& c) {
  const std::vector<TokenRange> all = {{0, kTokens}};
  CaseInputs inputs = test::inputs_of({.name = c.name,
                                       .queries = kTokens,
                                       .keys = kTokens,
                                       .heads = kHeads,
                                       .heads_per_key_head = kHeads / kKeyHeads,
                                       .head_dim = c.channels,
                                       .value_dim = c.value_channels,
                                       .softcap = c.softcap,
                                       .lines = key_lines(c.mask, all, all)},
                                      c.type);
  if (c.has_sink) inputs.problem.sink = {-1, 0.5, 1, 2};
  return inputs;
}

at::Tensor tensor_of(const std::vector<double>& values, int64_t heads,
                     at::ScalarType dtype) {
  return at::tensor(values, at::kDouble)
      .view({1, kTokens, heads, -1})
      .to(dtype);
}

/// What one rank finds, in the order of all tokens, 0 elsewhere.
struct Found {
  at::Tensor out, lse, dq, dk, dv;
};

Found run_rank(const StepsCase& c, const CaseInputs& inputs,
               const Group& group) {
  const auto layout = AttentionLayout::of(c.owners, {c.mask});
  const Plan plan =
      Plan::of(layout, Strategy::named(c.strategy), group.rank(), 1);
  const at::Tensor mine = token_indices(c.owners, group.rank());
  const auto share = [&](const std::vector<double>& values, int64_t heads) {
    return tensor_of(values, heads, c.dtype()).index_select(1, mine);
  };
  const oracle::AttentionProblem& p = inputs.problem;
  const AttentionInputs in{.q = share(p.q, kHeads),
                           .k = share(p.k, kKeyHeads),
                           .v = share(p.v, kKeyHeads),
                           .heads_per_key_head = p.heads_per_key_head,
                           .scale = p.scale,
                           .softcap = p.softcap};
  const auto total = [&](Accumulator::Kind kind, const at::Tensor& like) {
    return Accumulator(kind, like.sizes(), like.options().dtype(at::kFloat));
  };
  auto sizes = in.q.sizes().vec();
  sizes.back() = c.value_channels;
  Accumulator running =
      total(Accumulator::Kind::attention, at::empty(sizes, in.q.options()));
  const at::Tensor sink = at::tensor(p.sink, at::kFloat);
  if (c.has_sink) running.ask_for_sink(sink);
  run_forward(plan, group, in, running);
  // The last step that shows this rank a key sees to it.
  const bool sees = std::ranges::any_of(
      plan.steps(), [](const PlanStep& step) { return !step.lines.empty(); });
  EXPECT_EQ(running.has_sink(), c.has_sink && sees && in.q.numel() > 0);
  const bool had_sink = running.has_sink() || !c.has_sink;
  PartialAttention answer = running.finish(c.dtype());
  if (!had_sink) answer.out = answer.with_sink(sink).to(c.dtype());
  at::Tensor lse = answer.lse;
  if (c.has_sink) {  // backward takes that of all that share the weights
    lse = at::logaddexp(lse, sink).masked_fill(at::isneginf(lse), -INFINITY);
  }
  AttentionAnswer finished{.out = answer.out,
                           .dout = share(inputs.dout, kHeads),
                           .lse = lse.contiguous()};
  Accumulator dq = total(Accumulator::Kind::sum, in.q);
  Accumulator dk = total(Accumulator::Kind::sum, in.k);
  Accumulator dv = total(Accumulator::Kind::sum, in.v);
  AttentionGradients gradients{dq, dk, dv};
  run_backward(plan, group, in, finished, gradients);
  const auto placed = [&](const at::Tensor& part) {
    auto sizes = part.sizes().vec();
    sizes[1] = kTokens;
    return at::zeros(sizes, at::kDouble)
        .index_copy_(1, mine, part.to(at::kDouble));
  };
  return {placed(answer.out), placed(answer.lse),
          placed(dq.finish(at::kFloat).out), placed(dk.finish(at::kFloat).out),
          placed(dv.finish(at::kFloat).out)};
}

/// Tells torch for a while that every sum has one order.
class DeterministicScope {
 public:
  explicit DeterministicScope(bool on) {
    at::globalContext().setDeterministicAlgorithms(on, false);
  }
  ~DeterministicScope() {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
};

TEST_P(StepsOnPaper, GiveTheAnswerOfOneRank) {
  const DeterministicScope order(GetParam().is_deterministic);
  const CaseInputs inputs = inputs_of(GetParam());
  const Answer exact = test::slow_answer<double>(inputs);
  const bool is_float16 = GetParam().type == ElementType::float16;
  const Answer tolerances = test::tolerances_of(
      inputs, exact, GetParam().type,
      is_float16 ? test::Weights::float16 : test::Weights::bfloat16);
  machine::set_seed(1);
  const int before = launches;
  std::vector<Found> found(static_cast<std::size_t>(GetParam().ranks));
  run_ranks(GetParam().ranks, [&](const Group& group) {
    found[static_cast<std::size_t>(group.rank())] =
        as_call(group, "steps", [&](CallScope& call) {
          call.begin([] { return std::string(); });
          return run_rank(GetParam(), inputs, group);
        });
  });
  EXPECT_GE(launches, before + 2);
  const double bit = is_float16 ? 0x1p-11 : 0x1p-8;  // answers have the type
  const auto expect = [&](const char* name, at::Tensor Found::* part,
                          test::Values Answer::* mine, double rounding) {
    at::Tensor sum = found[0].*part;
    for (std::size_t rank = 1; rank < found.size(); ++rank) {
      sum = sum + found[rank].*part;
    }
    sum = sum.contiguous();
    const test::Values values(sum.const_data_ptr<double>(),
                              sum.const_data_ptr<double>() + sum.numel());
    const double allowed =
        (tolerances.*mine)[0] + rounding * test::largest(exact.*mine);
    test::expect_near(values, exact.*mine, allowed, name);
  };
  expect("out", &Found::out, &Answer::out, bit);
  expect("lse", &Found::lse, &Answer::lse, 0);
  expect("dq", &Found::dq, &Answer::dq, bit);
  expect("dk", &Found::dk, &Answer::dk, bit);
  expect("dv", &Found::dv, &Answer::dv, bit);
}

}  // namespace
}  // namespace longspan
