#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/common/ampere/checks.h"
#include "longspan/kernels/common/device.h"

namespace longspan::hopper {

/// Why code for Hopper does not run on the current device, or nothing.
inline std::optional<std::string> why_not_here() {
  const int generation = device_generation();
  if (generation == 90) return std::nullopt;
  return "the device is of generation " + std::to_string(generation) +
         ", not 90";
}

}  // namespace longspan::hopper
