#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "longspan/core/check.h"
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

/// What this processor offers of the sets that our kernels may use.
std::vector<std::string> instruction_sets() {
  std::vector<std::string> sets;
#if defined(__x86_64__) && defined(__GNUC__)
  const auto add = [&](const char* name, int supported) {
    if (supported != 0) sets.emplace_back(name);
  };
  __builtin_cpu_init();
  add("sse4.2", __builtin_cpu_supports("sse4.2"));
  add("avx", __builtin_cpu_supports("avx"));
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
#elif defined(__aarch64__)
  sets.emplace_back("neon");
#endif
  return sets;
}

std::vector<Fact> facts() {
  return {
      {"version", LONGSPAN_VERSION},
      {"compiler", compiler()},
      {"cxx_standard", __cplusplus / 100 % 100},
      {"instruction_sets", instruction_sets()},
  };
}

std::string shown(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump();
  std::string words;
  for (const auto& entry : value) {
    words += (words.empty() ? "" : " ") + shown(entry);
  }
  return words.empty() ? "none known" : words;
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
