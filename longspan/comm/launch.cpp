#include "longspan/comm/detail/launch.h"

#include <charconv>
#include <cstdint>
#include <vector>

#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

constexpr int kFirstPort = 20000;
constexpr int kPorts = 20000;

int64_t number(const std::string& name, const std::string& text, int64_t least,
               int64_t most) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  check(error == std::errc() && stop == end && value >= least && value <= most,
        "from_environment: ", name, "='", text, "'; expected a number from ",
        least, " to ", most);
  return value;
}

/// Everything but the address and port, which one rank alone does not need.
Launch place(const Environment& variable, const std::string& rank_name,
             const std::string& size_name) {
  const auto rank = variable(rank_name);
  const auto size = variable(size_name);
  check(rank && size, "from_environment: ", rank ? rank_name : size_name,
        " is set but ", rank ? size_name : rank_name,
        " is not; set both, or neither to run on one rank");
  Launch launch;
  launch.size = static_cast<int>(number(size_name, *size, 1, INT32_MAX));
  launch.rank = static_cast<int>(number(rank_name, *rank, 0, launch.size - 1));
  return launch;
}

Launch from_torchrun(const Environment& variable) {
  Launch launch = place(variable, "RANK", "WORLD_SIZE");
  if (launch.size == 1) return launch;
  const auto address = variable("MASTER_ADDR");
  const auto port = variable("MASTER_PORT");
  check(address && port, "from_environment: ",
        !address && !port ? "MASTER_ADDR and MASTER_PORT are"
        : address         ? "MASTER_PORT is"
                          : "MASTER_ADDR is",
        " not set, so ", launch.size,
        " ranks cannot meet; give the host of rank 0 and a free port there");
  launch.address = *address;
  launch.port = static_cast<int>(number("MASTER_PORT", *port, 1, 65535));
  launch.store_exists =
      variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  return launch;
}

Launch from_slurm(const Environment& variable) {
  Launch launch = place(variable, "SLURM_PROCID", "SLURM_NTASKS");
  if (launch.size == 1) return launch;
  auto nodes = variable("SLURM_NODELIST");
  if (!nodes) nodes = variable("SLURM_JOB_NODELIST");
  const auto address = variable("MASTER_ADDR");
  check(address || nodes,
        "from_environment: neither MASTER_ADDR nor SLURM_NODELIST is set, so ",
        launch.size, " ranks cannot meet; give the host of rank 0");
  launch.address = address ? *address : first_host(*nodes);
  const auto port = variable("MASTER_PORT");
  const auto job = variable("SLURM_JOB_ID");
  check(port || job,
        "from_environment: neither MASTER_PORT nor SLURM_JOB_ID is set, so ",
        launch.size, " ranks cannot meet; give a free port of rank 0's host");
  launch.port = static_cast<int>(
      port ? number("MASTER_PORT", *port, 1, 65535)
           : kFirstPort + number("SLURM_JOB_ID", *job, 0, INT64_MAX) % kPorts);
  return launch;
}

}  // namespace

std::string first_host(const std::string& node_list) {
  std::string host;
  std::size_t at = 0;
  while (at < node_list.size() && node_list[at] != ',') {
    if (node_list[at] != '[') {
      host += node_list[at++];
      continue;
    }
    const auto close = node_list.find(']', at);
    check(close != std::string::npos, "from_environment: SLURM_NODELIST='",
          node_list, "' has a bracket without an end; set MASTER_ADDR");
    const auto first_end = node_list.find_first_of("-,]", at);
    host += node_list.substr(at + 1, first_end - at - 1);
    at = close + 1;
  }
  return host;
}

std::optional<Launch> launch_from(const Environment& variable) {
  if (variable("RANK") || variable("WORLD_SIZE")) {
    return from_torchrun(variable);
  }
  if (variable("SLURM_PROCID")) return from_slurm(variable);
  for (const std::string name : {"MASTER_ADDR", "MASTER_PORT"}) {
    check(!variable(name), "from_environment: ", name,
          " is set but RANK and WORLD_SIZE are not; set all of them, or none "
          "to run on one rank");
  }
  return std::nullopt;
}

}  // namespace longspan
