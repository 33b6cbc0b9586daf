#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace longspan::test {

/// The tile registers of AMX in plain C++, one set for each thread. What is
/// used while they are not configured is a failure.
class EmulatedTiles {
 public:
  static void configure() {
    EXPECT_FALSE(configured_);
    configured_ = true;
    std::memset(tiles_, 0xff, sizeof tiles_);  // NaN
  }
  static void release() {
    EXPECT_TRUE(configured_);
    configured_ = false;
  }

  template <int tile>
  static void zero() {
    EXPECT_TRUE(configured_);
    std::memset(tiles_[tile], 0, sizeof tiles_[tile]);
  }
  template <int tile>
  static void load(const void* from, int64_t row_bytes) {
    EXPECT_TRUE(configured_);
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tiles_[tile][row],
                  static_cast<const char*>(from) + row * row_bytes, 64);
    }
  }
  template <int tile>
  static void store(void* to, int64_t row_bytes) {
    EXPECT_TRUE(configured_);
    for (int row = 0; row < 16; ++row) {
      std::memcpy(static_cast<char*>(to) + row * row_bytes, tiles_[tile][row],
                  64);
    }
  }
  template <int c, int a, int b>
  static void dot() {
    static_assert(c != a && c != b && a != b);
    EXPECT_TRUE(configured_);
    for (int row = 0; row < 16; ++row) {
      for (int pair = 0; pair < 16; ++pair) {
        const uint32_t from_a = tiles_[a][row][pair];
        for (int column = 0; column < 16; ++column) {
          const uint32_t from_b = tiles_[b][pair][column];
          float sum = std::bit_cast<float>(tiles_[c][row][column]);
          sum += low(from_a) * low(from_b);
          sum += high(from_a) * high(from_b);
          tiles_[c][row][column] = std::bit_cast<uint32_t>(sum);
        }
      }
    }
  }

 private:
  static float low(uint32_t word) { return std::bit_cast<float>(word << 16); }
  static float high(uint32_t word) {
    return std::bit_cast<float>(word & 0xffff0000);
  }

  static inline thread_local bool configured_ = false;
  static inline thread_local uint32_t tiles_[8][16][16];
};

}  // namespace longspan::test
