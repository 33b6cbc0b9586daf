#pragma once

#include <cstdint>

#include "longspan/kernels/select_keys/ampere/checks.h"
#include "longspan/kernels/select_keys/ampere/key_scores.cuh"
#include "longspan/kernels/select_keys/ampere/listed_tiles.cuh"
#include "longspan/kernels/select_keys/ampere/score_backward/add_rows.cuh"
#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::ampere {

/// A block takes one query and up to kHeads of its heads, and its keys in tiles
/// of 64. Each of four warps scores 16 of the keys, finds the derivatives of
/// the products and from them that of its keys, which it adds to device memory;
/// it holds a quarter of dq's channels, for which warps trade the derivatives
/// of products through shared memory. The next tile is fetched while dk is made
/// and added; three or four blocks of a processor hide the rest.
///
/// Per tile at 32 heads of 128 channels: 1.6 MFLOP are 600 to 800 cycles, some
/// 130 KB of shared memory 1000. The 32768 bytes that are added take 2200 in
/// L2, and are the bound.
template <class Element, int kDepth, int kHeads>
struct ScoreBackwardPlan {
  static constexpr int kThreads = 128, kKeys = 64;
  static constexpr int kTile = kKeys * kPitch<kDepth>;
  static constexpr int kDproductPitch = kHeads + 8;

  struct Shared {
    alignas(16) Element tile[kTile];
    alignas(16) Element query[kHeads * kPitch<kDepth>];
    alignas(16) Element turned[kHeads * kPitch<kDepth>];  // see add_rows.cuh
    alignas(16) Element dproduct[kKeys * kDproductPitch];
    alignas(16) float weight[kHeads];
    int32_t key[3][kKeys];  // of this tile and the next two
    float dscore[3][kKeys];
    float sums[4][kHeads];
    uint8_t live[kMarkedTiles];
  };
};

template <class Element, int kDepth, int kHeads>
__global__ void __launch_bounds__(128, kDepth > 128  ? 2
                                       : kHeads > 32 ? 3
                                                     : 4)
    score_backward_kernel(
        const __grid_constant__ ScoreSelectedBackwardArgs args) {
  using Plan = ScoreBackwardPlan<Element, kDepth, kHeads>;
  constexpr int kThreads = Plan::kThreads, kKeys = Plan::kKeys;
  constexpr int kRow = kPitch<kDepth>;
  constexpr bool kScaled = std::is_same_v<Element, __half>;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Plan::Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int dim = args.head_dim;

  const int64_t groups = (args.heads + kHeads - 1) / kHeads;
  int64_t item = blockIdx.x;
  const int64_t head_0 = item % groups * kHeads;
  item /= groups;
  const int64_t row = item % args.rows;
  // Later queries have longer lists and go first.
  const int64_t token = args.queries - 1 - item / args.rows;
  const int heads = static_cast<int>(min(int64_t{kHeads}, args.heads - head_0));

  const auto* q = static_cast<const Element*>(args.q.data) +
                  row * args.q.row_stride + token * args.q.token_stride +
                  head_0 * args.q.head_stride;
  const RowCopies<kThreads, kDepth, Element> heads_of_q(q, args.q.head_stride,
                                                        dim);
  heads_of_q.template tile<kHeads>(shared.query,
                                   [&](int i) { return i < heads ? i : -1; });
  copies_commit();
  if (thread < kHeads) {
    shared.weight[thread] =
        thread < heads
            ? static_cast<const float*>(
                  args.weights
                      .data)[row * args.weights.row_stride +
                             token * args.weights.token_stride +
                             (head_0 + thread) * args.weights.head_stride]
            : 0.f;
  }
  const ListedTiles<kThreads, kKeys> list(
      args.indices.data + row * args.indices.row_stride +
          token * args.indices.token_stride,
      static_cast<int>(args.slots), static_cast<int>(args.keys), shared.live,
      [](int) {});
  const float* dscores = static_cast<const float*>(args.dscores.data) +
                         row * args.dscores.row_stride +
                         token * args.dscores.token_stride;
  copies_wait<0>();
  __syncthreads();
  turn_channels<kThreads, kDepth, kHeads>(shared.turned, shared.query);
  float scale = 1.f;
  if constexpr (kScaled) {
    float greatest = 0.f;
    for (int slot = thread; slot < list.slots; slot += kThreads) {
      if (list.key_at(slot) >= 0) {
        greatest = fmaxf(greatest, fabsf(dscores[slot]));
      }
    }
    float weight = thread < kHeads ? fabsf(shared.weight[thread]) : 0.f;
    greatest = block_max<4>(greatest, shared.sums[0]);
    scale = scale_to(12, greatest * block_max<4>(weight, shared.sums[0]));
  }
  const float inverse = 1.f / scale;

  const RowCopies<kThreads, kDepth, Element> rows(
      static_cast<const Element*>(args.k.data) + row * args.k.row_stride,
      args.k.token_stride, dim);
  // Half of the threads look up keys, the other half their derivatives.
  const auto look = [&](int tile) {
    const int slot = tile * kKeys + thread % kKeys;
    if (thread < kKeys) return __int_as_float(list.key_at(slot));
    return slot < list.slots ? __ldg(dscores + slot) : 0.f;
  };
  const auto note = [&](int turn, float seen) {
    if (thread < kKeys) {
      shared.key[turn % 3][thread] = __float_as_int(seen);
    } else {
      shared.dscore[turn % 3][thread - kKeys] = seen;
    }
  };
  const auto fetch = [&](int turn) {
    const int32_t* key = shared.key[turn % 3];
    rows.template tile<kKeys>(shared.tile, [&](int i) { return key[i]; });
    copies_commit();
  };
  float* dk = static_cast<float*>(args.dk.data) + row * args.dk.row_stride;

  constexpr int kChannels = kDepth / 4;  // of dq, in a warp
  float dq[kHeads / 16][kChannels / 8][4] = {};
  float dweight[kHeads / 8][2] = {};
  int tile = list.after(-1), next = list.after(tile);
  note(0, look(tile));
  note(1, look(next));
  __syncthreads();
  if (tile < list.tiles) fetch(0);
  for (int turn = 0; tile < list.tiles; ++turn) {
    copies_wait<0>();
    __syncthreads();
    const int later = list.after(next);
    const float seen = look(later);
    const Element* keys = shared.tile;

    // Products of 16 keys and all heads.
    float product[kHeads / 8][4] = {};
    const Element* a_from =
        keys + (warp * 16 + lane % 16) * kRow + lane / 16 * 8;
    const Element* b_from =
        shared.query + (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 8;
#pragma unroll
    for (int c = 0; c < kDepth; c += 16) {
      uint32_t a[4];
      load_tiles(a, a_from + c);
#pragma unroll
      for (int h = 0; h < kHeads / 16; ++h) {
        uint32_t b[4];
        load_tiles(b, b_from + 16 * h * kRow + c);
        multiply<Element>(product[2 * h], a, b[0], b[1]);
        multiply<Element>(product[2 * h + 1], a, b[2], b[3]);
      }
    }

    // Their derivatives, and those of weights.
    uint32_t dproduct[kHeads / 16][4];
    float dscore[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = warp * 16 + lane / 4 + 8 * i;
      dscore[i] = shared.key[turn % 3][place] >= 0
                      ? shared.dscore[turn % 3][place]
                      : 0.f;
    }
#pragma unroll
    for (int h = 0; h < kHeads / 8; ++h) {
      const auto weight = *reinterpret_cast<const float2*>(
          shared.weight + 8 * h + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float d[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = product[h][2 * i + e];
          dweight[h][e] = fmaf(positive_part(x), dscore[i], dweight[h][e]);
          d[e] = x <= 0.f ? 0.f : dscore[i] * (e == 0 ? weight.x : weight.y);
          if constexpr (kScaled) d[e] *= scale;
        }
        const uint32_t two = packed<Element>(d[0], d[1]);
        dproduct[h / 2][h % 2 * 2 + i] = two;
        *reinterpret_cast<uint32_t*>(shared.dproduct +
                                     (warp * 16 + lane / 4 + 8 * i) *
                                         Plan::kDproductPitch +
                                     8 * h + lane % 4 * 2) = two;
      }
    }
    __syncthreads();

    // A quarter of the channels of dq, from all keys of the tile.
    const Element* d_from = shared.dproduct +
                            (lane % 8 + lane / 16 * 8) * Plan::kDproductPitch +
                            lane / 8 % 2 * 8;
    const Element* k_from =
        keys + (lane % 16) * kRow + warp * kChannels + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < kKeys; j += 16) {
      uint32_t a[kHeads / 16][4];
#pragma unroll
      for (int h = 0; h < kHeads / 16; ++h) {
        load_turned_tiles(a[h], d_from + j * Plan::kDproductPitch + 16 * h);
      }
#pragma unroll
      for (int c = 0; c < kChannels / 16; ++c) {
        uint32_t b[4];
        load_turned_tiles(b, k_from + j * kRow + 16 * c);
#pragma unroll
        for (int h = 0; h < kHeads / 16; ++h) {
          multiply<Element>(dq[h][2 * c], a[h], b[0], b[1]);
          multiply<Element>(dq[h][2 * c + 1], a[h], b[2], b[3]);
        }
      }
    }
    __syncthreads();
    if (next < list.tiles) fetch(turn + 1);

    // dk of 16 keys, 32 channels at a time.
    const KeyPlaces places(shared.key[turn % 3] + warp * 16, dk,
                           args.dk.token_stride, lane);
    const Element* q_from = shared.turned + (lane % 16) * kRow + lane / 16 * 8;
#pragma unroll
    for (int c = 0; c < kDepth; c += 32) {
      if (c >= dim) break;
      float d[2][8] = {};
#pragma unroll
      for (int h = 0; h < kHeads / 16; ++h) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t b[4];
          load_turned_tiles(b, q_from + 16 * h * kRow + c + 16 * part);
          multiply<Element>(d[part], dproduct[h], b[0], b[1]);
          multiply<Element>(d[part] + 4, dproduct[h], b[2], b[3]);
        }
      }
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < 16; ++i) d[i / 8][i % 8] *= inverse;
      }
      places.add(d, c, dim, lane);
    }
    note(turn + 2, seen);
    tile = next;
    next = later;
  }

  // Each warp has summed over its own keys.
#pragma unroll
  for (int h = 0; h < kHeads / 8; ++h) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = dweight[h][e];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
      }
      if (lane < 4) shared.sums[warp][8 * h + lane * 2 + e] = sum;
    }
  }
  __syncthreads();
  if (thread < heads) {
    static_cast<float*>(
        args.dweights.data)[row * args.dweights.row_stride +
                            token * args.dweights.token_stride +
                            (head_0 + thread) * args.dweights.head_stride] =
        (shared.sums[0][thread] + shared.sums[1][thread]) +
        (shared.sums[2][thread] + shared.sums[3][thread]);
  }
  auto* to = static_cast<Element*>(args.dq.data) + row * args.dq.row_stride +
             token * args.dq.token_stride + head_0 * args.dq.head_stride +
             warp * kChannels + lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < kHeads / 16; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 16 * h + lane / 4 + 8 * i;
      if (head >= heads) continue;
#pragma unroll
      for (int c = 0; c < kChannels / 8; ++c) {
        if (warp * kChannels + 8 * c >= dim) break;
        *reinterpret_cast<uint32_t*>(to + head * args.dq.head_stride + 8 * c) =
            packed<Element>(dq[h][c][2 * i] * inverse,
                            dq[h][c][2 * i + 1] * inverse);
      }
    }
  }
}

template <class Element, int kDepth, int kHeads>
cudaError_t launch_score_backward(const ScoreSelectedBackwardArgs& args,
                                  cudaStream_t stream) {
  using Plan = ScoreBackwardPlan<Element, kDepth, kHeads>;
  return launch(score_backward_kernel<Element, kDepth, kHeads>,
                args.rows * args.queries * ((args.heads + kHeads - 1) / kHeads),
                Plan::kThreads, sizeof(typename Plan::Shared), stream, args);
}

template <class Element, int kDepth>
cudaError_t launch_score_backward(const ScoreSelectedBackwardArgs& args,
                                  cudaStream_t stream) {
  if (args.heads <= 16) {
    return launch_score_backward<Element, kDepth, 16>(args, stream);
  }
  if constexpr (kDepth <= 128) {
    if (args.heads > 32) {
      return launch_score_backward<Element, kDepth, 64>(args, stream);
    }
  }
  return launch_score_backward<Element, kDepth, 32>(args, stream);
}

template <class Element>
cudaError_t launch_score_backward(const ScoreSelectedBackwardArgs& args,
                                  cudaStream_t stream) {
  if (args.head_dim <= 64) {
    return launch_score_backward<Element, 64>(args, stream);
  }
  return args.head_dim <= 128
             ? launch_score_backward<Element, 128>(args, stream)
             : launch_score_backward<Element, 256>(args, stream);
}

}  // namespace longspan::ampere
