#include "longspan/kernels/move/cpu/move_runs.h"

#include <algorithm>
#include <cstring>

namespace longspan {

namespace {

/// Repeats one element over `bytes` bytes by doubling what is already there.
void fill_bytes(std::byte* target, int64_t bytes,
                std::span<const std::byte> element) {
  if (bytes == 0) return;
  const bool zero = std::ranges::all_of(
      element, [](std::byte byte) { return byte == std::byte{0}; });
  if (zero) {
    std::memset(target, 0, static_cast<std::size_t>(bytes));
    return;
  }
  auto done = std::min(std::ssize(element), bytes);
  std::memcpy(target, element.data(), static_cast<std::size_t>(done));
  while (done < bytes) {
    const auto more = std::min(done, bytes - done);
    std::memcpy(target + done, target, static_cast<std::size_t>(more));
    done += more;
  }
}

/// Writes tokens [begin, end) of one slice.
void move_part(const MoveRunsArgs& args, const std::byte* source,
               std::byte* target, int64_t begin, int64_t end) {
  auto run = std::ranges::partition_point(
      args.runs, [&](const Run& r) { return r.target + r.length <= begin; });
  for (int64_t token = begin; token < end;) {
    const bool inside = run != args.runs.end() && run->target <= token;
    if (inside) {
      const int64_t stop = std::min(end, run->target + run->length);
      const int64_t from = run->source + (token - run->target);
      std::memcpy(target + token * args.token_bytes,
                  source + from * args.token_bytes,
                  static_cast<std::size_t>((stop - token) * args.token_bytes));
      token = stop;
      ++run;
    } else {
      const int64_t stop =
          run == args.runs.end() ? end : std::min(end, run->target);
      fill_bytes(target + token * args.token_bytes,
                 (stop - token) * args.token_bytes, args.fill);
      token = stop;
    }
  }
}

}  // namespace

void move_runs(const MoveRunsArgs& args, const ParallelFor& parallel_for) {
  if (args.token_bytes == 0 || args.target_tokens == 0) return;
  // A thread starts in the time that a megabyte takes within the caches.
  const int64_t grain =
      std::max<int64_t>(1, (int64_t{1} << 20) / args.token_bytes);
  parallel_for(
      args.slices * args.target_tokens, grain, [&](int64_t begin, int64_t end) {
        while (begin < end) {
          const int64_t slice = begin / args.target_tokens;
          const int64_t first = begin % args.target_tokens;
          const int64_t count =
              std::min(end - begin, args.target_tokens - first);
          move_part(args,
                    args.source + slice * args.source_tokens * args.token_bytes,
                    args.target + slice * args.target_tokens * args.token_bytes,
                    first, first + count);
          begin += count;
        }
      });
}

}  // namespace longspan
