#pragma once

#include "longspan/kernels/hopper/ptx.cuh"
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
  using Plan = TopPlan<kThreads>;
  static constexpr int kWarps = kThreads / 32;
  typename Plan::Shared& shared;
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

  __device__ uint32_t sum_in_warp(uint32_t x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t y = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += y;
    }
    return x;
  }

  struct Bound {
    uint32_t key;  // of the last that is chosen
    int equal;     // how many that equal it are
  };

  /// Adds one to the bin of a key; one step for lanes that agree, where many
  /// may.
  template <bool kAlike>
  __device__ void count(bool here, uint32_t bin) {
    if constexpr (!kAlike) {
      if (here) atomicAdd(shared.histogram + bin, 1u);
      return;
    }
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

  /// The bin of the rank-th greatest key, its rank there, and how many share
  /// it.
  __device__ void find_bin(uint32_t rank) {
    constexpr int kEach = Plan::kBins / kThreads;
    uint32_t bins[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      bins[i] = shared.histogram[Plan::kBins - 1 - (thread * kEach + i)];
      sum += bins[i];
    }
    const uint32_t with = sum_in_warp(sum);
    uint2 all;
    const uint2 before =
        before_warp(make_uint2(__shfl_sync(~0u, with, 31), 0), all);
    uint32_t above = before.x + with - sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (above < rank && above + bins[i] >= rank) {
        shared.digit = Plan::kBins - 1 - (thread * kEach + i);
        shared.rank = rank - above;
        shared.in_bin = bins[i];
        shared.few_count = 0;
      }
      above += bins[i];
    }
    __syncthreads();
  }

  /// Where a score falls among kBins equal parts of [low, high]; no greater
  /// score falls lower.
  struct Ruler {
    float low, parts;

    __device__ int bin(uint32_t key) const {
      return min(Plan::kBins - 1,
                 static_cast<int>((unordered(key) - low) * parts));
    }
  };

  __device__ void clear_bins() {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Plan::kBins; i += kThreads) {
      shared.histogram[i + thread] = 0;
    }
    __syncthreads();
  }

  /// The rank-th greatest of `size` keys that are all in [low, high] and in
  /// shared memory, or, when not `exact`, one that is not above it and close.
  __device__ Bound find(int size, int rank, uint32_t low, uint32_t high,
                        bool exact) {
    const auto key_at = [&](int i) { return shared.key[i]; };
    const Ruler ruler{unordered(low), static_cast<float>(Plan::kBins) /
                                          (unordered(high) - unordered(low))};
    // Also refuses what is infinite or NaN.
    if (low == high || high == ~0u || !(fabsf(ruler.low) < 1e30f) ||
        !(ruler.parts < 1e30f) || !(ruler.parts > 1e-30f)) {
      return find_by_digits<false>(size, rank, low, high, key_at);
    }
    clear_bins();
    for (int i = thread; i < size; i += kThreads) {
      atomicAdd(shared.histogram + ruler.bin(shared.key[i]), 1u);
    }
    __syncthreads();
    find_bin(static_cast<uint32_t>(rank));
    const auto bin = static_cast<int>(shared.digit);
    const uint32_t left = shared.in_bin;
    rank = static_cast<int>(shared.rank);
    if (!exact) {
      return {ordered(fmaf(static_cast<float>(bin), 1.f / ruler.parts,
                           ruler.low)),
              rank};
    }
    if (left <= 32) {
      for (int i = thread; i < size; i += kThreads) {
        const uint32_t key = shared.key[i];
        if (ruler.bin(key) == bin) {
          shared.few[atomicAdd(&shared.few_count, 1u)] = key;
        }
      }
      __syncthreads();
      return find_among_few(left, rank);
    }
    // Others count as the least, below all of this bin.
    uint32_t least = ~0u, most = 0;
    for (int i = thread; i < size; i += kThreads) {
      const uint32_t key = shared.key[i];
      if (ruler.bin(key) == bin) {
        least = min(least, key);
        most = max(most, key);
      }
    }
    spread(least, most);
    return find_by_digits<false>(size, rank, least, most, [&](int i) {
      const uint32_t key = shared.key[i];
      return key < least || key > most ? ~0u : key;
    });
  }

  /// The same, eleven bits at a time, wherever the keys lie. Keys outside
  /// [low, high] are left out.
  template <bool kAlike, class KeyAt>
  __device__ Bound find_by_digits(int size, int rank, uint32_t low,
                                  uint32_t high, const KeyAt& key_at) {
    const uint32_t range = high - low;
    if (range == 0) return {low, rank};
    int shift = max(0, 32 - __clz(range) - 11);
    uint32_t known = 0, mask = 0;
    for (;;) {
      clear_bins();
      for (int from = 0; from < size; from += kThreads) {
        const int i = from + thread;
        const uint32_t key = (i < size ? key_at(i) : ~0u) - low;
        const bool here = i < size && key <= range && (key & mask) == known;
        count<kAlike>(here, key >> shift & (Plan::kBins - 1));
      }
      __syncthreads();
      find_bin(static_cast<uint32_t>(rank));
      known |= shared.digit << shift;
      mask |= (Plan::kBins - 1u) << shift;
      rank = static_cast<int>(shared.rank);
      if (shift == 0) return {known + low, rank};
      // Digits may overlap; those bits are known already.
      shift = max(0, shift - 11);
    }
  }

  __device__ Bound find_among_few(uint32_t left, int rank) {
    const uint32_t mine = lane < left ? shared.few[lane] : 0;
    int greater = 0, equal = 0;
    for (uint32_t i = 0; i < left; ++i) {
      const uint32_t other = __shfl_sync(~0u, mine, i);
      greater += other > mine;
      equal += other == mine;
    }
    const uint32_t those = __ballot_sync(
        ~0u, lane < left && greater < rank && greater + equal >= rank);
    const int which = __ffs(those) - 1;
    return {__shfl_sync(~0u, mine, which),
            rank - __shfl_sync(~0u, greater, which)};
  }

  /// The least and greatest of a thread's keys over the block.
  __device__ void spread(uint32_t& low, uint32_t& high) {
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (lane == 0) shared.low[warp] = low, shared.high[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(~0u, shared.low[lane % kWarps]);
    high = __reduce_max_sync(~0u, shared.high[lane % kWarps]);
  }

  /// A score such that somewhat more than `slots` of the row are probably as
  /// great, from a sample of it: four neighbours at a time.
  __device__ float guess(const float* row, Window window, int slots) {
    constexpr int kGroups = Plan::kSample / 4;
    const int first = (window.first + 3) / 4, groups = window.end / 4 - first;
    uint32_t low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < kGroups; i += kThreads) {
      const int64_t at = first + int64_t{i + thread} * groups / kGroups;
      const float4 x = __ldcg(reinterpret_cast<const float4*>(row) + at);
      const uint4 key = make_uint4(ordered(x.x), ordered(x.y), ordered(x.z),
                                   ordered(x.w));
      reinterpret_cast<uint4*>(shared.key)[i + thread] = key;
      low = min(min(low, min(key.x, key.y)), min(key.z, key.w));
      high = max(max(high, max(key.x, key.y)), max(key.z, key.w));
    }
    spread(low, high);
    const float expected = static_cast<float>(Plan::kSample) *
                           static_cast<float>(slots) /
                           static_cast<float>(window.size());
    const int rank =
        min(Plan::kSample,
            static_cast<int>(expected + 4.f * sqrtf(expected) + 4.f));
    const Bound bound = find(Plan::kSample, rank, low, high, false);
    __syncthreads();  // the sample is not needed any more
    return score_of(bound.key);
  }

  /// Collects in order what is not less than `least`, and counts it; what lies
  /// past kMost is only counted.
  __device__ int collect(const float* row, Window window, float least,
                         uint32_t& low, uint32_t& high) {
    constexpr int kRound = kThreads * 16;
    const auto size = static_cast<uint32_t>(window.size());
    int found = 0;
    float4 next[4];
    const auto load = [&](int from) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = from + (j * kThreads + thread) * 4;
        next[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < window.end) {
          next[j] = __ldcg(reinterpret_cast<const float4*>(row + i));
        }
      }
    };
    load(window.first & ~3);
    for (int from = window.first & ~3; from < window.end; from += kRound) {
      float4 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = next[j];
      load(from + kRound);  // it is on the way meanwhile
      uint32_t counts = 0;
      uint32_t mine = 0;  // bit 4 * j + e
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = from + (j * kThreads + thread) * 4 - window.first;
        const float* value = reinterpret_cast<const float*>(x + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // A NaN is not less.
          const bool take =
              !(value[e] < least) && static_cast<uint32_t>(i + e) < size;
          mine |= static_cast<uint32_t>(take) << (4 * j + e);
        }
        counts |= __popc(mine >> (4 * j) & 15) << (8 * j);
      }
      // Of four times 32 threads: 128 fit a byte.
      uint32_t sum = sum_in_warp(counts);
      const uint32_t total = __shfl_sync(~0u, sum, 31);
      sum -= counts;
      uint2 all;
      const uint2 before =
          before_warp(make_uint2((total & 255) | (total >> 8 & 255) << 16,
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
              if (at < Plan::kMost) {
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
    const auto wanted = static_cast<uint32_t>(bound.equal);
    uint32_t above = 0, equal = 0;
    for (int from = 0; from < size; from += 4 * kThreads) {
      const int first = from + 4 * thread;
      uint32_t key[4], counts = 0;  // greater ones, and equal ones << 16
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        key[e] = first + e < size ? key_at(first + e) : 0;
        if (first + e < size) {
          counts += (key[e] > bound.key) + ((key[e] == bound.key) << 16);
        }
      }
      const uint32_t with = sum_in_warp(counts);
      const uint32_t total = __shfl_sync(~0u, with, 31);
      uint2 all;
      const uint2 before =
          before_warp(make_uint2(total & 0xffff, total >> 16), all);
      const uint32_t ahead = with - counts;
      uint32_t greater = above + before.x + (ahead & 0xffff);
      uint32_t ties = equal + before.y + (ahead >> 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first + e >= size) break;
        const bool more = key[e] > bound.key, same = key[e] == bound.key;
        if (more || (same && ties < wanted)) {
          const uint32_t at = greater + min(ties, wanted);
          indices[at] = place_at(first + e);
          if (scores != nullptr) scores[at] = score_of(key[e]);
        }
        greater += more;
        ties += same;
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
    const bool small = size <= Plan::kMost;
    if (small || slots <= Plan::kMost / 2) {
      const float least = small ? -INFINITY : guess(row, window, slots);
      found = collect(row, window, least, low, high);
    }
    if (found >= slots && found <= Plan::kMost) {
      spread(low, high);
      const auto key_at = [&](int i) { return shared.key[i]; };
      const Bound bound = find(found, slots, low, high, true);
      emit(found, bound, indices, scores, key_at,
           [&](int i) { return shared.place[i]; });
    } else {
      // Too many look alike: the whole row is read for each digit.
      const auto key_at = [&](int i) {
        return ordered(__ldcg(row + window.first + i));
      };
      const Bound bound = find_by_digits<true>(size, slots, 0, ~0u, key_at);
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
  const Window window(params, query);
  const float* row = params.given != nullptr
                         ? params.given + query * params.stride
                         : params.scratch + blockIdx.x * params.stride;
  TopKeys<kThreads> top{
      *reinterpret_cast<typename TopPlan<kThreads>::Shared*>(memory)};
  after_former_launch();
  let_next_launch_begin();
  top.run(row, window, params.slots,
          params.indices + query * params.indices_token,
          params.scores != nullptr ? params.scores + query * params.scores_token
                                   : nullptr);
}

}  // namespace longspan::hopper
