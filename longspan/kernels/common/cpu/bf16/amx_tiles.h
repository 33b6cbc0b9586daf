#pragma once

#include <cstdint>

namespace longspan {
namespace {

/// The tile registers of AMX. Written in assembly because intrinsics want the
/// number of a tile as a literal, and those of GCC 12 do not say that a load
/// reads memory.
struct AmxTiles {
  /// Palette 1: eight tiles, all of 16 rows of 64 bytes.
  static void configure() {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    static_assert(sizeof(Config) == 64);
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { asm volatile("tilerelease"); }

  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  static void load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(from), "r"(row_bytes), "i"(tile)
                 : "memory");
  }
  template <int tile>
  static void store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(to), "r"(row_bytes), "i"(tile)
                 : "memory");
  }
  /// c += a b.
  template <int c, int a, int b>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace
}  // namespace longspan
