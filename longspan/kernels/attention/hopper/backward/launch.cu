#include <algorithm>
#include <stdexcept>

#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/kernels/attention/hopper/backward/config.h"
#include "longspan/kernels/attention/hopper/backward/widest_config.h"
#include "longspan/kernels/attention/hopper/launch.cuh"
#include "longspan/kernels/common/hopper/half_type.h"

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
          adds,
          false};
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

/// Where the numbers lie that tell whose turn it is.
int* turns_in(void* memory, const BackwardWork& work) {
  return reinterpret_cast<int*>(static_cast<std::byte*>(memory) +
                                work.table_bytes());
}

/// Blocks of a chain that run at the same time wait for one another, so blocks
/// of several heads are dealt in turn: with 8 of them, backward of one document
/// of 16384 tokens was measured to take 0.6 of the time that it takes with one,
/// and less than with 4. Documents that are alike hold each other's blocks
/// apart; then more heads only ask more of L2.
int heads_in_turn(const KeyWorkTable& keys) {
  constexpr int kHeads = 8, kManyChains = 8, kHeadsOfMany = 2;
  int chains = 0;  // that are at least half as long as the longest
  for (std::size_t i = 0; i < keys.blocks.size(); ++i) {
    if (keys.turns[i].before < 0 &&
        2 * keys.blocks[i].tiles >= keys.blocks.front().tiles) {
      ++chains;
    }
  }
  return chains >= kManyChains ? kHeadsOfMany : kHeads;
}

/// How many heads are dealt block by block: as many as L2 holds, q, dout and
/// dq, since long items of few heads are hard to spread over the processors.
int heads_at_once(const DenseBackwardArgs& args) {
  constexpr int64_t kCache = 24 << 20, kMost = 8;
  const int64_t each =
      args.rows * args.queries *
      (2 * (args.head_dim + args.value_dim) + 4 * int64_t{args.head_dim});
  return static_cast<int>(std::clamp<int64_t>(kCache / each, 1, kMost));
}

/// What a kernel that makes dk or dv is told. Each of several that share a
/// table counts in a place of its own.
template <class Plan>
DenseKeysParams keys_params(const DenseBackwardArgs& args,
                            const BackwardWork& work, void* memory,
                            int counter) {
  DenseKeysParams params{};
  tell_work(params, work.keys, memory);
  params.next_item += counter;
  params.apart = work.apart;
  params.section_heads = params.section_key_heads = 1;
  tell<Plan>(params, args);
  params.queries = static_cast<int>(args.queries);
  params.key_heads = static_cast<int>(key_heads(args));
  if constexpr (Plan::kWithQueries) {
    params.dq =
        tensor_map(args.dq, ElementType::float32, args.rows, args.queries,
                   args.heads, args.head_dim, Plan::kQueries);
  }
  params.dk = place_of(args.dk, args.head_dim, args.dk_type, args.dk_adds);
  params.dv = place_of(args.dv, args.value_dim, args.dk_type, args.dk_adds);
  params.dk.is_shared = params.dv.is_shared = work.apart > 0;
  if (work.apart > 0) params.section_heads = heads_at_once(args);
  if (work.added > 0) {
    params.section_heads = params.section_key_heads = heads_in_turn(work.keys);
    params.turns = reinterpret_cast<const WorkTurn*>(params.lines +
                                                     work.keys.lines.size());
    params.added = turns_in(memory, work);
    params.heads_added = params.added + work.added;
  }
  return params;
}

template <class Plan>
DenseQueriesParams queries_params(const DenseBackwardArgs& args,
                                  const WorkTable& table, void* memory) {
  DenseQueriesParams params{};
  tell_work(params, table, memory);
  tell<Plan>(params, args);
  params.section_heads =
      static_cast<int>(std::min(args.heads, args.heads_per_key_head));
  params.dq = place_of(args.dq, args.head_dim, args.dq_type, args.dq_adds);
  return params;
}

template <ElementType kType, int kDim, bool kSoftcap>
void make_keys(const DenseBackwardArgs& args, const BackwardWork& work,
               void* memory, cudaStream_t stream) {
  const int processors = processor_count();
  const auto check = [](cudaError_t error) {
    check_launch("attention backward", error);
  };
  const auto told = [&]<class Plan>(Plan, int counter = 0) {
    return keys_params<Plan>(args, work, memory, counter);
  };
  if constexpr (kDim > 256) {
    using Keys = WidestPlan<Derivative::of_keys, kSoftcap, kType>;
    using Values = WidestPlan<Derivative::of_values, kSoftcap, kType>;
    check(launch_widest<Keys>(told(Keys()), processors, stream));
    check(launch_widest<Values>(told(Values(), 1), processors, stream));
  } else if constexpr (kDim > 128) {
    using Plan = WideKeysPlan<kDim, kDim, kSoftcap, kType>;
    check(launch_wide_keys<Plan>(told(Plan()), processors, stream));
  } else {
    using Plan = DenseKeysPlan<kDim, kDim, kSoftcap, kType>;
    check(launch_dense_keys<Plan>(told(Plan()), processors, stream));
  }
}

template <ElementType kType, int kDim, bool kSoftcap>
void make_queries(const DenseBackwardArgs& args, const WorkTable& table,
                  void* memory, cudaStream_t stream) {
  const int processors = processor_count();
  if constexpr (kDim > 256) {
    using Plan = WidestPlan<Derivative::of_queries, kSoftcap, kType>;
    check_launch("attention backward",
                 launch_widest<Plan>(queries_params<Plan>(args, table, memory),
                                     processors, stream));
  } else if constexpr (kDim > 128) {
    using Plan = DenseQueriesPlan<kDim, kDim, kSoftcap, kType>;
    check_launch(
        "attention backward",
        launch_dense_queries<Plan>(queries_params<Plan>(args, table, memory),
                                   processors, stream));
  }
}

bool can_hold(const TokenArray<void*>& array, ElementType type,
              ElementType half, bool adds) {
  return type == ElementType::float32
             ? is_aligned(array, 4)
             : type == half && !adds && is_aligned(array);
}

}  // namespace

std::optional<std::string> why_not_attention_backward(
    const AttentionArgs& args) {
  return why_not_attention(args);
}

bool adds_up_queries(const AttentionArgs& args) {
  return args.head_dim <= 128 && args.value_dim <= 128;
}

BackwardWork backward_work(const DenseBackwardArgs& args) {
  BackwardWork work;
  const auto fill_keys = [&]<class Keys>(Keys) {
    work.keys = key_work_table(args.lines, {.rows = args.rows,
                                            .queries = args.keys,
                                            .block_queries = Keys::kKeys,
                                            .tile_keys = Keys::kQueries,
                                            .every_query = !args.dk_adds});
  };
  const auto fill_queries = [&]<class Queries>(Queries) {
    work.queries = work_table(args.lines, {.rows = args.rows,
                                           .queries = args.queries,
                                           .block_queries = Queries::kQueries,
                                           .tile_keys = Queries::kKeys,
                                           .every_query = !args.dq_adds});
  };
  with_backward_dims(
      args.head_dim, args.value_dim, false, [&]<int kDim, bool kSoftcap>() {
        if constexpr (kDim > 256) {
          fill_keys(WidestPlan<Derivative::of_keys, kSoftcap>());
          fill_queries(WidestPlan<Derivative::of_queries, kSoftcap>());
        } else if constexpr (kDim > 128) {
          fill_keys(WideKeysPlan<kDim, kDim, kSoftcap>());
          fill_queries(DenseQueriesPlan<kDim, kDim, kSoftcap>());
        } else {
          fill_keys(DenseKeysPlan<kDim, kDim, kSoftcap>());
        }
      });
  const bool shares_keys = args.heads_per_key_head > 1 && args.heads > 1;
  if (adds_up_queries(args) && shares_keys && args.head_dim > 64) {
    auto& blocks = work.keys.blocks;
    const auto few = std::ranges::find_if(blocks, [&](const WorkBlock& block) {
      return block.tiles < args.tiles_apart;
    });
    work.apart = static_cast<int>(few - blocks.begin());
    // What is added to needs nobody to say that there is nothing to add.
    if (work.apart > 0) {
      std::erase_if(blocks, [](const WorkBlock& b) { return b.tiles == 0; });
    }
  }
  if (adds_up_queries(args) && !args.in_any_order) {
    give_turns(work.keys);
    work.added = static_cast<std::size_t>(args.heads) * work.keys.blocks.size();
    work.heads_added = static_cast<std::size_t>(key_heads(args) * work.apart);
  }
  return work;
}

void attention_backward(const DenseBackwardArgs& args, const BackwardWork& work,
                        void* memory, void* stream) {
  if (args.heads == 0 || args.keys == 0 || args.queries == 0) return;
  auto reason = why_not_attention_backward(args);
  if (!reason && (!is_aligned(args.dout) ||
                  !can_hold(args.dq, args.dq_type, args.type, args.dq_adds) ||
                  !can_hold(args.dk, args.dk_type, args.type, args.dk_adds) ||
                  !can_hold(args.dv, args.dk_type, args.type, args.dk_adds))) {
    reason =
        "dout, dq, dk or dv is not aligned to 16 bytes, or not float32 and to "
        "be added to or of another type than q";
  }
  if (!reason && adds_up_queries(args) &&
      (args.dq_type != ElementType::float32 || !args.dq_adds)) {
    reason = "dq of up to 128 channels is added to floats";
  }
  if (!reason && work.apart > 0 && !args.dk_adds) {
    reason = "dk and dv of blocks that are dealt head by head are added to";
  }
  if (reason) throw std::invalid_argument("attention backward: " + *reason);
  auto* on = static_cast<cudaStream_t>(stream);
  std::vector<std::byte> image = work.keys.image();
  const std::vector<std::byte> more = work.queries.image();
  image.insert(image.end(), more.begin(), more.end());
  check_launch("attention backward", upload(image, memory, on));
  if (work.added > 0) {
    check_launch("attention backward",
                 cudaMemsetAsync(turns_in(memory, work), 0,
                                 work.bytes() - work.table_bytes(), on));
  }
  const bool softcap = args.softcap > 0;
  if (!work.keys.blocks.empty()) {
    with_backward_dims(
        args.head_dim, args.value_dim, softcap, [&]<int kDim, bool kSoftcap>() {
          with_half_type(args.type, [&]<ElementType kType>() {
            make_keys<kType, kDim, kSoftcap>(args, work, memory, on);
          });
        });
  }
  if (work.queries.blocks.empty()) return;
  void* const after = static_cast<std::byte*>(memory) + work.keys.bytes();
  with_backward_dims(
      args.head_dim, args.value_dim, softcap, [&]<int kDim, bool kSoftcap>() {
        with_half_type(args.type, [&]<ElementType kType>() {
          make_queries<kType, kDim, kSoftcap>(args, work.queries, after, on);
        });
      });
}

}  // namespace longspan::hopper
