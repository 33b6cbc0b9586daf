#include "longspan/kernels/cpu/bf16/steps.h"

#ifdef LONGSPAN_X86_KERNELS

#include <cpuid.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace longspan {

namespace {

bool cpu_has_tiles() {
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  return (d & kBf16) != 0 && (d & kTile) != 0;
}

/// Whether the system saves both parts of the tile state, their configuration
/// and their data, when it switches threads.
bool system_saves_tiles() {
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kXgetbv = 1u << 27;
  if ((c & kXgetbv) == 0) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  return (low & kTileState) == kTileState;
}

/// Tile data is large, so Linux gives a process room for it on request only.
bool system_permits_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

// The leaf that describes palettes (0x1d) is not asked: some virtual machines
// leave it empty although palette 1, the only one there is, works.
bool amx_is_usable() {
  return cpu_has_tiles() && system_saves_tiles() && system_permits_tiles();
}

}  // namespace longspan

#endif
