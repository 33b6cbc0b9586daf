#include <vector>

#include "longspan/kernels/attend_selected/cpu/jobs.h"
#include "longspan/kernels/common/cpu/jobs.h"

namespace longspan {

namespace {

// Queries are taken in blocks. First each query of a block writes its dq and
// leaves rows of weights; then each range of keys takes, query by query, what
// belongs to it. So no two jobs add to one key, and every key is added to in
// the order of the queries, whatever the threads, blocks and ranges.
//
// How the work is cut depends on shapes only.
constexpr int64_t kBlockBytes = int64_t{32} << 20;  // of what queries leave
constexpr int64_t kMostQueries = 256;               // of a block
// Ranges of so many slots of a query on average cost little, those of fewer are
// worth it up to a few, for threads.
constexpr int64_t kSlotsOfARange = 128, kMostRanges = 64;
constexpr int64_t kSlotsWorthARange = 64, kFewRanges = 8;

struct Cut {
  int range_bits;  // a range is 2^this keys
  int64_t ranges;
  int64_t query_bytes, slot_bytes, rows_bytes;  // of one query
  int64_t queries;                              // of a block

  Cut(const SelectedBackwardSteps& steps, const SelectedBackwardArgs& args)
      : range_bits(0),
        query_bytes(steps.query_bytes(args)),
        slot_bytes(steps.slot_bytes(args)),
        rows_bytes((args.slots + kSlotStep - 1) / kSlotStep * kSlotStep *
                   slot_bytes) {
    const int64_t wanted = std::max<int64_t>(
        {1, std::min(args.slots / kSlotsWorthARange, kFewRanges),
         std::min(args.slots / kSlotsOfARange, kMostRanges)});
    while (((args.keys - 1) >> range_bits) >= wanted) ++range_bits;
    ranges = args.keys == 0 ? 0 : ((args.keys - 1) >> range_bits) + 1;
    queries =
        std::clamp<int64_t>(kBlockBytes / (query_bytes + rows_bytes + 1), 1,
                            std::min(kMostQueries, selected_items(args)));
  }
};

/// What the queries of a block leave for keys.
class Block {
 public:
  Block(const SelectedBackwardArgs& args, const Cut& cut)
      : args_(args),
        cut_(cut),
        // Steps may read a few rows behind the last.
        rows_(cut.queries * cut.rows_bytes + 16 * cut.slot_bytes),
        sides_(cut.queries * cut.query_bytes),
        keys_(static_cast<std::size_t>(cut.queries * args.slots)),
        begins_(static_cast<std::size_t>(cut.queries * (cut.ranges + 1))) {}

  /// The list of a query, range after range, in the caller's order within one.
  /// `keys` has room for a list.
  SelectedKeys sort(int64_t place, int64_t item, int32_t* keys) {
    SelectedKeys list = item_of(args_, item);
    list.count = copy_keys(args_, slots_of(args_, list), keys);
    int64_t* const begin = begins_of(place);
    std::fill(begin, begin + cut_.ranges + 1, 0);
    for (int64_t i = 0; i < list.count; ++i) {
      ++begin[(keys[i] >> cut_.range_bits) + 1];
    }
    for (int64_t r = 0; r < cut_.ranges; ++r) begin[r + 1] += begin[r];
    std::vector<int64_t> next(begin, begin + cut_.ranges);
    int32_t* const sorted = keys_.data() + place * args_.slots;
    for (int64_t i = 0; i < list.count; ++i) {
      sorted[next[static_cast<std::size_t>(keys[i] >> cut_.range_bits)]++] =
          keys[i];
    }
    list.keys = sorted;
    return list;
  }

  void* side(int64_t place) const {
    return sides_.data() + place * cut_.query_bytes;
  }
  std::byte* rows(int64_t place) const {
    return rows_.data() + place * cut_.rows_bytes;
  }

  /// Adds a query's slots of one range of keys.
  void add_to_keys(const SelectedBackwardSteps& steps, int64_t place,
                   int64_t item, int64_t range, void* scratch) {
    const int64_t* const begin = begins_of(place) + range;
    if (begin[0] == begin[1]) return;
    SelectedKeys part = item_of(args_, item);
    part.keys = keys_.data() + place * args_.slots + begin[0];
    part.count = begin[1] - begin[0];
    steps.add_to_keys(args_, part, side(place),
                      rows(place) + begin[0] * cut_.slot_bytes, scratch);
  }

 private:
  int64_t* begins_of(int64_t place) {
    return begins_.data() + place * (cut_.ranges + 1);
  }

  const SelectedBackwardArgs& args_;
  const Cut& cut_;
  AlignedBytes rows_, sides_;
  std::vector<int32_t> keys_;
  std::vector<int64_t> begins_;
};

}  // namespace

void run_selected_backward(const SelectedSteps& all,
                           const SelectedBackwardArgs& args,
                           const ParallelFor& parallel_for) {
  const SelectedBackwardSteps& steps = all.backward;
  const int64_t items = selected_items(args);
  if (items == 0) return;
  const Cut cut(steps, args);
  const int64_t scratch_bytes = steps.scratch_bytes(args);
  Block block(args, cut);
  for (int64_t first = 0; first < items; first += cut.queries) {
    const int64_t last = std::min(items, first + cut.queries);
    parallel_for(last - first, 1, [&](int64_t begin, int64_t end) {
      const AlignedBytes scratch(scratch_bytes);
      std::vector<int32_t> keys(static_cast<std::size_t>(args.slots) + 1);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t place = from_both_ends(i, last - first);
        const SelectedKeys list = block.sort(place, first + place, keys.data());
        steps.take_query(args, list, block.side(place), block.rows(place),
                         scratch.data());
      }
    });
    const int64_t first_owner = first / args.queries;
    const int64_t owners = (last - 1) / args.queries + 1 - first_owner;
    parallel_for(owners * cut.ranges, 1, [&](int64_t begin, int64_t end) {
      const AlignedBytes scratch(scratch_bytes);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t job = from_both_ends(i, owners * cut.ranges);
        const int64_t owner = first_owner + job / cut.ranges;
        const int64_t item_end = std::min(last, (owner + 1) * args.queries);
        for (int64_t item = std::max(first, owner * args.queries);
             item < item_end; ++item) {
          block.add_to_keys(steps, item - first, item, job % cut.ranges,
                            scratch.data());
        }
      }
    });
  }
}

}  // namespace longspan
