#include <vector>

#include "longspan/kernels/attention/cpu/jobs.h"
#include "longspan/kernels/attention/cpu/steps.h"

namespace longspan {

namespace {

/// Query heads that walk the keys together, so that a block of keys is packed
/// once for all of them. Fewer where channels are many: what the heads keep at
/// hand ought to stay in the second cache.
int heads_per_job(const AttentionArgs& args) {
  const int channels = args.head_dim + args.value_dim;
  return channels <= 256 ? 4 : channels <= 512 ? 2 : 1;
}

struct HeadChunk {
  int64_t key_head, first_head;
  int heads;
};

std::vector<HeadChunk> head_chunks(const AttentionArgs& args) {
  std::vector<HeadChunk> chunks;
  const int64_t most = heads_per_job(args);
  for (int64_t key_head = 0; key_head < key_heads_of(args); ++key_head) {
    const TokenRange heads = heads_of(args, key_head);
    for (int64_t head = heads.begin; head < heads.end; head += most) {
      chunks.push_back(
          {key_head, head, static_cast<int>(std::min(most, heads.end - head))});
    }
  }
  return chunks;
}

void run_job(const ForwardSteps& steps, const AttentionForwardArgs& args,
             const LineIndex& lines, const QueryBlock& queries, void* scratch) {
  const std::vector<Windows> seen =
      lines.windows_of(queries.row, queries.first, queries.count);
  if (seen.empty()) return;
  steps.start(args, queries, scratch);
  KeyBlock keys;
  for (const Windows& windows : seen) {
    for (int64_t key = 0; next_key_block(windows, key, args.keys, keys);
         key = keys.first + keys.count) {
      steps.add_keys(args, queries, keys, scratch);
    }
  }
  steps.finish(args, queries, scratch);
}

}  // namespace

void run_forward(const AttentionSteps& all, const AttentionForwardArgs& args,
                 const ParallelFor& parallel_for) {
  if (args.keys == 0 || args.lines.empty()) return;
  const ForwardSteps& steps = all.forward[static_cast<int>(args.type)];
  const LineIndex lines(args.lines);
  const std::vector<HeadChunk> chunks = head_chunks(args);
  const int64_t blocks = query_blocks_of(args);
  const int64_t jobs_per_row = std::ssize(chunks) * blocks;
  parallel_for(args.rows * jobs_per_row, 1, [&](int64_t begin, int64_t end) {
    const AlignedBytes scratch(steps.scratch_bytes(args, heads_per_job(args)));
    for (int64_t job = begin; job < end; ++job) {
      const int64_t in_row = job % jobs_per_row;
      const HeadChunk& chunk =
          chunks[static_cast<std::size_t>(in_row / blocks)];
      const int64_t block = from_both_ends(in_row % blocks, blocks);
      run_job(steps, args, lines,
              {.row = job / jobs_per_row,
               .key_head = chunk.key_head,
               .first = block * kBlock,
               .count = queries_in_block(args, block),
               .first_head = chunk.first_head,
               .heads = chunk.heads},
              scratch.data());
    }
  });
}

}  // namespace longspan
