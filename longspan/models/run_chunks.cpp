#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "longspan/attention/state_tables.h"
#include "longspan/core/detail/check.h"
#include "longspan/models/detail/run_chunks.h"

namespace longspan {

namespace {

/// No longer than the longest run fills, and a power of two below that.
int64_t chunk_length(const StatePlan& plan, int64_t most) {
  int64_t longest = 1;
  for (const HaloPlan::RowRun& run : plan.runs()) {
    longest = std::max(longest, run.run.size());
  }
  int64_t length = 1;
  while (length < longest && length < most) length *= 2;
  return std::min(length, most);
}

int64_t chunks_of(const StatePlan& plan, int64_t run, int64_t length) {
  const int64_t size = plan.runs()[static_cast<std::size_t>(run)].run.size();
  return (size + length - 1) / length;
}

/// Writes the tokens of some runs, longest first, behind those of others.
RunChunks::Side lay(const StatePlan& plan, const std::vector<int64_t>& runs,
                    int64_t length, int64_t blank,
                    std::vector<int64_t>& tokens) {
  RunChunks::Side side;
  side.first = std::ssize(tokens) / length;
  side.runs = std::ssize(runs);
  for (int64_t k = 0;; ++k) {
    int64_t count = 0;
    for (const int64_t i : runs) {
      if (chunks_of(plan, i, length) <= k) break;
      const DocumentRun& run = plan.runs()[static_cast<std::size_t>(i)].run;
      for (int64_t t = k * length; t < (k + 1) * length; ++t) {
        tokens.push_back(t < run.size() ? run.local + t : blank);
      }
      ++count;
    }
    if (count == 0) return side;
    side.counts.push_back(count);
  }
}

at::Tensor numbers(const std::vector<int64_t>& list, at::Device device) {
  return at::tensor(list, at::TensorOptions(at::kLong)).to(device);
}

/// Reads the chunks of one side from its first ones on; `before` gets the
/// states that each chunk finds. Returns what all its runs leave behind.
at::Tensor read(const RunChunks::Side& side, const ChunkRecurrence& recurrence,
                at::Tensor states, bool adds,
                std::vector<at::Tensor>* before = nullptr) {
  std::vector<at::Tensor> ended;
  int64_t first = side.first;
  for (const int64_t count : side.counts) {
    const int64_t over = states.size(0) - count;
    if (over > 0) {  // the shorter runs have ended
      ended.push_back(states.narrow(0, count, over));
      states = states.narrow(0, 0, count);
    }
    if (before != nullptr) before->push_back(states);
    states = recurrence.step(states, first, adds);
    first += count;
  }
  if (ended.empty()) return states;
  ended.push_back(states);
  std::reverse(ended.begin(), ended.end());
  return at::cat(ended);
}

at::Tensor for_each(int64_t runs, const at::Tensor& one) {
  std::vector<int64_t> sizes = one.sizes().vec();
  sizes.insert(sizes.begin(), runs);
  return one.unsqueeze(0).expand(sizes);
}

}  // namespace

RunChunks RunChunks::of(const StatePlan& plan, int64_t most, int64_t tokens,
                        at::Device device) {
  check(most >= 1, "chunks: `chunk` is ", most, "; expected at least 1");
  RunChunks made;
  made.length = chunk_length(plan, most);
  // The longest first; runs of the same length keep their order.
  std::vector<int64_t> chained = plan.chained(), others;
  for (int64_t i = 0; i < std::ssize(plan.runs()); ++i) {
    if (!std::binary_search(chained.begin(), chained.end(), i)) {
      others.push_back(i);
    }
  }
  std::vector<int64_t> order(chained.size());
  std::iota(order.begin(), order.end(), 0);
  const auto chunks = [&](int64_t run) {
    return chunks_of(plan, run, made.length);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return chunks(chained[static_cast<std::size_t>(a)]) >
           chunks(chained[static_cast<std::size_t>(b)]);
  });
  std::vector<int64_t> sorted, back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    sorted.push_back(chained[static_cast<std::size_t>(order[i])]);
    back[static_cast<std::size_t>(order[i])] = static_cast<int64_t>(i);
  }
  std::stable_sort(others.begin(), others.end(),
                   [&](int64_t a, int64_t b) { return chunks(a) > chunks(b); });
  std::vector<int64_t> listed;
  made.chained = lay(plan, sorted, made.length, tokens, listed);
  made.others = lay(plan, others, made.length, tokens, listed);
  made.chunks = std::ssize(listed) / made.length;
  std::vector<int64_t> places(static_cast<std::size_t>(tokens),
                              std::ssize(listed));
  int64_t real = 0;
  for (int64_t place = 0; place < std::ssize(listed); ++place) {
    const int64_t token = listed[static_cast<std::size_t>(place)];
    if (token == tokens) continue;
    places[static_cast<std::size_t>(token)] = place;
    ++real;
  }
  made.filled = real < std::ssize(listed);
  made.pads = real < tokens;
  made.tokens = numbers(listed, device);
  made.places = numbers(places, device);
  // Row i of the plan is row back[i] of ours.
  made.to_plan = numbers(back, device);
  made.from_plan = numbers(order, device);
  made.tables = state_tables(plan);
  made.carries = made.tables.sends.size(0) > 0 || !chained.empty();
  return made;
}

at::Tensor RunChunks::take(const at::Tensor& x) const {
  const at::Tensor rows =
      filled ? at::cat({x, at::zeros_like(x.narrow(0, 0, 1))}) : x;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = chunks;
  sizes.insert(sizes.begin() + 1, length);
  return rows.index_select(0, tokens).view(sizes);
}

at::Tensor RunChunks::give(const at::Tensor& y) const {
  at::Tensor rows = y.flatten(0, 1);
  if (pads) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = 1;
    rows = at::cat({rows, at::zeros(sizes, rows.options())});
  }
  return rows.index_select(0, places);
}

at::Tensor states_before(const RunChunks& chunks,
                         const ChunkRecurrence& recurrence,
                         const at::Tensor& tie, const Group& group) {
  std::vector<at::Tensor> before;
  at::Tensor last = tie;
  if (chunks.carries) {
    const int64_t runs = chunks.chained.runs;
    const at::Tensor added =
        read(chunks.chained, recurrence, for_each(runs, recurrence.state),
             /*adds=*/true);
    const at::Tensor kept =
        read(chunks.chained, recurrence, for_each(runs, recurrence.transition),
             /*adds=*/false);
    const at::Tensor incoming = carry_states(
        kept.index_select(0, chunks.to_plan),
        added.index_select(0, chunks.to_plan) + tie, chunks.tables, group);
    read(chunks.chained, recurrence, incoming.index_select(0, chunks.from_plan),
         /*adds=*/true, &before);
    last = tie_of({incoming}, tie.scalar_type());
  }
  read(chunks.others, recurrence,
       for_each(chunks.others.runs, recurrence.state), /*adds=*/true, &before);
  const at::Tensor states =
      before.empty() ? for_each(0, recurrence.state) : at::cat(before);
  return states + last;
}

at::Tensor left_between(const at::Tensor& left) {
  const int64_t length = left.size(-1);
  const at::Tensor later =
      at::ones({length, length}, left.options().dtype(at::kBool)).triu(1);
  return (left.unsqueeze(-1) - left.unsqueeze(-2))
      .masked_fill(later, -std::numeric_limits<double>::infinity())
      .exp();
}

at::Tensor tie_of(const std::vector<at::Tensor>& inputs, at::ScalarType type) {
  at::Tensor tie;
  for (const at::Tensor& input : inputs) {
    if (!input.defined()) continue;
    const at::Tensor nothing = input.reshape(-1).narrow(0, 0, 0).to(type).sum();
    tie = tie.defined() ? tie + nothing : nothing;
  }
  return tie;
}

at::ScalarType sum_type(const at::Tensor& x) {
  return c10::promoteTypes(x.scalar_type(), at::kFloat);
}

StatePair pair_of(at::ScalarType type, int64_t transition, int64_t state,
                  int64_t matrix_rows) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(type));
  return {.transition_bytes = transition * bytes,
          .state_bytes = state * bytes,
          .matrix_rows = matrix_rows};
}

}  // namespace longspan
