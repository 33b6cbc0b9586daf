#include "longspan/kernels/attention/cpu/bf16/steps.h"
#include "longspan/kernels/attention/cpu/jobs.h"

namespace longspan {

namespace {

/// How the work is cut. Depends on shapes only, never on threads.
///
/// The groups of panels of a key head are dealt to P parts, and so are chunks
/// of its keys. In round r, part p takes its own groups against the keys of
/// part (p + r) mod P: no two jobs of a round touch the same dq, dk or dv, and
/// every sum has one order.
struct Cut {
  int64_t key_heads;
  int panels;     // of a group
  int64_t parts;  // for each key head of each row
};

constexpr int64_t kWantedJobs = 16;
constexpr int64_t kChunkKeys = 4 * kKeysAtOnce;

/// Deals 0 1 2 2 1 0 0 1 2 ...: evens out what falls or grows.
int64_t part_of(int64_t i, int64_t parts) {
  const int64_t place = i % parts;
  return i / parts % 2 == 0 ? place : parts - 1 - place;
}

Cut cut_of(const AttentionArgs& args, const PanelBackwardSteps& steps) {
  Cut cut{.key_heads = key_heads_of(args),
          .panels = panels_per_group(args, steps.panel_bytes(args)),
          .parts = 1};
  const int64_t owners = args.rows * cut.key_heads;
  if (owners == 0) return cut;
  const int64_t wanted = (kWantedJobs + owners - 1) / owners;
  const int64_t groups = PanelOrder(args, 0, cut.panels).groups();
  const int64_t chunks = (args.keys + kChunkKeys - 1) / kChunkKeys;
  cut.parts = std::max<int64_t>(1, std::min({wanted, groups, chunks}));
  return cut;
}

/// The gradients of key 0 of a head, and of others from there.
struct HeadGradients {
  float *dk, *dv;
  int64_t dk_stride, dv_stride;

  HeadGradients(const AttentionBackwardArgs& args, int64_t row, int64_t head)
      : dk(static_cast<float*>(args.dk.data) + row * args.dk.row_stride +
           head * args.dk.head_stride),
        dv(static_cast<float*>(args.dv.data) + row * args.dv.row_stride +
           head * args.dv.head_stride),
        dk_stride(args.dk.token_stride),
        dv_stride(args.dv.token_stride) {}

  KeyGradients from(int64_t key) const {
    return {.dk = dk + key * dk_stride,
            .dv = dv + key * dv_stride,
            .dk_stride = dk_stride,
            .dv_stride = dv_stride};
  }
};

struct Job {
  int64_t row, key_head, query_part, key_part;
};

/// Groups of queries outside, keys inside: packing queries and their upstream
/// gradients happens once a group, and dq stays in the cache.
void run_job(const PanelBackwardSteps& steps, const AttentionBackwardArgs& args,
             const LineIndex& lines, const Cut& cut, const Job& job,
             void* scratch) {
  const PanelOrder order(args, job.key_head, cut.panels);
  const HeadGradients gradients(args, job.row, job.key_head);
  for (int64_t index = 0; index < order.groups(); ++index) {
    if (part_of(index, cut.parts) != job.query_part) continue;
    const PanelGroup group = order.group(job.row, index);
    const GroupWindows windows(lines, group);
    bool started = false;
    const auto take = [&](TokenRange keys) {
      windows.each_block(keys, [&](const SeenKeys& seen) {
        if (!started) steps.start(args, group, scratch);
        started = true;
        steps.add_keys(args, group, seen, gradients.from(seen.first), scratch);
      });
    };
    if (cut.parts == 1) {
      take({0, args.keys});
    } else {
      for (int64_t chunk = 0; chunk * kChunkKeys < args.keys; ++chunk) {
        if (part_of(chunk, cut.parts) != job.key_part) continue;
        take({chunk * kChunkKeys,
              std::min(args.keys, (chunk + 1) * kChunkKeys)});
      }
    }
    if (started) steps.finish(args, group, scratch);
  }
}

}  // namespace

void run_panels_backward(const PanelSteps& all,
                         const AttentionBackwardArgs& args,
                         const ParallelFor& parallel_for) {
  if (args.keys == 0 || args.lines.empty()) return;
  const PanelBackwardSteps& steps = all.backward;
  const LineIndex lines(args.lines);
  const Cut cut = cut_of(args, steps);
  const int64_t jobs = args.rows * cut.key_heads * cut.parts;
  for (int64_t round = 0; round < cut.parts; ++round) {
    parallel_for(jobs, 1, [&](int64_t begin, int64_t end) {
      const AlignedBytes scratch(steps.scratch_bytes(args, cut.panels));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t owner = i / cut.parts, part = i % cut.parts;
        run_job(steps, args, lines, cut,
                {.row = owner / cut.key_heads,
                 .key_head = owner % cut.key_heads,
                 .query_part = part,
                 .key_part = (part + round) % cut.parts},
                scratch.data());
      }
    });
  }
}

}  // namespace longspan
