#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "longspan/kernels/common/hopper/wgmma.cuh"
#include "tests/support/attention_arrays.h"

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

TEST(Machine, TellsAllWhoMeetWhatAnyOfThemSaid) {
  for (const unsigned finder : {0u, 77u, 128u}) {
    int told = 0;
    machine::run(1, 128, 65536, [&] {
      // What is said of one meeting is forgotten in the next ones.
      for (int turn = 0; turn < 4; ++turn) {
        const bool found = turn == 1 && threadIdx.x == finder;
        const bool any = hopper::meet_any(1, 128, found);
        if (any != (turn == 1 && finder < 128)) return;
      }
      ++told;
    });
    EXPECT_EQ(told, 128);
  }
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
  for (uint32_t& pair : ones) pair = hopper::pack_pair(1.f, 1.f);
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

/// Each float16, what lies halfway to the next, and what is just beyond that.
TEST(Machine, RoundsToTheNearestFloat16) {
  const auto value = [](uint32_t bits) {
    return static_cast<float>(test::float16_value(static_cast<uint16_t>(bits)));
  };
  constexpr uint32_t kInfinite = 0x7C00;
  for (uint32_t bits = 0; bits < kInfinite; ++bits) {
    const float here = value(bits);
    const float next = bits + 1 == kInfinite ? 65536.f : value(bits + 1);
    const float half = (here + next) / 2;
    ASSERT_EQ(hopper::f16_bits(here), bits);
    ASSERT_EQ(hopper::f16_bits(-here), bits | 0x8000);
    ASSERT_EQ(hopper::f16_bits(half), bits + (bits & 1));
    ASSERT_EQ(hopper::f16_bits(std::nextafter(half, 0.f)), bits);
    ASSERT_EQ(hopper::f16_bits(std::nextafter(half, next)), bits + 1);
    ASSERT_EQ(test::nearest_float16(half),
              test::float16_value(static_cast<uint16_t>(bits + (bits & 1))));
  }
  EXPECT_EQ(hopper::f16_bits(1e9f), kInfinite);
  EXPECT_EQ(hopper::f16_bits(-INFINITY), kInfinite | 0x8000);
  EXPECT_GT(hopper::f16_bits(NAN) & 0x7FFF, kInfinite);
}

/// Each float16 times one, from registers.
TEST(Machine, MultipliesEveryFloat16) {
  constexpr auto kHalf = ElementType::float16;
  for (uint32_t first = 0; first < 65536; first += 64) {
    std::vector<float> seen(128);
    machine::run(1, 128, 65536, [&] {
      // Each row of B is the word 1, 0: column 0 sums what A has.
      for (int i = 0; i < 16; ++i) {
        const uint32_t word = hopper::pack_pair<kHalf>(1.f, 0.f);
        hopper::store_pair(
            kTile + threadIdx.x * 128u + 8u * static_cast<uint32_t>(i),
            std::bit_cast<float>(word), std::bit_cast<float>(word));
      }
      hopper::fence_for_wgmma();
      hopper::meet(1, 128);
      hopper::wgmma_fence();
      // One element of each row, of the first lane of a quad.
      const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 4;
      const uint32_t bits = first + row;
      uint32_t a[4] = {lane % 4 == 0 ? bits : 0, lane % 4 == 0 ? bits + 32 : 0,
                       0, 0};
      float d[16];
      hopper::wgmma<1, kHalf>(d, a, hopper::across_channels(kTile, 8192), 0);
      hopper::wgmma_commit();
      hopper::wgmma_wait<0>();
      if (lane % 4 == 0) {
        seen[row] = d[0];
        seen[row + 32] = d[2];
      }
    });
    for (uint32_t i = 0; i < 64; ++i) {
      const double exact =
          test::float16_value(static_cast<uint16_t>(first + i));
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(seen[i]));
      } else {
        ASSERT_EQ(seen[i], exact);
      }
    }
  }
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
      for (uint32_t& pair : ones) pair = hopper::pack_pair(1.f, 1.f);
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
