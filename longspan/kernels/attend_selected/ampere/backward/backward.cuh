#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "longspan/kernels/attend_selected/ampere/listed_keys.cuh"

namespace longspan::ampere {

/// A block of eight warps takes one query and up to kHeads of its heads, and
/// keys in tiles of kKeys. Per tile the warps first share out the scores and
/// their derivatives, then the channels of dq, which they hold in registers,
/// then those of the keys' derivative, which they add to device memory. While
/// they do that the next keys arrive.
template <int kHeads_, int kKeys_, int kMostChannels_>
struct BackwardPlan {
  static constexpr int kHeads = kHeads_, kKeys = kKeys_;
  static constexpr int kMostChannels = kMostChannels_;
  static constexpr int kThreads = 256, kWarps = 8;
  static constexpr int kBlocksAtOnce = kMostChannels <= 256 ? 2 : 1;
  static constexpr int kRowTiles = kHeads / 16;
  static constexpr int kGroups = (kMostChannels / 16 + kWarps - 1) / kWarps;
  // Scores: a warp has 16 heads and so many keys.
  static constexpr int kScored = std::max(8, kKeys* kRowTiles / kWarps);
  static constexpr int kScoredTiles = kScored / 8;
  // The keys' derivative: 32 keys and 32 channels at a time.
  static constexpr int kKeyParts = kKeys / 32;
  // Whether weights stay in registers meanwhile.
  static constexpr bool kHolds = kBlocksAtOnce == 1;
  static constexpr int kPitch = kKeys + 8;  // of weights

  static size_t shared_bytes(int head_dim, int value_dim) {
    return (size_t{kHeads} * (row_pitch(head_dim) + row_pitch(value_dim)) +
            size_t{kKeys} * row_pitch(head_dim) + 2 * kHeads * kPitch) *
               2 +
           TileWalk<kKeys>::kRing * sizeof(int32_t);
  }
};

/// Adds 32 channels of four keys (a lane's values are those of one of them):
/// v[b] belongs to channel 8 b + lane / 4. Lanes swap values until each has
/// four channels that follow each other and eight lanes add 128 bytes; channels
/// past `channels` are left out. Ampere adds single floats, 32 bytes of a key
/// by eight lanes.
__device__ __forceinline__ void add_channels(float (&v)[4], float* to,
                                             int channels, int lane) {
  const int place = lane / 4;
#if __CUDA_ARCH__ >= 900
  const bool odd = place & 1, high = place & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float x = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 4);
    v[i] = odd ? x : v[i];
    v[i + 1] = odd ? v[i + 1] : x;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 8);
    v[i] = high ? x : v[i];
    v[i + 2] = high ? v[i + 2] : x;
  }
  const int channel = place % 4 * 8 + place / 4 * 4;
  if (channel < channels) {
    asm volatile(
        "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + channel),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
        : "memory");
  }
#else
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (8 * b < channels) {
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 8 * b + place),
                   "f"(v[b])
                   : "memory");
    }
  }
#endif
}

/// What the steps of a block share.
template <class Plan, class Element>
struct Backward {
  const SelectedBackwardArgs& args;
  const BlockItem item;
  const int pitch, depth, value_pitch, value_depth;
  const int warp, lane;
  Element *query, *dout, *keys, *weights, *dscores;
  int32_t* slots;  // of tiles

  /// Derivatives of scores are kept so many times as great.
  static constexpr bool kScales = std::is_same_v<Element, __half>;
  float factor = 1.f, inverse = 1.f;

  __device__ Backward(const SelectedBackwardArgs& args, void* memory)
      : args(args),
        item(args, Plan::kHeads),
        pitch(row_pitch(args.head_dim)),
        depth(row_depth(args.head_dim)),
        value_pitch(row_pitch(args.value_dim)),
        value_depth(row_depth(args.value_dim)),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        query(static_cast<Element*>(memory)) {
    dout = query + Plan::kHeads * pitch;
    keys = dout + Plan::kHeads * value_pitch;
    weights = keys + Plan::kKeys * pitch;
    dscores = weights + Plan::kHeads * Plan::kPitch;
    slots = reinterpret_cast<int32_t*>(dscores + Plan::kHeads * Plan::kPitch);
  }

  /// Finds the factor from dout, when it is there.
  __device__ void choose_factor() {
    float greatest = 0.f;
    for (int i = threadIdx.x; i < Plan::kHeads * value_pitch;
         i += Plan::kThreads) {
      if (i % value_pitch >= value_depth) continue;
      greatest = fmaxf(greatest, fabsf(static_cast<float>(dout[i])));
    }
    factor = scale_to(0, block_max<Plan::kWarps>(
                             greatest, reinterpret_cast<float*>(weights)));
    inverse = 1.f / factor;
  }

  /// Weights and the derivatives of scores, in shared memory. `lse` is infinite
  /// for heads that pass no gradient.
  __device__ void score(const int32_t* tile, const float (&lse)[2],
                        const float (&delta)[2], float log2_scale) const {
    constexpr int kTiles = Plan::kScoredTiles;
    const int head = warp % Plan::kRowTiles * 16;
    const int first = warp / Plan::kRowTiles * Plan::kScored;
    if (first >= Plan::kKeys) return;
    float score[kTiles][4] = {}, dweight[kTiles][4] = {};
    const int at_row = head + lane % 16, at_channel = lane / 16 * 8;
    const Element* q = query + at_row * pitch + at_channel;
    const Element* o = dout + at_row * value_pitch + at_channel;
    const Element* k =
        KeyOperand<kTiles>::place(keys + first * pitch, pitch, lane);
    int c = 0;
#pragma unroll 2
    for (; c < value_depth; c += 32) {
      const KeyOperand<kTiles> key(k + c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4], d[4];
        load_tiles(a, q + c + 16 * i);
        load_tiles(d, o + c + 16 * i);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          multiply<Element>(score[n], a, key.b[i][n][0], key.b[i][n][1]);
          multiply<Element>(dweight[n], d, key.b[i][n][0], key.b[i][n][1]);
        }
      }
    }
    for (; c < depth; c += 32) {
      const KeyOperand<kTiles> key(k + c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        load_tiles(a, q + c + 16 * i);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          multiply<Element>(score[n], a, key.b[i][n][0], key.b[i][n][1]);
        }
      }
    }
    const float scale = static_cast<float>(args.scale) * factor;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int j = first + 8 * n + lane % 4 * 2;
      const bool there[2] = {tile[j] >= 0, tile[j + 1] >= 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float p[2], ds[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 2 * half + e;
          p[e] = there[e] && lse[half] != INFINITY
                     ? exp2_fast(fmaf(score[n][i], log2_scale, -lse[half]))
                     : 0.f;
          // A weight of 0 moves nothing, whatever lies there.
          ds[e] =
              p[e] == 0.f ? 0.f : p[e] * (dweight[n][i] - delta[half]) * scale;
        }
        const int place = (head + lane / 4 + 8 * half) * Plan::kPitch + j;
        *reinterpret_cast<uint32_t*>(weights + place) =
            packed<Element>(p[0], p[1]);
        *reinterpret_cast<uint32_t*>(dscores + place) =
            packed<Element>(ds[0], ds[1]);
      }
    }
  }

  /// Every eighth 16 channels of dq.
  __device__ void add_dq(float (&dq)[Plan::kGroups][Plan::kRowTiles][8]) const {
    const Element* a_from = dscores + lane % 16 * Plan::kPitch + lane / 16 * 8;
    const Element* b_from = keys + lane % 16 * pitch + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < Plan::kKeys; k += 16) {
      uint32_t a[Plan::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Plan::kRowTiles; ++m) {
        load_tiles(a[m], a_from + 16 * m * Plan::kPitch + k);
      }
#pragma unroll
      for (int g = 0; g < Plan::kGroups; ++g) {
        const int channel = (g * Plan::kWarps + warp) * 16;
        if (channel >= depth) break;
        uint32_t b[4];
        load_turned_tiles(b, b_from + k * pitch + channel);
#pragma unroll
        for (int m = 0; m < Plan::kRowTiles; ++m) {
          multiply<Element>(dq[g][m], a[m], b[0], b[1]);
          multiply<Element>(dq[g][m] + 4, a[m], b[2], b[3]);
        }
      }
    }
  }

  /// d[m][n] += channels from 16 m on of `rows`, turned, times keys from 8 n on
  /// of `heads`.
  __device__ void multiply_turned(
      float (&d)[2][4][4], const Element* rows, int pitch_of_rows,
      const uint32_t (&heads)[Plan::kRowTiles][2][4]) const {
#pragma unroll
    for (int h = 0; h < Plan::kRowTiles; ++h) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t a[4];
        load_turned_tiles(
            a, rows + (16 * h + lane % 8 + lane / 16 * 8) * pitch_of_rows +
                   16 * m + lane / 8 % 2 * 8);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          multiply<Element>(d[m][n], a, heads[h][n / 2][n % 2 * 2],
                            heads[h][n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }

  /// 32 keys and some channels of the keys' derivative.
  __device__ void add_dkv(const int32_t* tile, float* dkv) const {
    const int part = warp % Plan::kKeyParts * 32;
    uint32_t s[Plan::kRowTiles][2][4], p[Plan::kRowTiles][2][4];
    const auto load = [&](uint32_t(&x)[Plan::kRowTiles][2][4],
                          const Element* from) {
#pragma unroll
      for (int h = 0; h < Plan::kRowTiles; ++h) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          load_turned_tiles(x[h][n], from +
                                         (16 * h + lane % 16) * Plan::kPitch +
                                         part + 16 * n + lane / 16 * 8);
        }
      }
    };
    if constexpr (Plan::kHolds) {
      load(s, dscores);
      load(p, weights);
    }
    constexpr int kStep = Plan::kWarps / Plan::kKeyParts * 32;
    for (int c = warp / Plan::kKeyParts * 32; c < depth; c += kStep) {
      float d[2][4][4] = {};
      if constexpr (!Plan::kHolds) load(s, dscores);
      multiply_turned(d, query + c, pitch, s);
      if constexpr (kScales) {
#pragma unroll
        for (int i = 0; i < 32; ++i) d[i / 16][i / 4 % 4][i % 4] *= inverse;
      }
      if (c < value_depth) {
        if constexpr (!Plan::kHolds) load(p, weights);
        multiply_turned(d, dout + c, value_pitch, p);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int32_t key = tile[part + i / 2 * 8 + lane % 4 * 2 + i % 2];
        float v[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) v[b] = d[b / 2][i / 2][b % 2 * 2 + i % 2];
        add_channels(v, dkv + key * args.dkv.token_stride + c,
                     key >= 0 ? args.head_dim - c : 0, lane);
      }
    }
  }

  __device__ void store_dq(
      const float (&dq)[Plan::kGroups][Plan::kRowTiles][8]) const {
    auto* to = item.template of_query<Element>(args.dq);
#pragma unroll
    for (int m = 0; m < Plan::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = 16 * m + lane / 4 + 8 * half;
        if (head >= item.heads) continue;
        Element* row = to + head * args.dq.head_stride;
#pragma unroll
        for (int g = 0; g < Plan::kGroups; ++g) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const int channel =
                (g * Plan::kWarps + warp) * 16 + part * 8 + lane % 4 * 2;
            if (channel >= args.head_dim) continue;
            const float* value = dq[g][m] + 4 * part + 2 * half;
            *reinterpret_cast<uint32_t*>(row + channel) =
                packed<Element>(value[0] * inverse, value[1] * inverse);
          }
        }
      }
    }
  }
};

template <class Plan, class Element>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocksAtOnce)
    backward_kernel(const __grid_constant__ SelectedBackwardArgs args) {
  extern __shared__ __align__(16) uint8_t memory[];
  constexpr float kLog2e = 1.4426950408889634f;
  Backward<Plan, Element> block(args, memory);
  const BlockItem& item = block.item;
  fetch_heads<Plan::kThreads, Plan::kHeads>(block.query, args.head_dim, args.q,
                                            item, item.heads);
  fetch_heads<Plan::kThreads, Plan::kHeads>(block.dout, args.value_dim,
                                            args.dout, item, item.heads);
  if constexpr (block.kScales) {
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    block.choose_factor();
  }
  float lse[2], delta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = block.warp % Plan::kRowTiles * 16 + block.lane / 4 + 8 * i;
    lse[i] = INFINITY;
    delta[i] = 0.f;
    if (head >= item.heads) continue;
    lse[i] = item.of_query<const float>(args.lse)[head * args.lse.head_stride];
    delta[i] =
        item.of_query<const float>(args.delta)[head * args.delta.head_stride];
    lse[i] = isinf(lse[i]) ? INFINITY : lse[i] * kLog2e;
  }
  const auto* kv = item.of_keys<const Element>(args.kv);
  float* dkv = item.of_keys<float>(args.dkv);
  const float log2_scale = static_cast<float>(args.scale) * kLog2e;
  float dq[Plan::kGroups][Plan::kRowTiles][8] = {};

  TileWalk<Plan::kKeys> walk(item.list(args), args, block.slots);
  const auto fetch = [&](const int32_t* tile) {
    fetch_keys<Plan::kThreads, Plan::kKeys>(block.keys, args, kv, tile);
  };
  const int32_t* tile = walk.next();
  if (tile != nullptr) fetch(tile);
  while (tile != nullptr) {
    const int32_t* const upcoming = walk.next();
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    block.score(tile, lse, delta, log2_scale);
    __syncthreads();
    block.add_dq(dq);
    __syncthreads();
    if (upcoming != nullptr) fetch(upcoming);
    block.add_dkv(tile, dkv);
    tile = upcoming;
  }
  // A block without keys still waits for what it fetches.
  copies_commit();
  copies_wait<0>();
  block.store_dq(dq);
}

}  // namespace longspan::ampere
