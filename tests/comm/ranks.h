#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>

#include "longspan/comm/detail/exchange.h"
#include "longspan/comm/run_ranks.h"

namespace longspan::test {

/// The sizes of group that laws are checked for.
inline const int kSizes[] = {1, 2, 3, 4, 7};

inline const RunOptions kShort = {.timeout = std::chrono::milliseconds(1000)};

/// The message of a lost peer; "no error" where none is lost.
inline std::string loss_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const LostPeer& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace longspan::test
