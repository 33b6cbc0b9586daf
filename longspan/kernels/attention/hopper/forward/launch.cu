#include <bit>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/kernels/attention/hopper/forward/plans.h"
#include "longspan/kernels/attention/hopper/launch.cuh"

namespace longspan::hopper {

std::optional<std::string> why_not_attention(const AttentionArgs& args) {
  if (!is_half(args.type)) return "elements are neither bfloat16 nor float16";
  if (args.head_dim > 512 || args.value_dim > 512 || args.head_dim % 8 != 0 ||
      args.value_dim % 8 != 0) {
    return std::to_string(args.head_dim) + " and " +
           std::to_string(args.value_dim) +
           " channels; it has multiples of 8 up to 512";
  }
  if (!fits_32_bits(args.queries + 1) || !fits_32_bits(args.keys + 1) ||
      !fits_32_bits(args.rows) ||
      !fits_32_bits(args.rows * (args.queries / 64 + 1) * args.heads)) {
    return "2^30 queries or keys, or more";
  }
  if (!is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v)) {
    return "q, k or v is not aligned to 16 bytes";
  }
  const int64_t shared = key_heads(args);
  if (!has_real_strides(args.q, args.rows, args.queries, args.heads) ||
      !has_real_strides(args.k, args.rows, args.keys, shared) ||
      !has_real_strides(args.v, args.rows, args.keys, shared)) {
    return "q, k or v shows the same memory twice";
  }
  return why_not_here();
}

namespace {

/// Heads that a block of narrow plans takes: they share a key head in whole
/// groups of that many. A power of two, so that a row's head is a shift away.
int packed_heads(const AttentionArgs& args) {
  int64_t heads = kMostPackedHeads;
  for (const int64_t whole :
       {args.heads, args.heads_per_key_head, args.head_offset}) {
    heads = std::gcd(heads, whole);
  }
  return static_cast<int>(heads);
}

/// In place, what sees nothing is right already.
bool writes_every_query(const DenseForwardArgs& args) {
  return args.before.data == nullptr || !args.is_in_place();
}

template <class Plan>
void launch(const DenseForwardArgs& args, DenseForwardParams params,
            const WorkTable& table, int packed, void* memory, cudaStream_t on) {
  if (table.blocks.empty()) return;
  tell_work(params, table, memory);
  const int tokens = Plan::kQueries / packed;
  params.packed_heads = packed;
  params.token_bits = std::countr_zero(static_cast<unsigned>(tokens));
  // Keys may be none, of queries that must still be told so.
  const int64_t keys = std::max<int64_t>(args.keys, 1);
  params.q = tensor_map(args.q, args.type, args.rows, args.queries, args.heads,
                        args.head_dim, tokens, packed);
  params.k = tensor_map(args.k, args.type, args.rows, keys, key_heads(args),
                        args.head_dim, Plan::kKeys);
  params.v = tensor_map(args.v, args.type, args.rows, keys, key_heads(args),
                        args.value_dim, Plan::kValueKeys);
  check_launch("attention",
               launch_dense_forward<Plan>(params, processor_count(), on));
}

}  // namespace

ForwardWork forward_work(const DenseForwardArgs& args) {
  ForwardWork work;
  LinesByWidth lines;
  if (has_narrow_plan(args.head_dim, args.value_dim)) {
    lines = lines_by_width(
        args.lines, args.narrow_keys.value_or(most_narrow_keys(args.head_dim)));
  } else {
    lines.wide.assign(args.lines.begin(), args.lines.end());
  }
  WorkShape shape{.rows = args.rows, .queries = args.queries};
  if (!lines.narrow.empty()) {
    with_narrow_forward_plan(
        args.type, args.head_dim, args.value_dim, [&]<class Plan>(Plan) {
          work.packed_heads = packed_heads(args);
          shape.block_queries = Plan::kQueries / work.packed_heads;
          shape.tile_keys = Plan::kKeys;
          // Those that see nothing are of the other table, if there is one.
          shape.every_query = writes_every_query(args) && lines.wide.empty();
          shape.elsewhere = lines.wide;
          work.narrow = work_table(lines.narrow, shape);
        });
    if (lines.wide.empty()) return work;
  }
  with_dense_forward_plan(args.type, args.head_dim, args.value_dim,
                          [&]<class Plan>(Plan) {
                            shape.block_queries = Plan::kQueries;
                            shape.tile_keys = Plan::kKeys;
                            shape.every_query = writes_every_query(args);
                            shape.elsewhere = lines.narrow;
                            work.wide = work_table(lines.wide, shape);
                          });
  return work;
}

void attention_forward(const DenseForwardArgs& args, const ForwardWork& work,
                       void* memory, void* stream) {
  if (args.heads == 0 ||
      (work.narrow.blocks.empty() && work.wide.blocks.empty())) {
    return;
  }
  auto reason = why_not_attention(args);
  const bool is_float = args.out_type == ElementType::float32;
  if (!reason && !is_float && args.out_type != args.type) {
    reason = "out is neither float32 nor of the type of q";
  }
  if (!reason && (!is_aligned(args.out) || !is_aligned(args.before))) {
    reason = "out, or what it goes on from, is not aligned to 16 bytes";
  }
  const bool in_place = args.before.data != nullptr && args.is_in_place();
  if (!reason && in_place && !is_float) {
    reason = "out is the float32 that it goes on from, of another type";
  }
  if (!reason && in_place && args.sink != nullptr) {
    reason = "out goes on in place, and a sink is for the last step alone";
  }
  if (reason) throw std::invalid_argument("attention: " + *reason);
  DenseForwardParams params{};
  params.heads = static_cast<int>(args.heads);
  params.section_heads =
      static_cast<int>(std::min(args.heads, args.heads_per_key_head));
  params.heads_per_key_head = static_cast<int>(args.heads_per_key_head);
  params.head_offset = static_cast<int>(args.head_offset);
  params.value_dim = args.value_dim;
  params.scale = static_cast<float>(args.scale);
  params.softcap = static_cast<float>(args.softcap);
  params.sink = args.sink;
  params.out = args.out.data;
  params.out_row = args.out.row_stride;
  params.out_token = args.out.token_stride;
  params.out_head = args.out.head_stride;
  params.lse = static_cast<float*>(args.lse.data);
  params.lse_row = args.lse.row_stride;
  params.lse_token = args.lse.token_stride;
  params.lse_head = args.lse.head_stride;
  params.out_is_float = is_float;
  params.before = static_cast<const float*>(args.before.data);
  params.before_row = args.before.row_stride;
  params.before_token = args.before.token_stride;
  params.before_head = args.before.head_stride;
  auto* on = static_cast<cudaStream_t>(stream);
  std::vector<std::byte> image = work.wide.image();
  const auto narrow = work.narrow.image();
  image.insert(image.end(), narrow.begin(), narrow.end());
  check_launch("attention", upload(image, memory, on));
  with_dense_forward_plan(
      args.type, args.head_dim, args.value_dim, [&]<class Plan>(Plan) {
        launch<Plan>(args, params, work.wide, 1, memory, on);
      });
  with_narrow_forward_plan(
      args.type, args.head_dim, args.value_dim, [&]<class Plan>(Plan) {
        launch<Plan>(args, params, work.narrow, work.packed_heads,
                     static_cast<std::byte*>(memory) + work.wide.bytes(), on);
      });
}

}  // namespace longspan::hopper
