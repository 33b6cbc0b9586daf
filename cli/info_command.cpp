#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "longspan/core/detail/check.h"
#include "longspan/kernels/levels/levels.h"
#include "machine.h"
#include "outcome.h"

namespace longspan::cli {

namespace {

/// One line of the answer; text shows several values separated by spaces.
struct Fact {
  std::string name;
  nlohmann::ordered_json value;
};

std::string compiler() {
#if defined(__clang__)
  return join("clang ", __clang_major__, ".", __clang_minor__, ".",
              __clang_patchlevel__);
#elif defined(__GNUC__)
  return join("g++ ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__);
#else
  return "unknown";
#endif
}

/// What the build was told, apart from what it found.
std::vector<std::string> build_options() {
  std::vector<std::string> options{LONGSPAN_BUILD_TYPE};
  if (*LONGSPAN_SANITIZERS != 0) {
    options.push_back(join("sanitizers=", LONGSPAN_SANITIZERS));
  }
#ifndef NDEBUG
  options.emplace_back("assertions");
#endif
  return options;
}

/// Levels of the CPU's attention that run here, the best last.
std::vector<std::string> attention_levels() {
  std::vector<std::string> names;
  for (const AttentionKernels& kernels : attention_kernels()) {
    names.emplace_back(kernels.name);
  }
  return names;
}

/// The others, and why not.
std::vector<std::string> absent_levels() {
  std::vector<std::string> lines;
  for (const KernelLevel& level : kernel_levels()) {
    if (!level.why_not.empty()) {
      lines.push_back(join(level.name, ": ", level.why_not));
    }
  }
  return lines;
}

std::vector<Fact> facts() {
  return {
      {"version", LONGSPAN_VERSION},
      {"compiler", compiler()},
      {"cxx_standard", __cplusplus / 100 % 100},
      {"build", build_options()},
      {"cuda_kernels", LONGSPAN_BUILT_WITH_CUDA != 0},
      {"instruction_sets", instruction_sets()},
      {"attention_levels", attention_levels()},
      {"absent_levels", absent_levels()},
      {"attention_level", chosen_attention_kernels().name},
  };
}

std::string shown(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (!value.is_array()) return value.dump();
  std::string words;
  for (const auto& entry : value) {
    const std::string word = shown(entry);
    const bool sentences = word.find(' ') != std::string::npos;
    words += (words.empty() ? "" : sentences ? "; " : " ") + word;
  }
  return words.empty() ? "none" : words;
}

void run_info(bool json) {
  if (json) {
    nlohmann::ordered_json all;
    for (const Fact& fact : facts()) all[fact.name] = fact.value;
    std::cout << all.dump(1) << "\n" << std::flush;
  } else {
    for (const Fact& fact : facts()) {
      std::string name = fact.name + ":";
      name.resize(19, ' ');
      std::cout << name << shown(fact.value) << "\n";
    }
    std::cout << std::flush;
  }
  if (!std::cout) throw Failure("cannot write to standard output");
}

}  // namespace

Command add_info(CLI::App& program) {
  CLI::App& info = *program.add_subcommand(
      "info", "Say how this program was built and what it runs on");
  auto json = std::make_shared<bool>(false);
  info.add_flag("--json", *json, "Answer in JSON");
  return [json] { run_info(*json); };
}

}  // namespace longspan::cli
