#pragma once

#include <cstdint>

#include "longspan/kernels/ampere/tiles.cuh"
#include "longspan/kernels/selected_attention.h"

namespace longspan::ampere {

/// A block of four warps takes one query and 16 of its heads, and keys in tiles
/// of 64. Each warp scores 16 keys of a tile and holds every fourth 16 channels
/// of the output. Rows in shared memory are 16 bytes longer than a multiple of
/// 32, so that eight of them touch all banks.
struct ForwardPlan {
  static constexpr int kThreads = 128, kHeads = 16, kKeys = 64;
  static constexpr int kMostChannels = 576;
  static constexpr int kGroups = kMostChannels / 16 / 4;  // of a warp
  static constexpr int kWeightPitch = kKeys + 8;

  __host__ __device__ static int depth(int head_dim) {
    return (head_dim + 15) / 16 * 16;
  }
  __host__ __device__ static int pitch(int head_dim) {
    return depth(head_dim) + 8;
  }
  static size_t shared_bytes(int head_dim) {
    return (size_t{kHeads + kKeys} * pitch(head_dim) + kHeads * kWeightPitch) *
               2 +
           (2 * 4 * kHeads) * sizeof(float) + kKeys * sizeof(int32_t);
  }
};

template <class Element>
__global__ void __launch_bounds__(ForwardPlan::kThreads)
    forward_kernel(const __grid_constant__ SelectedForwardArgs args) {
  using Plan = ForwardPlan;
  extern __shared__ __align__(16) uint8_t memory[];
  const int dim = args.head_dim, pitch = Plan::pitch(dim);
  const int depth = Plan::depth(dim), values = args.value_dim;
  auto* query = reinterpret_cast<Element*>(memory);
  Element* keys = query + Plan::kHeads * pitch;
  Element* weights = keys + Plan::kKeys * pitch;
  auto* highs =
      reinterpret_cast<float*>(weights + Plan::kHeads * Plan::kWeightPitch);
  float* sums = highs + 4 * Plan::kHeads;
  auto* slots = reinterpret_cast<int32_t*>(sums + 4 * Plan::kHeads);

  const int group_heads = static_cast<int>(args.heads / args.key_heads);
  const int blocks = (group_heads + Plan::kHeads - 1) / Plan::kHeads;
  int64_t item = blockIdx.x;
  const int first = static_cast<int>(item % blocks) * Plan::kHeads;
  item /= blocks;
  const int64_t key_head = item % args.key_heads;
  item /= args.key_heads;
  const int64_t token = item % args.queries, row = item / args.queries;
  const int64_t head_0 = key_head * group_heads + first;
  const int heads = min(Plan::kHeads, group_heads - first);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pieces = depth / 8;
  const auto* q = static_cast<const Element*>(args.q.data) +
                  row * args.q.row_stride + token * args.q.token_stride +
                  head_0 * args.q.head_stride;
  for (int i = thread; i < Plan::kHeads * pieces; i += Plan::kThreads) {
    const int head = i / pieces, c = i % pieces * 8;
    const bool there = head < heads && c < dim;
    copy_16(query + head * pitch + c,
            there ? q + head * args.q.head_stride + c : q, there);
  }
  const auto* kv = static_cast<const Element*>(args.kv.data) +
                   row * args.kv.row_stride + key_head * args.kv.head_stride;
  const int32_t* list = args.indices.data + row * args.indices.row_stride +
                        token * args.indices.token_stride +
                        key_head * args.indices.head_stride;
  const auto scale = static_cast<float>(args.scale);
  float out[Plan::kGroups][8] = {};
  float high[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};

  for (int64_t from = 0; from < args.slots; from += Plan::kKeys) {
    bool any = false;
    if (thread < Plan::kKeys) {
      int32_t key = -1;
      if (from + thread < args.slots) key = list[from + thread];
      if (key < 0 || key >= args.keys) key = -1;
      slots[thread] = key;
      any = key >= 0;
    }
    if (!__syncthreads_or(any)) continue;
    for (int i = thread; i < Plan::kKeys * pieces; i += Plan::kThreads) {
      const int j = i / pieces, c = i % pieces * 8;
      const int32_t key = slots[j];
      const bool there = key >= 0 && c < dim;
      copy_16(keys + j * pitch + c,
              there ? kv + key * args.kv.token_stride + c : kv, there);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // Score 16 keys.
    float score[8] = {};
    const Element* a_from = query + (lane % 16) * pitch + lane / 16 * 8;
    const Element* b_from = keys +
                            (warp * 16 + lane % 8 + lane / 16 * 8) * pitch +
                            lane / 8 % 2 * 8;
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[4], b[4];
      load_tiles(a, a_from + k);
      load_tiles(b, b_from + k);
      multiply<Element>(score, a, b[0], b[1]);
      multiply<Element>(score + 4, a, b[2], b[3]);
    }
    float greatest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = warp * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      score[i] = slots[j] >= 0 ? score[i] * scale : -INFINITY;
      greatest[i / 2 % 2] = fmaxf(greatest[i / 2 % 2], score[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      greatest[i] = quad_max(greatest[i]);
      if (lane % 4 == 0) {
        highs[warp * Plan::kHeads + lane / 4 + 8 * i] = greatest[i];
      }
    }
    __syncthreads();

    // Weights relative to the greatest score so far.
    float factor[2], shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float to = high[i];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        to = fmaxf(to, highs[w * Plan::kHeads + lane / 4 + 8 * i]);
      }
      factor[i] = to == high[i] ? 1.f : expf(high[i] - to);
      shift[i] = to == -INFINITY ? 0.f : to;
      high[i] = to;
      sum[i] *= factor[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int which = i / 2 % 2;
      const float weight = expf(score[i] - shift[which]);
      sum[which] += weight;
      weights[(lane / 4 + 8 * which) * Plan::kWeightPitch + warp * 16 +
              i / 4 * 8 + lane % 4 * 2 + i % 2] = narrowed<Element>(weight);
    }
#pragma unroll
    for (int g = 0; g < Plan::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out[g][i] *= factor[i / 2 % 2];
    }
    __syncthreads();

    // Every fourth 16 channels.
    for (int k = 0; k < Plan::kKeys; k += 16) {
      uint32_t a[4];
      load_tiles(
          a, weights + (lane % 16) * Plan::kWeightPitch + k + lane / 16 * 8);
      const Element* b_row = keys + (k + lane % 16) * pitch + lane / 16 * 8;
#pragma unroll
      for (int g = 0; g < Plan::kGroups; ++g) {
        const int channel = (g * 4 + warp) * 16;
        if (channel >= values) break;
        uint32_t b[4];
        load_turned_tiles(b, b_row + channel);
        multiply<Element>(out[g], a, b[0], b[1]);
        multiply<Element>(out[g] + 4, a, b[2], b[3]);
      }
    }
    __syncthreads();
  }

  // Each warp has summed over its own keys.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] = quad_sum(sum[i]);
    if (lane % 4 == 0) sums[warp * Plan::kHeads + lane / 4 + 8 * i] = sum[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = lane / 4 + 8 * i;
    if (head >= heads) continue;
    float total = 0.f;
    for (int w = 0; w < 4; ++w) total += sums[w * Plan::kHeads + head];
    const bool empty = high[i] == -INFINITY;
    const int64_t place = head_0 + head;
    if (warp == 0 && lane % 4 == 0) {
      static_cast<float*>(args.lse.data)[row * args.lse.row_stride +
                                         token * args.lse.token_stride +
                                         place * args.lse.head_stride] =
          empty ? -INFINITY : high[i] + logf(total);
    }
    if (args.sink != nullptr) {
      total += expf(static_cast<const float*>(args.sink)[place] - high[i]);
    }
    const float inverse = empty ? 0.f : 1.f / total;
    auto* to = static_cast<Element*>(args.out.data) +
               row * args.out.row_stride + token * args.out.token_stride +
               place * args.out.head_stride;
#pragma unroll
    for (int g = 0; g < Plan::kGroups; ++g) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int channel = (g * 4 + warp) * 16 + part * 8 + lane % 4 * 2;
        if (channel >= values) continue;
        to[channel] = narrowed<Element>(out[g][4 * part + 2 * i] * inverse);
        to[channel + 1] =
            narrowed<Element>(out[g][4 * part + 2 * i + 1] * inverse);
      }
    }
  }
}

}  // namespace longspan::ampere
