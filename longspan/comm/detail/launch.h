#pragma once

#include <functional>
#include <optional>
#include <string>

namespace longspan {

/// Where a launcher put this process, and where all ranks meet.
struct Launch {
  int rank = 0;
  int size = 1;
  std::string address;  ///< empty when size is 1
  int port = 0;
  /// torchrun's agent already serves the store under that address.
  bool store_exists = false;
};

/// The value of an environment variable; nothing when unset or empty.
using Environment =
    std::function<std::optional<std::string>(const std::string& name)>;

/// What torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or else Slurm's
/// srun (SLURM_PROCID, SLURM_NTASKS; the address is MASTER_ADDR or the first
/// host of SLURM_NODELIST, the port MASTER_PORT or one made from SLURM_JOB_ID)
/// says. Nothing when neither launched this process; an error that names the
/// missing variables when only half of them are there. An allocation without a
/// task (SLURM_NTASKS without SLURM_PROCID) counts as not launched.
std::optional<Launch> launch_from(const Environment& variable);

/// "node03" of "node[03-07,9],login1".
std::string first_host(const std::string& node_list);

}  // namespace longspan
