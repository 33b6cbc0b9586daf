#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "longspan/kernels/common/hopper/wgmma.cuh"

/// What would hang a card, or go wrong on it without a word, is said.
namespace longspan {
namespace {

constexpr uint32_t kBarrier = machine::kFirstAddress;
constexpr uint32_t kTile = machine::kFirstAddress + 1024;

std::string message_of(const std::function<void()>& body) {
  try {
    machine::run(1, 128, 65536, body);
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "nothing was said";
}

TEST(Machine, SaysWhoWaitsForWhatNobodyCompletes) {
  EXPECT_EQ(message_of([] {
              if (threadIdx.x == 0) hopper::barrier_init(kBarrier, 2);
              __syncthreads();
              if (threadIdx.x == 5) hopper::barrier_arrive(kBarrier);
              if (threadIdx.x < 7) hopper::barrier_wait(kBarrier, 0);
            }),
            "machine: block 0 is stuck; 7 threads from 0 on wait for a barrier "
            "in shared memory");
  EXPECT_EQ(message_of([] {
              if (threadIdx.x != 3) hopper::meet(1, 128);
            }),
            "machine: block 0 is stuck; 127 threads from 0 on wait for a "
            "barrier by number");
}

TEST(Machine, RefusesMoreArrivalsThanABarrierWaitsFor) {
  EXPECT_EQ(message_of([] {
              if (threadIdx.x != 0) return;
              hopper::barrier_init(kBarrier, 1);
              machine::barrier_arrive(kBarrier, 16);
              hopper::barrier_arrive(kBarrier);
            }),
            "machine: more arrive at a barrier than it waits for");
}

/// A product of ones and of what was stored, fenced or not.
void multiply_stored(bool fenced, bool asks_first, float (&d)[16]) {
  uint32_t ones[4];
  for (uint32_t& pair : ones) pair = hopper::pack_bf16(1.f, 1.f);
  for (int i = 0; i < 16; ++i) {
    hopper::store_pair(
        kTile + threadIdx.x * 128u + 8u * static_cast<uint32_t>(i), 1.f, 1.f);
  }
  if (fenced) hopper::fence_for_wgmma();
  hopper::meet(1, 128);
  if (asks_first) hopper::wgmma_fence();
  hopper::wgmma<1>(d, ones, hopper::across_channels(kTile, 8192), 0);
  hopper::wgmma_commit();
  hopper::wgmma_wait<0>();
}

TEST(Machine, RefusesProductsOfWhatWasNotFenced) {
  float d[16];
  EXPECT_EQ(message_of([&] { multiply_stored(true, true, d); }),
            "nothing was said");
  EXPECT_EQ(message_of([&] { multiply_stored(false, true, d); }),
            "machine: an asynchronous instruction reads what was written "
            "without a fence");
  EXPECT_EQ(message_of([&] { multiply_stored(true, false, d); }),
            "machine: a product after a wait without wgmma_fence");
}

/// A sum that is read before it was waited for is found under some seed. Halves
/// of 1.f are 0 and 1, so odd columns are sums of ones.
TEST(Machine, ShowsSumsBeforeTheirWaitUnderSomeSeed) {
  int early = 0, late = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    machine::set_seed(seed);
    std::vector<float> seen(128);
    machine::run(1, 128, 65536, [&] {
      float d[16] = {};
      multiply_stored(true, true, d);
      hopper::wgmma_fence();
      uint32_t ones[4];
      for (uint32_t& pair : ones) pair = hopper::pack_bf16(1.f, 1.f);
      const float before = d[1];
      hopper::wgmma<1>(d, ones, hopper::across_channels(kTile, 8192), 1);
      hopper::wgmma_commit();
      hopper::meet(1, 128);
      seen[threadIdx.x] = d[1] / before;
      hopper::wgmma_wait<0>();
      EXPECT_EQ(d[1], 2 * before);
    });
    (seen[0] == 1.f ? early : late) += 1;
  }
  EXPECT_GT(early, 0);
  EXPECT_GT(late, 0);
}

}  // namespace
}  // namespace longspan
