#include "longspan/kernels/attention/cpu/bf16/steps.h"
#include "longspan/kernels/attention/cpu/jobs.h"

namespace longspan {

namespace {

struct Job {
  int64_t row, key_head, group, groups;
};

std::vector<Job> jobs_of(const AttentionArgs& args, int panels) {
  std::vector<Job> jobs;
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t key_head = 0; key_head < key_heads_of(args); ++key_head) {
      const int64_t groups = PanelOrder(args, key_head, panels).groups();
      for (int64_t group = 0; group < groups; ++group) {
        jobs.push_back({row, key_head, from_both_ends(group, groups), groups});
      }
    }
  }
  return jobs;
}

}  // namespace

void run_panels_forward(const PanelSteps& all, const AttentionForwardArgs& args,
                        const ParallelFor& parallel_for) {
  if (args.keys == 0 || args.lines.empty()) return;
  const PanelForwardSteps& steps = all.forward;
  const LineIndex lines(args.lines);
  const int panels = panels_per_group(args, steps.panel_bytes(args));
  const std::vector<Job> jobs = jobs_of(args, panels);
  parallel_for(std::ssize(jobs), 1, [&](int64_t begin, int64_t end) {
    const AlignedBytes scratch(steps.scratch_bytes(args, panels));
    for (int64_t i = begin; i < end; ++i) {
      const Job& job = jobs[static_cast<std::size_t>(i)];
      const PanelGroup group =
          PanelOrder(args, job.key_head, panels).group(job.row, job.group);
      bool started = false;
      GroupWindows(lines, group)
          .each_block({0, args.keys}, [&](const SeenKeys& keys) {
            if (!started) steps.start(args, group, scratch.data());
            started = true;
            steps.add_keys(args, group, keys, scratch.data());
          });
      if (started) steps.finish(args, group, scratch.data());
    }
  });
}

}  // namespace longspan
