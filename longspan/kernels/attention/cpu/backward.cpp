#include <vector>

#include "longspan/kernels/attention/cpu/jobs.h"
#include "longspan/kernels/attention/cpu/steps.h"

namespace longspan {

namespace {

/// How the work is cut. Depends on shapes only, never on threads.
///
/// The queries of a key head are its (query head, query block) pairs; part p of
/// P takes pairs p, p + P, ... and owns their dq. Keys are cut into slices,
/// and group g of P has slices g, g + P, ...: any part has about its share of
/// any group, whatever the mask. In round r part p works with group
/// (p + r) mod P, so no two parts ever add to the same dk and dv, and each of
/// them is added to in one order.
struct Cut {
  int64_t key_heads, query_blocks;
  int64_t parts;       // of the queries of each key head of each row
  int64_t slice_keys;  // whole blocks
};

constexpr int64_t kWantedJobs = 64;
constexpr int64_t kPairsWorthAPart = 8;
constexpr int64_t kKeysWorthAPart = 4 * kBlock;
constexpr int64_t kMostSliceKeys = 8 * kBlock;

Cut cut_of(const AttentionArgs& args) {
  Cut cut{.key_heads = key_heads_of(args),
          .query_blocks = query_blocks_of(args),
          .parts = 1,
          .slice_keys = args.keys};
  const int64_t owners = args.rows * cut.key_heads;
  if (owners == 0) return cut;
  const int64_t pairs =
      std::min(args.heads, args.heads_per_key_head) * cut.query_blocks;
  const int64_t wanted = (kWantedJobs + owners - 1) / owners;
  const int64_t worth =
      std::min(pairs / kPairsWorthAPart, args.keys / kKeysWorthAPart);
  cut.parts = std::clamp<int64_t>(worth, 1, wanted);
  if (cut.parts > 1) {
    const int64_t some = args.keys / (4 * cut.parts) / kBlock * kBlock;
    cut.slice_keys = std::clamp<int64_t>(some, kBlock, kMostSliceKeys);
  }
  return cut;
}

/// An element of an array of the accumulation type.
void* place(const TokenArray<void*>& array, const AttentionArgs& args,
            int64_t row, int64_t token, int64_t head) {
  const int64_t offset = row * array.row_stride + token * array.token_stride +
                         head * array.head_stride;
  return static_cast<std::byte*>(array.data) +
         offset * accumulator_bytes(args.type);
}

/// One part of the queries of one key head, against one group of its keys.
struct Job {
  int64_t row, key_head, part, group;
};

/// Every slice of the job's group that the windows reach, in order.
template <class Visit>
void visit_slices(const Cut& cut, const Job& job, TokenRange reach,
                  const Visit& visit) {
  const int64_t first = reach.begin / cut.slice_keys;
  const int64_t behind = (job.group - first) % cut.parts;
  for (int64_t slice = first + (behind + cut.parts) % cut.parts;
       slice * cut.slice_keys < reach.end; slice += cut.parts) {
    visit(intersect(reach, TokenRange{slice * cut.slice_keys,
                                      (slice + 1) * cut.slice_keys}));
  }
}

/// Query blocks outside, key blocks inside: packing and transposing queries
/// and their upstream gradients happens once a block, keys are used as they
/// lie, and dq stays in the cache.
void run_job(const BackwardSteps& steps, const AttentionBackwardArgs& args,
             const LineIndex& lines, const Cut& cut, const Job& job,
             void* scratch) {
  const TokenRange heads = heads_of(args, job.key_head);
  const int64_t pairs = heads.size() * cut.query_blocks;
  for (int64_t pair = job.part; pair < pairs; pair += cut.parts) {
    const int64_t block = pair % cut.query_blocks;
    const QueryBlock queries{
        .row = job.row,
        .key_head = job.key_head,
        .first = block * kBlock,
        .count = queries_in_block(args, block),
        .first_head = heads.begin + pair / cut.query_blocks,
        .heads = 1};
    bool started = false;
    KeyBlock keys;
    for (const Windows& windows :
         lines.windows_of(queries.row, queries.first, queries.count)) {
      visit_slices(cut, job, reach_of(windows), [&](TokenRange slice) {
        for (int64_t key = slice.begin;
             next_key_block(windows, key, slice.end, keys);
             key = keys.first + keys.count) {
          if (!started) steps.start(args, queries, scratch);
          started = true;
          steps.add_keys(
              args, queries, keys,
              {.dk = place(args.dk, args, job.row, keys.first, job.key_head),
               .dv = place(args.dv, args, job.row, keys.first, job.key_head),
               .dk_stride = args.dk.token_stride,
               .dv_stride = args.dv.token_stride},
              scratch);
        }
      });
    }
    if (started) steps.finish(args, queries, scratch);
  }
}

}  // namespace

void run_backward(const AttentionSteps& all, const AttentionBackwardArgs& args,
                  const ParallelFor& parallel_for) {
  if (args.keys == 0 || args.lines.empty()) return;
  const BackwardSteps& steps = all.backward[static_cast<int>(args.type)];
  const LineIndex lines(args.lines);
  const Cut cut = cut_of(args);
  const int64_t jobs = args.rows * cut.key_heads * cut.parts;
  for (int64_t round = 0; round < cut.parts; ++round) {
    parallel_for(jobs, 1, [&](int64_t begin, int64_t end) {
      const AlignedBytes scratch(steps.scratch_bytes(args));
      for (int64_t job = begin; job < end; ++job) {
        const int64_t owner = job / cut.parts, part = job % cut.parts;
        run_job(steps, args, lines, cut,
                {.row = owner / cut.key_heads,
                 .key_head = owner % cut.key_heads,
                 .part = part,
                 .group = (part + round) % cut.parts},
                scratch.data());
      }
    });
  }
}

}  // namespace longspan
