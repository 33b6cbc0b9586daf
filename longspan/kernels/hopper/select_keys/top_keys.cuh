#pragma once

#include "longspan/kernels/hopper/select_keys/config.h"
#include "longspan/kernels/hopper/select_keys/window.cuh"

namespace longspan::hopper {

/// Scores as unsigned numbers of the same order: NaN above all, -0 equal to +0.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (x != x) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u && key != ~0u ? key ^ 0x80000000u
                                                         : ~key);
}

/// A score that was chosen: NaN keeps no payload.
__device__ __forceinline__ float score_of(uint32_t key) {
  return key == ~0u ? __uint_as_float(0x7fffffffu) : unordered(key);
}

/// One block of kThreads selects from one row.
template <int kThreads>
struct TopKeys {
  static constexpr int kWarps = kThreads / 32;
  TopPlan::Shared& shared;
  int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t turn = 0;  // of warp_total, so that one barrier a scan is enough

  /// What lies before this warp in a block-wide sum of two words, and all.
  __device__ uint2 before_warp(uint2 total, uint2& all) {
    uint2* totals = shared.warp_total[turn++ & 1];
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    uint2 sum = lane < kWarps ? totals[lane] : make_uint2(0, 0);
    const uint2 own = sum;
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) {
      const uint32_t x = __shfl_up_sync(~0u, sum.x, step);
      const uint32_t y = __shfl_up_sync(~0u, sum.y, step);
      if (lane >= step) sum.x += x, sum.y += y;
    }
    all.x = __shfl_sync(~0u, sum.x, kWarps - 1);
    all.y = __shfl_sync(~0u, sum.y, kWarps - 1);
    return make_uint2(__shfl_sync(~0u, sum.x - own.x, warp),
                      __shfl_sync(~0u, sum.y - own.y, warp));
  }

  struct Bound {
    uint32_t key;  // of the last that is chosen
    int equal;     // how many that equal it are
  };

  /// Adds one to the bin of a key, one step for lanes that agree.
  __device__ void count(bool here, uint32_t bin) {
    const uint32_t those = __ballot_sync(~0u, here);
    if (those == 0) return;
    const int leader = __ffs(those) - 1;
    const uint32_t first = __shfl_sync(~0u, bin, leader);
    if (__all_sync(~0u, !here || bin == first)) {
      if (lane == leader) atomicAdd(shared.histogram + first, __popc(those));
    } else if (here) {
      atomicAdd(shared.histogram + bin, 1u);
    }
  }

  /// The rank-th greatest of `count_of` keys, eight bits at a time. key_at(i)
  /// is called by all lanes of a warp; all keys lie in [low, high].
  template <class KeyAt>
  __device__ Bound find(int size, int rank, uint32_t low, uint32_t high,
                        const KeyAt& key_at) {
    const uint32_t range = high - low;
    int shift = range == 0 ? 0 : max(0, 24 - __clz(range));
    uint32_t known = 0, mask = 0;
    for (;;) {
      __syncthreads();
      if (thread < 256) shared.histogram[thread] = 0;
      __syncthreads();
      for (int from = 0; from < size; from += kThreads) {
        const int i = from + thread;
        bool here = i < size;
        const uint32_t key = here ? key_at(i) - low : 0;
        here = here && (key & mask) == known;
        count(here, key >> shift & 255);
      }
      __syncthreads();
      if (warp == 0) {
        uint32_t bins[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          bins[i] = shared.histogram[255 - (lane * 8 + i)];
          sum += bins[i];
        }
        uint32_t above = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const uint32_t x = __shfl_up_sync(~0u, above, step);
          if (lane >= step) above += x;
        }
        above -= sum;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const auto wanted = static_cast<uint32_t>(rank);
          if (above < wanted && above + bins[i] >= wanted) {
            shared.digit = 255 - (lane * 8 + i);
            shared.rank = wanted - above;
          }
          above += bins[i];
        }
      }
      __syncthreads();
      known |= shared.digit << shift;
      mask |= 255u << shift;
      rank = static_cast<int>(shared.rank);
      if (shift == 0) break;
      // Digits may overlap; those bits are known already.
      shift = max(0, shift - 8);
    }
    return {known + low, rank};
  }

  /// The least and greatest of a thread's keys over the block.
  __device__ void spread(uint32_t& low, uint32_t& high) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      low = min(low, __shfl_xor_sync(~0u, low, step));
      high = max(high, __shfl_xor_sync(~0u, high, step));
    }
    if (lane == 0) shared.low[warp] = low, shared.high[warp] = high;
    __syncthreads();
    low = shared.low[lane % kWarps];
    high = shared.high[lane % kWarps];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      low = min(low, __shfl_xor_sync(~0u, low, step));
      high = max(high, __shfl_xor_sync(~0u, high, step));
    }
  }

  /// A score such that somewhat more than `slots` of the row are probably as
  /// great, from a sample of it: four neighbours at a time.
  __device__ float guess(const float* row, Window window, int slots) {
    const int size = window.size();
    const int sample =
        size > TopPlan::kLong ? TopPlan::kLongSample : TopPlan::kSample;
    const int first = (window.first + 3) / 4, groups = window.end / 4 - first;
    uint32_t low = ~0u, high = 0;
    for (int i = thread; i < sample / 4; i += kThreads) {
      const int64_t at = first + int64_t{i} * groups / (sample / 4);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(row) + at);
      const uint4 key = make_uint4(ordered(x.x), ordered(x.y), ordered(x.z),
                                   ordered(x.w));
      reinterpret_cast<uint4*>(shared.key)[i] = key;
      low = min(min(low, min(key.x, key.y)), min(key.z, key.w));
      high = max(max(high, max(key.x, key.y)), max(key.z, key.w));
    }
    spread(low, high);
    const float expected =
        static_cast<float>(sample) * static_cast<float>(slots) / size;
    const int rank = min(
        sample, static_cast<int>(expected + 4.f * sqrtf(expected) + 4.f));
    const Bound bound = find(sample, rank, low, high,
                             [&](int i) { return shared.key[i]; });
    __syncthreads();  // the sample is not needed any more
    return bound.key == ~0u ? __uint_as_float(0x7fffffffu)
                            : unordered(bound.key);
  }

  /// Collects in order what is not less than `least`, and counts it; what lies
  /// past kMost is only counted.
  __device__ int collect(const float* row, Window window, float least,
                         uint32_t& low, uint32_t& high) {
    constexpr int kRound = kThreads * 16;
    const auto size = static_cast<uint32_t>(window.size());
    int found = 0;
    for (int from = window.first & ~3; from < window.end; from += kRound) {
      float4 x[4];
      uint32_t counts = 0;
      uint32_t mine = 0;  // bit 4 * j + e
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = from + (j * kThreads + thread) * 4;
        x[j] = i < window.end
                   ? __ldcg(reinterpret_cast<const float4*>(row + i))
                   : make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = from + (j * kThreads + thread) * 4 - window.first;
        const float* value = reinterpret_cast<const float*>(x + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // A NaN is not less.
          const bool take = !(value[e] < least) &&
                            static_cast<uint32_t>(i + e) < size;
          mine |= static_cast<uint32_t>(take) << (4 * j + e);
        }
        counts |= __popc(mine >> (4 * j) & 15) << (8 * j);
      }
      uint32_t sum = counts;  // of four times 32 threads: 128 fit a byte
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t y = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += y;
      }
      const uint32_t total = __shfl_sync(~0u, sum, 31);
      sum -= counts;
      uint2 all;
      const uint2 before = before_warp(
          make_uint2((total & 255) | (total >> 8 & 255) << 16,
                     (total >> 16 & 255) | total >> 24 << 16),
          all);
      const uint32_t of[4] = {all.x & 0xffff, all.x >> 16, all.y & 0xffff,
                              all.y >> 16};
      const uint32_t ahead[4] = {before.x & 0xffff, before.x >> 16,
                                 before.y & 0xffff, before.y >> 16};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = found + static_cast<int>(ahead[j] + (sum >> (8 * j) & 255));
        const float* value = reinterpret_cast<const float*>(x + j);
        if (mine >> (4 * j) & 15) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (mine >> (4 * j + e) & 1) {
              const uint32_t key = ordered(value[e]);
              low = min(low, key);
              high = max(high, key);
              if (at < TopPlan::kMost) {
                shared.key[at] = key;
                shared.place[at] = from + (j * kThreads + thread) * 4 + e;
              }
              ++at;
            }
          }
        }
        found += static_cast<int>(of[j]);
      }
    }
    return found;
  }

  /// Writes what is above the bound and the first that equal it, in order.
  template <class KeyAt, class PlaceAt>
  __device__ void emit(int size, Bound bound, int32_t* indices, float* scores,
                       const KeyAt& key_at, const PlaceAt& place_at) {
    uint32_t above = 0, equal = 0;
    const uint32_t lower = (1u << lane) - 1;
    for (int from = 0; from < size; from += kThreads) {
      const int i = from + thread;
      const uint32_t key = i < size ? key_at(i) : 0;
      const bool greater = i < size && key > bound.key;
      const bool same = i < size && key == bound.key;
      const uint32_t greaters = __ballot_sync(~0u, greater);
      const uint32_t sames = __ballot_sync(~0u, same);
      uint2 all;
      const uint2 before =
          before_warp(make_uint2(__popc(greaters), __popc(sames)), all);
      const uint32_t ties = equal + before.y + __popc(sames & lower);
      const auto wanted = static_cast<uint32_t>(bound.equal);
      if (greater || (same && ties < wanted)) {
        const uint32_t at = above + before.x + __popc(greaters & lower) +
                            min(ties, wanted);
        indices[at] = place_at(i);
        if (scores != nullptr) scores[at] = score_of(key);
      }
      above += all.x;
      equal += all.y;
    }
  }

  __device__ void run(const float* row, Window window, int slots,
                      int32_t* indices, float* scores) {
    const int size = window.size();
    if (size <= slots) {
      for (int i = thread; i < slots; i += kThreads) {
        const bool there = i < size;
        indices[i] = there ? window.first + i : -1;
        if (scores != nullptr) {
          scores[i] =
              there ? score_of(ordered(row[window.first + i])) : -INFINITY;
        }
      }
      return;
    }
    if (slots == 0) return;
    uint32_t low = ~0u, high = 0;
    int found = 0;
    const bool small = size <= TopPlan::kMost;
    if (small || slots <= TopPlan::kMost / 2) {
      const float least =
          small ? -INFINITY : guess(row, window, slots);
      found = collect(row, window, least, low, high);
    }
    if (found >= slots && found <= TopPlan::kMost) {
      spread(low, high);
      const auto key_at = [&](int i) { return shared.key[i]; };
      const Bound bound = find(found, slots, low, high, key_at);
      emit(found, bound, indices, scores, key_at,
           [&](int i) { return shared.place[i]; });
    } else {
      // Too many look alike: the whole row is read for each digit.
      const auto key_at = [&](int i) {
        return ordered(__ldcg(row + window.first + i));
      };
      const Bound bound = find(size, slots, 0, ~0u, key_at);
      emit(size, bound, indices, scores, key_at,
           [&](int i) { return window.first + i; });
    }
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    top_keys_kernel(const __grid_constant__ SelectParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int query = params.first + static_cast<int>(blockIdx.x);
  const float* row = params.given != nullptr
                         ? params.given + query * params.stride
                         : params.scratch + blockIdx.x * params.stride;
  TopKeys<kThreads> top{*reinterpret_cast<TopPlan::Shared*>(memory)};
  top.run(row, Window(params, query), params.slots,
          params.indices + query * params.indices_token,
          params.scores != nullptr ? params.scores + query * params.scores_token
                                   : nullptr);
}

}  // namespace longspan::hopper
