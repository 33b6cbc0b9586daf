#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "longspan/kernels/common/element.h"

/// A Hopper card on paper: runs the kernels' own sources on the CPU, so that
/// their arithmetic and their barriers are tested where there is no card.
///
/// The headers below include/ stand before those of longspan and of CUDA: each
/// instruction of ptx.cuh, tma.cuh and wgmma.cuh is a function here. A thread
/// of the card is a fiber that runs until it must wait. Who goes on, and when
/// an asynchronous instruction happens between its issue and the wait for it,
/// is drawn from a seed: a barrier that is missing shows as a wrong answer
/// under some seed, one that nobody completes as an error that says who waits.
///
/// Left out: registers, banks, time; the order of memory between blocks.
namespace longspan::machine {

/// Runs `body` once for every thread. Blocks take turns on one processor.
/// Throws std::logic_error for what the card would hang on or not take.
void run(int blocks, int threads, std::size_t shared_bytes,
         const std::function<void()>& body);

/// Ends the run with std::logic_error. `what` outlives it.
[[noreturn]] void fail(const char* what);

/// What later runs draw their order from; LONGSPAN_SEED, a number that is added
/// to it, makes other orders of the same tests.
void set_seed(uint64_t seed);

/// Processors of the card.
inline constexpr int kProcessors = 3;

/// Shared memory of a processor, in bytes.
inline constexpr std::size_t kMostShared = 232448;

// ---- What threads ask for ------------------------------------------------

int lane();
/// Where shared memory of the running block lies; addresses in it are numbers
/// from kSharedBase on.
inline constexpr uint32_t kFirstAddress = 1024;
uint8_t* shared_at(uint32_t address, std::size_t bytes);
uint32_t address_of(const void* pointer);

/// What the lanes of a warp gave, once all of them have.
struct Words {
  uint64_t word[5];
};
const Words* meet_lanes(const Words& mine);

void barrier_init(uint32_t barrier, int arrivals);
void barrier_arrive(uint32_t barrier, uint32_t bytes);
void barrier_wait(uint32_t barrier, uint32_t parity);
/// Threads of a block by number; `waits`: as one that stays.
void meet(int number, int threads, bool waits);
/// As one that stays; whether x was true for anybody.
bool meet_any(int number, int threads, bool x);

/// A number in device memory that another block may write.
void wait_for_number(const int* at, int least);

/// Ordinary writes of shared memory, and the fence that shows them to
/// asynchronous instructions.
void write_shared(uint32_t address, const void* from, std::size_t bytes);
void fence_async();

/// `map` is a CUtensorMap; places are [channel, token, head, row].
void fetch_box(uint32_t to, const void* map, uint32_t barrier,
               const int (&at)[4]);
void add_box(const void* map, uint32_t from, const int (&at)[4]);
void boxes_commit();
void boxes_wait(bool read);

/// One product of a warpgroup, 64 x columns, 16 deep.
struct Product {
  int columns = 0;
  ElementType type = ElementType::bfloat16;  // of operands
  bool in_registers = false, across_a = false, across_b = false, adds = false;
  uint64_t a = 0, b = 0;
  friend bool operator==(const Product&, const Product&) = default;
};
void multiply(const Product& product, float* d, const uint32_t* a);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int left);

}  // namespace longspan::machine
