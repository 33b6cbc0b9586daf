#include <stdexcept>

#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/kernels/attention/hopper/backward/config.h"
#include "longspan/kernels/attention/hopper/launch.cuh"

namespace longspan::hopper {

namespace {

GradientPlace place_of(const TokenArray<void*>& array, int channels,
                       ElementType type, bool adds) {
  return {array.data,
          array.row_stride,
          array.token_stride,
          array.head_stride,
          channels,
          type == ElementType::float32,
          adds};
}

QueryNumbers numbers_of(const TokenArray<const void*>& array) {
  return {static_cast<const float*>(array.data), array.row_stride,
          array.token_stride, array.head_stride};
}

/// What both kernels are told.
template <class Plan, class Params>
void tell(Params& params, const DenseBackwardArgs& args) {
  params.heads = static_cast<int>(args.heads);
  params.heads_per_key_head = static_cast<int>(args.heads_per_key_head);
  params.head_offset = static_cast<int>(args.head_offset);
  params.scale = static_cast<float>(args.scale);
  params.softcap = static_cast<float>(args.softcap);
  params.lse = numbers_of(args.lse);
  params.delta = numbers_of(args.delta);
  const auto of_queries = [&](const TokenArray<const void*>& array,
                              int channels) {
    return tensor_map(array, args.type, args.rows, args.queries, args.heads,
                      channels, Plan::kQueries);
  };
  const auto of_keys = [&](const TokenArray<const void*>& array, int channels) {
    return tensor_map(array, args.type, args.rows, args.keys, key_heads(args),
                      channels, Plan::kKeys);
  };
  params.q = of_queries(args.q, args.head_dim);
  params.dout = of_queries(args.dout, args.value_dim);
  params.k = of_keys(args.k, args.head_dim);
  params.v = of_keys(args.v, args.value_dim);
}

template <class Plan>
void make_keys(const DenseBackwardArgs& args, const KeyWorkTable& table,
               void* memory, cudaStream_t stream) {
  DenseKeysParams params{};
  tell_work(params, table, memory);
  tell<Plan>(params, args);
  params.queries = static_cast<int>(args.queries);
  params.key_heads = static_cast<int>(key_heads(args));
  if constexpr (Plan::kWithQueries) {
    params.dq =
        tensor_map(args.dq, ElementType::float32, args.rows, args.queries,
                   args.heads, args.head_dim, Plan::kBoxQueries);
  }
  params.dk = place_of(args.dk, args.head_dim, args.dk_type, args.dk_adds);
  params.dv = place_of(args.dv, args.value_dim, args.dk_type, args.dk_adds);
  if constexpr (Plan::kHeadDim > 128) {
    check_launch("attention backward",
                 launch_wide_keys<Plan>(params, processor_count(), stream));
  } else {
    check_launch("attention backward",
                 launch_dense_keys<Plan>(params, processor_count(), stream));
  }
}

template <class Plan>
void make_queries(const DenseBackwardArgs& args, const WorkTable& table,
                  void* memory, cudaStream_t stream) {
  DenseQueriesParams params{};
  tell_work(params, table, memory);
  tell<Plan>(params, args);
  params.section_heads =
      static_cast<int>(std::min(args.heads, args.heads_per_key_head));
  params.dq = place_of(args.dq, args.head_dim, args.dq_type, args.dq_adds);
  check_launch("attention backward",
               launch_dense_queries<Plan>(params, processor_count(), stream));
}

bool can_hold(const TokenArray<void*>& array, ElementType type, bool adds) {
  return type == ElementType::float32 ? is_aligned(array, 4)
                                      : !adds && is_aligned(array);
}

}  // namespace

std::optional<std::string> why_not_attention_backward(
    const AttentionArgs& args) {
  if (args.head_dim > 256 || args.value_dim > 256) {
    return std::to_string(args.head_dim) + " and " +
           std::to_string(args.value_dim) +
           " channels; its derivative has multiples of 8 up to 256";
  }
  return why_not_attention(args);
}

bool has_any_order(const AttentionArgs& args) {
  return args.head_dim <= 128 && args.value_dim <= 128;
}

BackwardWork backward_work(const DenseBackwardArgs& args) {
  using Keys = DenseKeysPlan<128, 128, false, false>;
  using WideKeys = WideKeysPlan<256, 256, false>;
  using Queries = DenseQueriesPlan<128, 128, false>;
  static_assert(Keys::kQueries == WideKeys::kQueries);
  BackwardWork work;
  work.keys = key_work_table(
      args.lines,
      {.rows = args.rows,
       .queries = args.keys,
       .block_queries = has_any_order(args) ? Keys::kKeys : WideKeys::kKeys,
       .tile_keys = Keys::kQueries,
       .every_query = !args.dk_adds});
  if (args.in_any_order) return work;
  work.queries = work_table(args.lines, {.rows = args.rows,
                                         .queries = args.queries,
                                         .block_queries = Queries::kQueries,
                                         .tile_keys = Queries::kKeys,
                                         .every_query = !args.dq_adds});
  return work;
}

void attention_backward(const DenseBackwardArgs& args, const BackwardWork& work,
                        void* memory, void* stream) {
  if (args.heads == 0 || args.keys == 0 || args.queries == 0) return;
  auto reason = why_not_attention_backward(args);
  if (!reason && (!is_aligned(args.dout) ||
                  !can_hold(args.dq, args.dq_type, args.dq_adds) ||
                  !can_hold(args.dk, args.dk_type, args.dk_adds) ||
                  !can_hold(args.dv, args.dk_type, args.dk_adds))) {
    reason =
        "dout, dq, dk or dv is not aligned to 16 bytes, or bfloat16 and to be "
        "added to";
  }
  if (!reason && args.in_any_order &&
      (args.dq_type != ElementType::float32 || !args.dq_adds ||
       !has_any_order(args))) {
    reason = "dq in any order is added to floats, of up to 128 channels";
  }
  if (reason) throw std::invalid_argument("attention backward: " + *reason);
  auto* on = static_cast<cudaStream_t>(stream);
  std::vector<std::byte> image = work.keys.image();
  const std::vector<std::byte> more = work.queries.image();
  image.insert(image.end(), more.begin(), more.end());
  check_launch("attention backward", upload(image, memory, on));
  const bool softcap = args.softcap > 0;
  with_backward_dims(args.head_dim, args.value_dim, softcap,
                     [&]<int kDim, bool kSoftcap>() {
                       if (work.keys.blocks.empty()) return;
                       if constexpr (kDim > 128) {
                         make_keys<WideKeysPlan<kDim, kDim, kSoftcap>>(
                             args, work.keys, memory, on);
                       } else if (args.in_any_order) {
                         make_keys<DenseKeysPlan<kDim, kDim, kSoftcap, true>>(
                             args, work.keys, memory, on);
                       } else {
                         make_keys<DenseKeysPlan<kDim, kDim, kSoftcap, false>>(
                             args, work.keys, memory, on);
                       }
                     });
  if (work.queries.blocks.empty()) return;
  void* const after = static_cast<std::byte*>(memory) + work.keys.bytes();
  with_backward_dims(args.head_dim, args.value_dim, softcap,
                     [&]<int kDim, bool kSoftcap>() {
                       make_queries<DenseQueriesPlan<kDim, kDim, kSoftcap>>(
                           args, work.queries, after, on);
                     });
}

}  // namespace longspan::hopper
