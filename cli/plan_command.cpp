#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "longspan/core/detail/nearest.h"
#include "longspan/draw/draw.h"
#include "longspan/plan/attention_layout.h"
#include "options.h"
#include "outcome.h"
#include "output.h"
#include "stream.h"
#include "values.h"

namespace longspan::cli {

namespace {

struct PlanArguments {
  using Text = std::optional<std::string>;
  StreamArguments stream;
  Text strategy, head_ranks, rank;
  Text heads, key_heads, head_dim, value_dim, dtype;
  OutputArguments output;
};

int64_t number_or(const char* flag, const PlanArguments::Text& text,
                  int64_t otherwise) {
  constexpr int64_t kMost = 1 << 16;
  return text ? whole_number(flag, *text, 1, kMost) : otherwise;
}

int64_t bytes_of(const std::string& dtype) {
  if (dtype == "bf16" || dtype == "fp16") return 2;
  if (dtype == "fp32") return 4;
  require(dtype == "fp64", "--dtype is '", dtype,
          "'; expected bf16, fp16, fp32 or fp64");
  return 8;
}

AttentionShape shape_of(const PlanArguments& arguments) {
  AttentionShape shape;
  shape.heads = number_or("--heads", arguments.heads, 8);
  shape.key_heads = number_or("--key-heads", arguments.key_heads, shape.heads);
  shape.head_dim = number_or("--head-dim", arguments.head_dim, 128);
  shape.value_dim =
      number_or("--value-dim", arguments.value_dim, shape.head_dim);
  shape.bytes_per_element = bytes_of(arguments.dtype.value_or("bf16"));
  require(shape.heads % shape.key_heads == 0, "--heads is ", shape.heads,
          " but --key-heads is ", shape.key_heads,
          "; every key head serves as many heads");
  return shape;
}

/// Those that a list names.
std::vector<Strategy> strategies_of(const PlanArguments& arguments, int ranks) {
  std::string names = arguments.strategy.value_or("ring");
  std::ranges::replace(names, '-', '_');
  const bool all = names == "all";
  int head_ranks = 0;
  if (arguments.head_ranks) {
    head_ranks = static_cast<int>(
        whole_number("--head-ranks", *arguments.head_ranks, 1, ranks));
    require(all || names.find("head_parallel_ring") != std::string::npos,
            "--head-ranks goes with --strategy head-parallel-ring, not ",
            names);
  }
  if (all) {
    names.clear();
    for (std::string_view name : Strategy::names()) {
      names += join(names.empty() ? "" : ",", name);
    }
  }
  std::vector<Strategy> strategies;
  for (const std::string& name : word_list("--strategy", names)) {
    std::string hint = did_you_mean(name, Strategy::names());
    std::ranges::replace(hint, '_', '-');
    require(
        std::ranges::find(Strategy::names(), name) != Strategy::names().end(),
        "--strategy is '", name,
        "'; expected all, or ring, gathered, needed, head-parallel, "
        "head-parallel-ring or a list of them",
        hint);
    const bool teams = name == "head_parallel_ring";
    strategies.push_back(
        Strategy::named(name, teams ? head_ranks : Strategy::kFitting));
  }
  return strategies;
}

void run_plan(const PlanArguments& arguments) {
  format_of(arguments.output);
  const AttentionShape shape = shape_of(arguments);
  Stream stream = stream_of(arguments.stream);
  const int ranks = stream.ownership.ranks();
  const auto layout =
      AttentionLayout::of(stream.ownership, {std::move(stream.mask)});
  const std::vector<Strategy> strategies = strategies_of(arguments, ranks);
  const bool table =
      strategies.size() > 1 || arguments.strategy.value_or("") == "all";
  require(!table || !arguments.rank,
          "--rank goes with one strategy; a table counts all ranks");
  Picture picture;
  if (table) {
    picture = draw_strategies(layout, strategies, shape);
  } else if (arguments.rank) {
    const auto rank =
        static_cast<int>(whole_number("--rank", *arguments.rank, 0, ranks - 1));
    picture = draw_plan_of(layout, strategies[0], rank, shape);
  } else {
    picture = draw_plan(layout, strategies[0], shape);
  }
  write(picture, arguments.output);
}

}  // namespace

Command add_plan(CLI::App& program) {
  CLI::App& plan = *program.add_subcommand(
      "plan", "Say what every rank computes and sends, before anything moves");
  auto arguments = std::make_shared<PlanArguments>();
  add_stream(plan, arguments->stream);
  add_text(plan, "--strategy", arguments->strategy,
           "ring (default), gathered (all-gather), needed, head-parallel "
           "(Ulysses), head-parallel-ring (USP); all, or a list, compares them",
           "NAME");
  add_text(plan, "--head-ranks", arguments->head_ranks,
           "Ranks of a team for head-parallel-ring", "N");
  add_text(plan, "--rank", arguments->rank, "One rank alone", "N");
  add_text(plan, "--heads", arguments->heads, "Query heads (8)", "N");
  add_text(plan, "--key-heads", arguments->key_heads,
           "Key heads (as many as heads)", "N");
  add_text(plan, "--head-dim", arguments->head_dim,
           "Channels of queries and keys (128)", "N");
  add_text(plan, "--value-dim", arguments->value_dim,
           "Channels of values (those of keys)", "N");
  add_text(plan, "--dtype", arguments->dtype,
           "bf16 (default), fp16, fp32, fp64", "NAME");
  add_output(plan, arguments->output);
  return [arguments, &plan] {
    check_once(plan);
    run_plan(*arguments);
  };
}

}  // namespace longspan::cli
