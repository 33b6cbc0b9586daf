#include <cstring>
#include <vector>

#include "longspan/kernels/cpu/attention_jobs.h"
#include "longspan/kernels/cpu/attention_steps.h"

namespace longspan {

namespace {

/// How the work is cut. Depends on shapes only, never on threads.
///
/// The queries of a key head are its (query head, query block) pairs; part p
/// of P takes pairs p, p + P, ..., which evens out causal masks. A part owns
/// the dq of its pairs. With one part it owns dk and dv as well; with several,
/// each sums into a buffer of its own, and the buffers are added in order.
/// Keys are walked in chunks to keep those buffers small.
struct Cut {
  int64_t key_heads, query_blocks;
  int64_t parts;       // for each key head of each row
  int64_t chunk_keys;  // keys of one round
};

constexpr int64_t kWantedJobs = 64;
constexpr int64_t kPairsWorthAPart = 8;
constexpr int64_t kBufferBytes = int64_t{64} << 20;
constexpr int64_t kFewestChunkKeys = 8 * kBlock;

int64_t key_bytes(const AttentionArgs& args) {
  return (args.head_dim + args.value_dim) * accumulator_bytes(args.type);
}

Cut cut_of(const AttentionArgs& args) {
  Cut cut{.key_heads = key_heads_of(args),
          .query_blocks = query_blocks_of(args),
          .parts = 1,
          .chunk_keys = args.keys};
  const int64_t owners = args.rows * cut.key_heads;
  if (owners == 0) return cut;
  const int64_t pairs =
      std::min(args.heads, args.heads_per_key_head) * cut.query_blocks;
  const int64_t wanted = (kWantedJobs + owners - 1) / owners;
  cut.parts = std::clamp<int64_t>(pairs / kPairsWorthAPart, 1, wanted);
  if (cut.parts > 1) {
    const int64_t affordable =
        kBufferBytes / (owners * cut.parts * key_bytes(args));
    const int64_t chunk = std::max(kFewestChunkKeys, affordable);
    cut.chunk_keys = std::min(args.keys, chunk / kBlock * kBlock);
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

/// One part of the queries of one key head, against one chunk of keys.
struct Job {
  int64_t row, key_head, part;
  TokenRange keys;
  KeyGradients gradients;  // of the first key
};

/// Query blocks outside, key blocks inside: packing and transposing queries
/// and their upstream gradients is the dear part and happens once a block,
/// keys are used as they lie, and dq stays in the cache.
void run_job(const BackwardSteps& steps, const AttentionBackwardArgs& args,
             const LineIndex& lines, const Cut& cut, const Job& job,
             void* scratch) {
  const TokenRange heads = heads_of(args, job.key_head);
  const int64_t pairs = heads.size() * cut.query_blocks;
  const int64_t bytes = accumulator_bytes(args.type);
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
      for (int64_t key = job.keys.begin;
           next_key_block(windows, key, job.keys.end, keys);
           key = keys.first + keys.count) {
        if (!started) steps.start(args, queries, scratch);
        started = true;
        KeyGradients gradients = job.gradients;
        const int64_t place = (keys.first - job.keys.begin) * bytes;
        gradients.dk =
            static_cast<std::byte*>(gradients.dk) + place * gradients.dk_stride;
        gradients.dv =
            static_cast<std::byte*>(gradients.dv) + place * gradients.dv_stride;
        steps.add_keys(args, queries, keys, gradients, scratch);
      }
    }
    if (started) steps.finish(args, queries, scratch);
  }
}

template <class T>
void add_to(void* target, const std::byte* source, int64_t count) {
  T* to = static_cast<T*>(target);
  const T* from = reinterpret_cast<const T*>(source);
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

void add_to(ElementType type, void* target, const std::byte* source,
            int64_t count) {
  if (type == ElementType::float64) {
    add_to<double>(target, source, count);
  } else {
    add_to<float>(target, source, count);
  }
}

/// Buffers of the jobs of one round: for each, dk then dv of its chunk.
class PartSums {
 public:
  PartSums(const AttentionArgs& args, const Cut& cut)
      : args_(args),
        cut_(cut),
        job_bytes_(cut.chunk_keys * key_bytes(args)),
        memory_(args.rows * cut.key_heads * cut.parts * job_bytes_) {}

  /// Zeroed, for one job.
  KeyGradients clear(int64_t job) const {
    std::memset(dk(job), 0, static_cast<std::size_t>(job_bytes_));
    return {.dk = dk(job),
            .dv = dv(job),
            .dk_stride = args_.head_dim,
            .dv_stride = args_.value_dim};
  }

  /// Adds the parts of one key of one owner, in order.
  void add_key(const AttentionBackwardArgs& args, int64_t owner, int64_t first,
               int64_t key) const {
    const int64_t row = owner / cut_.key_heads, head = owner % cut_.key_heads;
    const int64_t bytes = accumulator_bytes(args.type);
    for (int64_t part = 0; part < cut_.parts; ++part) {
      const int64_t job = owner * cut_.parts + part;
      add_to(args.type, place(args.dk, args, row, first + key, head),
             dk(job) + key * args.head_dim * bytes, args.head_dim);
      add_to(args.type, place(args.dv, args, row, first + key, head),
             dv(job) + key * args.value_dim * bytes, args.value_dim);
    }
  }

 private:
  std::byte* dk(int64_t job) const { return memory_.data() + job * job_bytes_; }
  std::byte* dv(int64_t job) const {
    return dk(job) +
           cut_.chunk_keys * args_.head_dim * accumulator_bytes(args_.type);
  }

  const AttentionArgs& args_;
  const Cut& cut_;
  int64_t job_bytes_;
  AlignedBytes memory_;
};

}  // namespace

void run_backward(const AttentionSteps& all, const AttentionBackwardArgs& args,
                  const ParallelFor& parallel_for) {
  if (args.keys == 0 || args.lines.empty()) return;
  const BackwardSteps& steps = all.backward[static_cast<int>(args.type)];
  const LineIndex lines(args.lines);
  const Cut cut = cut_of(args);
  const int64_t owners = args.rows * cut.key_heads;
  const int64_t jobs = owners * cut.parts;
  if (jobs == 0) return;

  const auto run = [&](TokenRange keys, const auto& gradients_of) {
    parallel_for(jobs, 1, [&](int64_t begin, int64_t end) {
      const AlignedBytes scratch(steps.scratch_bytes(args));
      for (int64_t job = begin; job < end; ++job) {
        const int64_t owner = job / cut.parts;
        run_job(steps, args, lines, cut,
                {.row = owner / cut.key_heads,
                 .key_head = owner % cut.key_heads,
                 .part = job % cut.parts,
                 .keys = keys,
                 .gradients = gradients_of(job)},
                scratch.data());
      }
    });
  };

  if (cut.parts == 1) {
    run({0, args.keys}, [&](int64_t job) {
      const int64_t row = job / cut.key_heads, head = job % cut.key_heads;
      return KeyGradients{.dk = place(args.dk, args, row, 0, head),
                          .dv = place(args.dv, args, row, 0, head),
                          .dk_stride = args.dk.token_stride,
                          .dv_stride = args.dv.token_stride};
    });
    return;
  }
  const PartSums sums(args, cut);
  for (int64_t first = 0; first < args.keys; first += cut.chunk_keys) {
    const TokenRange keys{first, std::min(args.keys, first + cut.chunk_keys)};
    run(keys, [&](int64_t job) { return sums.clear(job); });
    parallel_for(owners * keys.size(), kBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        sums.add_key(args, i / keys.size(), first, i % keys.size());
      }
    });
  }
}

}  // namespace longspan
