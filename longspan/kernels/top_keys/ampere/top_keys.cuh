#pragma once

#include "longspan/kernels/common/ampere/launch_after.cuh"
#include "longspan/kernels/top_keys/ampere/window.cuh"

namespace longspan {

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

  /// What lies before this warp in a block-wide sum, and all of it.
  __device__ uint32_t before_warp(uint32_t total, uint32_t& all) {
    uint32_t* totals = shared.warp_total[turn++ & 1];
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    const uint32_t own = lane < kWarps ? totals[lane] : 0;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) {
      const uint32_t x = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += x;
    }
    all = __shfl_sync(~0u, sum, kWarps - 1);
    return __shfl_sync(~0u, sum - own, warp);
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
    uint32_t all;
    uint32_t above = before_warp(__shfl_sync(~0u, with, 31), all) + with - sum;
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
      return {
          ordered(fmaf(static_cast<float>(bin), 1.f / ruler.parts, ruler.low)),
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

  /// find() eleven bits at a time, wherever the keys lie. Keys outside
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
    const int size = window.size();
    // About 128 of the sample are to be chosen, so that it says enough.
    const int sampled = min(max(size / slots, 8), Plan::kSample / 128) * 32;
    const int first = (window.first + 3) / 4, groups = window.end / 4 - first;
    uint32_t low = ~0u, high = 0;
    for (int i = thread; i < sampled; i += kThreads) {
      const int64_t at = first + int64_t{i} * groups / sampled;
      const float4 x = __ldcg(reinterpret_cast<const float4*>(row) + at);
      const uint4 key =
          make_uint4(ordered(x.x), ordered(x.y), ordered(x.z), ordered(x.w));
      reinterpret_cast<uint4*>(shared.key)[i] = key;
      low = min(min(low, min(key.x, key.y)), min(key.z, key.w));
      high = max(max(high, max(key.x, key.y)), max(key.z, key.w));
    }
    spread(low, high);
    const float expected = 4.f * static_cast<float>(sampled) *
                           static_cast<float>(slots) / static_cast<float>(size);
    const int rank = min(
        4 * sampled, static_cast<int>(expected + 4.f * sqrtf(expected) + 4.f));
    const Bound bound = find(4 * sampled, rank, low, high, false);
    __syncthreads();  // the sample is not needed any more
    return score_of(bound.key);
  }

  /// Lists in order the places and scores of what is not less than `least`, and
  /// counts it: past kMost, where the list ends. A warp takes 512 neighbours.
  __device__ int collect(const float* row, Window window, float least) {
    constexpr int kRound = kThreads * 16;
    const auto size = static_cast<uint32_t>(window.size());
    int found = 0;
    float4 next[4];
    const int mine = warp * 512 + lane * 4;
    const auto load = [&](int from) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        next[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (from + mine + j * 128 < window.end) {
          next[j] = __ldcg(
              reinterpret_cast<const float4*>(row + from + mine + j * 128));
        }
      }
    };
    load(window.first & ~3);
    for (int from = window.first & ~3; from < window.end; from += kRound) {
      float4 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = next[j];
      load(from + kRound);  // it is on the way meanwhile
      uint32_t taken = 0;   // bit 4 * j + e
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // A NaN is not less.
        if (!(x[j].x < least)) taken |= 1u << (4 * j);
        if (!(x[j].y < least)) taken |= 2u << (4 * j);
        if (!(x[j].z < least)) taken |= 4u << (4 * j);
        if (!(x[j].w < least)) taken |= 8u << (4 * j);
      }
      if (from < window.first || from + kRound > window.end) {
        const int i = from + mine - window.first;
#pragma unroll
        for (int bit = 0; bit < 16; ++bit) {
          if (static_cast<uint32_t>(i + bit / 4 * 128 + bit % 4) >= size) {
            taken &= ~(1u << bit);
          }
        }
      }
      uint32_t counts = 0;  // a byte each: 128 of a warp fit
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        counts |= __popc(taken >> (4 * j) & 15) << (8 * j);
      }
      uint32_t sum = sum_in_warp(counts);
      const uint32_t total = __shfl_sync(~0u, sum, 31);
      sum -= counts;
      const uint32_t pairs = (total & 0xff00ff) + (total >> 8 & 0xff00ff);
      uint32_t all;
      const uint32_t before =
          before_warp((pairs & 0xffff) + (pairs >> 16), all);
      // Where the first of each byte goes.
      uint32_t at[4];
      at[0] = found + before;
      at[1] = at[0] + (total & 255);
      at[2] = at[1] + (total >> 8 & 255);
      at[3] = at[2] + (total >> 16 & 255);
      found += static_cast<int>(all);
      if (found > Plan::kMost) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t to = at[j] + (sum >> (8 * j) & 255);
        const float score[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (taken >> (4 * j + e) & 1) {
            shared.key[to] = __float_as_uint(score[e]);
            shared.place[to] = from + mine + j * 128 + e;
            ++to;
          }
        }
      }
    }
    __syncthreads();
    return found;
  }

  /// Puts keys of scores into shared memory.
  template <class ScoreAt>
  __device__ void bring(int size, uint32_t& low, uint32_t& high,
                        const ScoreAt& score_at) {
    low = ~0u, high = 0;
#pragma unroll 4
    for (int i = thread; i < size; i += kThreads) {
      const uint32_t key = ordered(score_at(i));
      shared.key[i] = key;
      low = min(low, key);
      high = max(high, key);
    }
    spread(low, high);
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
      uint32_t all;
      const uint32_t ahead =
          before_warp(__shfl_sync(~0u, with, 31), all) + with - counts;
      uint32_t greater = above + (ahead & 0xffff);
      uint32_t ties = equal + (ahead >> 16);
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
      above += all & 0xffff;
      equal += all >> 16;
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
    uint32_t low, high;
    const auto key_at = [&](int i) { return shared.key[i]; };
    if (size <= Plan::kMost) {
      const auto place_at = [&](int i) { return window.first + i; };
      bring(size, low, high,
            [&](int i) { return __ldcg(row + window.first + i); });
      emit(size, find(size, slots, low, high, true), indices, scores, key_at,
           place_at);
      return;
    }
    int found = 0;
    if (slots <= Plan::kMost / 2) {
      found = collect(row, window, guess(row, window, slots));
    }
    if (found >= slots && found <= Plan::kMost) {
      const auto place_at = [&](int i) { return shared.place[i]; };
      bring(found, low, high,
            [&](int i) { return __uint_as_float(shared.key[i]); });
      emit(found, find(found, slots, low, high, true), indices, scores, key_at,
           place_at);
    } else {
      // Too many look alike: the whole row is read for each digit.
      const auto far_key_at = [&](int i) {
        return ordered(__ldcg(row + window.first + i));
      };
      const Bound bound = find_by_digits<true>(size, slots, 0, ~0u, far_key_at);
      emit(size, bound, indices, scores, far_key_at,
           [&](int i) { return window.first + i; });
    }
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    top_keys_kernel(const __grid_constant__ TopKeysParams params) {
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

}  // namespace longspan
