#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "longspan/kernels/common/device.h"

namespace longspan::test {

/// Where the device that a test needs is absent, it is skipped; with
/// LONGSPAN_REQUIRE_CUDA=1 it fails.
inline void need_device(bool is_there, const char* what) {
  if (is_there) return;
  if (std::getenv("LONGSPAN_REQUIRE_CUDA") != nullptr) {
    FAIL() << "no " << what << ", and LONGSPAN_REQUIRE_CUDA is set";
  }
  GTEST_SKIP() << "no " << what;
}

class OnAmpere : public ::testing::Test {
 protected:
  void SetUp() override {
    need_device(device_generation() >= 80, "CUDA device since Ampere");
  }
};

class OnHopper : public ::testing::Test {
 protected:
  void SetUp() override {
    need_device(device_generation() == 90, "Hopper device");
  }
};

}  // namespace longspan::test
