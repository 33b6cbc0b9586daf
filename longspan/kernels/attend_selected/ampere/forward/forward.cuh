#pragma once

#include <cstdint>

#include "longspan/kernels/attend_selected/ampere/listed_keys.cuh"

namespace longspan::ampere {

/// A block takes one query and up to kHeads of its heads, and keys in tiles of
/// 64. Of 16 heads four warps take care: each scores a quarter of a tile and
/// holds every fourth 16 channels of the output.
template <int kHeads_, int kMostValues_>
struct ForwardPlan {
  static constexpr int kHeads = kHeads_, kMostValues = kMostValues_;
  static constexpr int kKeys = 64, kThreads = kHeads * 8;
  static constexpr int kBlocksAtOnce = kMostValues <= 256 ? 768 / kThreads : 1;
  static constexpr int kGroups = (kMostValues / 16 + 3) / 4;  // of a warp
  static constexpr int kScored = kKeys / 4, kScoredTiles = kScored / 8;
  static constexpr int kPitch = kKeys + 8;  // of weights

  static size_t shared_bytes(int head_dim) {
    return (size_t{kHeads + kKeys} * row_pitch(head_dim) + kHeads * kPitch) *
               2 +
           2 * 4 * kHeads * sizeof(float) +
           TileWalk<kKeys>::kRing * sizeof(int32_t);
  }
};

/// Four warps with the same 16 heads meet.
template <class Plan>
__device__ __forceinline__ void meet_four(int number) {
  if constexpr (Plan::kHeads == 16) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, 128;" ::"r"(number + 1) : "memory");
  }
}

template <class Plan, class Element>
struct Forward {
  const SelectedForwardArgs& args;
  const BlockItem item;
  const int pitch, depth;
  const int lane, four, part;  // which four warps, and which of them
  Element *query, *keys, *weights;
  float *highs, *sums;
  int32_t* slots;  // of tiles
  float out[Plan::kGroups][8] = {};
  float high[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};

  __device__ Forward(const SelectedForwardArgs& args, void* memory)
      : args(args),
        item(args, Plan::kHeads),
        pitch(row_pitch(args.head_dim)),
        depth(row_depth(args.head_dim)),
        lane(static_cast<int>(threadIdx.x) % 32),
        four(static_cast<int>(threadIdx.x) / 128),
        part(static_cast<int>(threadIdx.x) / 32 % 4) {
    query = static_cast<Element*>(memory);
    keys = query + Plan::kHeads * pitch;
    weights = keys + Plan::kKeys * pitch;
    highs = reinterpret_cast<float*>(weights + Plan::kHeads * Plan::kPitch);
    sums = highs + 4 * Plan::kHeads;
    slots = reinterpret_cast<int32_t*>(sums + 4 * Plan::kHeads);
    // Those of the four.
    query += four * 16 * pitch;
    weights += four * 16 * Plan::kPitch;
    highs += four * 64;
    sums += four * 64;
  }

  /// A quarter of the keys: weights relative to the greatest score so far, in
  /// powers of two.
  __device__ void score(const int32_t* tile, float log2_scale) {
    constexpr int kTiles = Plan::kScoredTiles;
    const int first = part * Plan::kScored;
    float score[kTiles][4] = {};
    const Element* q = query + lane % 16 * pitch + lane / 16 * 8;
    const Element* k =
        KeyOperand<kTiles>::place(keys + first * pitch, pitch, lane);
#pragma unroll 2
    for (int c = 0; c < depth; c += 32) {
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
    float greatest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = first + 8 * n + lane % 4 * 2 + i % 2;
        score[n][i] = tile[j] >= 0 ? score[n][i] * log2_scale : -INFINITY;
        greatest[i / 2] = fmaxf(greatest[i / 2], score[n][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      greatest[i] = quad_max(greatest[i]);
      if (lane % 4 == 0) highs[part * 16 + lane / 4 + 8 * i] = greatest[i];
    }
    meet_four<Plan>(four);
    float factor[2], shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float to = high[i];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        to = fmaxf(to, highs[w * 16 + lane / 4 + 8 * i]);
      }
      factor[i] = to == high[i] ? 1.f : exp2_fast(high[i] - to);
      shift[i] = to == -INFINITY ? 0.f : to;
      high[i] = to;
      sum[i] *= factor[i];
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weight[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weight[e] = exp2_fast(score[n][2 * half + e] - shift[half]);
          sum[half] += weight[e];
        }
        *reinterpret_cast<uint32_t*>(
            weights + (lane / 4 + 8 * half) * Plan::kPitch + first + 8 * n +
            lane % 4 * 2) = packed<Element>(weight[0], weight[1]);
      }
    }
#pragma unroll
    for (int g = 0; g < Plan::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out[g][i] *= factor[i / 2 % 2];
    }
    meet_four<Plan>(four);
  }

  /// Every fourth 16 channels.
  __device__ void add() {
#pragma unroll
    for (int k = 0; k < Plan::kKeys; k += 16) {
      uint32_t a[4];
      load_tiles(a, weights + lane % 16 * Plan::kPitch + k + lane / 16 * 8);
      const Element* b_row = keys + (k + lane % 16) * pitch + lane / 16 * 8;
#pragma unroll
      for (int g = 0; g < Plan::kGroups; ++g) {
        const int channel = (g * 4 + part) * 16;
        if (channel >= args.value_dim) break;
        uint32_t b[4];
        load_turned_tiles(b, b_row + channel);
        multiply<Element>(out[g], a, b[0], b[1]);
        multiply<Element>(out[g] + 4, a, b[2], b[3]);
      }
    }
  }

  __device__ void store() {
    constexpr float kLn2 = 0.6931471805599453f;
    constexpr float kLog2e = 1.4426950408889634f;
    // Each warp has summed over its own keys.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = quad_sum(sum[i]);
      if (lane % 4 == 0) sums[part * 16 + lane / 4 + 8 * i] = sum[i];
    }
    meet_four<Plan>(four);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i, head = four * 16 + row;
      if (head >= item.heads) continue;
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < 4; ++w) total += sums[w * 16 + row];
      const bool empty = total == 0.f;  // NaN where a score is
      if (part == 0 && lane % 4 == 0) {
        item.template of_query<float>(args.lse)[head * args.lse.head_stride] =
            empty ? -INFINITY : high[i] * kLn2 + logf(total);
      }
      if (args.sink != nullptr) {
        const float sink =
            static_cast<const float*>(args.sink)[item.head + head];
        total += exp2f(sink * kLog2e - high[i]);
      }
      const float inverse = empty ? 0.f : 1.f / total;
      auto* to = item.template of_query<Element>(args.out) +
                 head * args.out.head_stride;
#pragma unroll
      for (int g = 0; g < Plan::kGroups; ++g) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const int channel = (g * 4 + part) * 16 + p * 8 + lane % 4 * 2;
          if (channel >= args.value_dim) continue;
          const float* value = out[g] + 4 * p + 2 * i;
          to[channel] = narrowed<Element>(value[0] * inverse);
          to[channel + 1] = narrowed<Element>(value[1] * inverse);
        }
      }
    }
  }
};

template <class Plan, class Element>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocksAtOnce)
    forward_kernel(const __grid_constant__ SelectedForwardArgs args) {
  extern __shared__ __align__(16) uint8_t memory[];
  constexpr float kLog2e = 1.4426950408889634f;
  Forward<Plan, Element> block(args, memory);
  const BlockItem& item = block.item;
  fetch_heads<Plan::kThreads, Plan::kHeads>(reinterpret_cast<Element*>(memory),
                                            args.head_dim, args.q, item,
                                            item.heads);
  const auto* kv = item.of_keys<const Element>(args.kv);
  const float log2_scale = static_cast<float>(args.scale) * kLog2e;
  TileWalk<Plan::kKeys> walk(item.list(args), args, block.slots);
  const int32_t* tile;
  while ((tile = walk.next()) != nullptr) {
    fetch_keys<Plan::kThreads, Plan::kKeys>(block.keys, args, kv, tile);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    block.score(tile, log2_scale);
    block.add();
  }
  // A block without keys still waits for what it fetches.
  copies_commit();
  copies_wait<0>();
  block.store();
}

}  // namespace longspan::ampere
