#pragma once

#include <string>
#include <vector>

namespace longspan::cli {

/// What this processor offers of the instruction sets that kernels may use, and
/// this process may execute. Tile registers (AMX) are tried out: some machines
/// report them and hide them.
std::vector<std::string> instruction_sets();

}  // namespace longspan::cli
