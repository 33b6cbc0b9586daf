#include "machine.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#endif

namespace longspan::cli {

namespace {

#if defined(__x86_64__) && defined(__linux__)

/// Executes tile instructions in a process of its own, which they may kill.
bool tiles_execute() {
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) {
    for (const int fault : {SIGILL, SIGSEGV, SIGBUS}) {
      signal(fault, [](int) { _exit(1); });  // quietly, without a core file
    }
    alignas(64) unsigned char shape[64] = {1};  // palette 1
    shape[16] = 64;                             // bytes of a row of tile 0
    shape[48] = 1;                              // its rows
    // ldtilecfg (%rax), tilezero %tmm0, tilerelease; not every assembler
    // knows them.
    asm volatile(
        ".byte 0xc4, 0xe2, 0x78, 0x49, 0x00\n"
        ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0\n"
        ".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0\n"
        :
        : "a"(shape)
        : "memory");
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

/// The system saves the state of tiles only for processes that ask.
bool tiles_granted() {
  constexpr long kRequestPermission = 0x1023;
  constexpr unsigned long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void add_tile_sets(std::vector<std::string>& sets) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
  constexpr unsigned kBfloat16 = 1U << 22, kTile = 1U << 24, kInt8 = 1U << 25;
  if ((d & kTile) == 0 || !tiles_granted() || !tiles_execute()) return;
  sets.emplace_back("amx-tile");
  if ((d & kBfloat16) != 0) sets.emplace_back("amx-bf16");
  if ((d & kInt8) != 0) sets.emplace_back("amx-int8");
}

#else

void add_tile_sets(std::vector<std::string>& /*sets*/) {}

#endif

}  // namespace

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
  add("avx512dq", __builtin_cpu_supports("avx512dq"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
#elif defined(__aarch64__)
  sets.emplace_back("neon");
#endif
  add_tile_sets(sets);
  return sets;
}

}  // namespace longspan::cli
