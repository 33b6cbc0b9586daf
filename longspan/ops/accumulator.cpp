#include "longspan/ops/accumulator.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/token_range.h"

namespace longspan {

namespace {

/// Bytes that may wait, in units of the whole in half precision: all steps of 8
/// ranks, which are then folded in one pass. Gradients are computed where most
/// memory is in use: where that would be much, half as many wait.
constexpr int64_t kWaits = 8, kMuch = 512 << 20;

int64_t most_waiting_bytes(Accumulator::Kind kind, int64_t numel) {
  const int64_t all = kWaits * 2 * numel;
  return kind == Accumulator::Kind::attention || all <= kMuch ? all : all / 2;
}

PartialAttention box(const PartialAttention& whole, int64_t row, int64_t rows,
                     int64_t token, int64_t tokens) {
  const auto cut = [&](const at::Tensor& tensor) {
    return tensor.defined()
               ? tensor.narrow(0, row, rows).narrow(1, token, tokens)
               : tensor;
  };
  return {cut(whole.out), cut(whole.lse)};
}

/// The parts with places counted from the token `first` on.
std::vector<PlacedPart> placed_from(int64_t first,
                                    std::vector<PlacedPart> parts) {
  for (PlacedPart& placed : parts) placed.token -= first;
  return parts;
}

void fold_in_place(PartialAttention here, const PartialAttention& part) {
  if (here.lse.defined()) {
    here.add(part);
    return;
  }
  const PlacedPart placed{.part = part};
  if (!fold_on_device(&here, {&placed, 1}, here)) here.out.add_(part.out);
}

}  // namespace

Accumulator::Accumulator(Kind kind, at::IntArrayRef sizes,
                         const at::TensorOptions& options, MemoryOrder order)
    : kind_(kind), sizes_(sizes.vec()), options_(options), order_(order) {}

Accumulator Accumulator::sum_in(at::Tensor memory, TokenRange wanted) {
  Accumulator made(Kind::sum, memory.sizes(), memory.options());
  made.memory_ = std::move(memory);
  made.wanted_ = wanted;
  return made;
}

PartialAttention Accumulator::empty(at::ScalarType dtype) const {
  const auto tensor = [&](at::IntArrayRef sizes, at::ScalarType type) {
    if (order_ == MemoryOrder::tokens_first) {
      return at::empty(sizes, options_.dtype(type));
    }
    auto heads_first = sizes.vec();
    std::swap(heads_first[1], heads_first[2]);
    auto strides = c10::contiguous_strides(heads_first);
    std::swap(strides[1], strides[2]);
    return at::empty_strided(sizes, strides, options_.dtype(type));
  };
  PartialAttention made;
  made.out = memory_.defined() && dtype == type_of_sums()
                 ? memory_
                 : tensor(sizes_, dtype);
  if (kind_ == Kind::attention) {
    made.lse = tensor(at::IntArrayRef(sizes_).slice(0, 3), type_of_sums());
  }
  return made;
}

at::ScalarType Accumulator::type_of_sums() const {
  return c10::typeMetaToScalarType(options_.dtype());
}

PartialAttention Accumulator::room(at::ScalarType dtype) const {
  const bool is_first = !sums_ && waiting_.empty();
  return empty(memory_.defined() && is_first ? type_of_sums() : dtype);
}

void Accumulator::add(PartialAttention part, int64_t row, int64_t token) {
  const auto sizes = part.out.sizes();
  if (part.out.numel() == 0) return;
  if (memory_.defined() && part.out.is_same(memory_)) {
    promise(!sums_ && waiting_.empty(),
            "Accumulator: a first part came after others");
    sums_ = std::move(part);
    return;
  }
  // A part about a few tokens is folded where it belongs; waiting for others
  // would have all tokens visited for it.
  const bool broad =
      part.out.is_cuda() && sizes[0] == sizes_[0] && 2 * sizes[1] >= sizes_[1];
  if (!broad) {
    fold_in_place(box(sums(), row, sizes[0], token, sizes[1]), part);
    return;
  }
  const auto bytes = static_cast<int64_t>(part.out.nbytes());
  const int64_t most =
      most_waiting_bytes(kind_, c10::multiply_integers(sizes_));
  if (!waiting_.empty() &&
      (waiting_bytes_ + bytes > most || waiting_.size() == kMostFolded ||
       waiting_.front().part.out.dtype() != part.out.dtype())) {
    fold_waiting();
  }
  waiting_.push_back({std::move(part), token});
  waiting_bytes_ += bytes;
}

Accumulator::Turn Accumulator::begin_turn(at::ScalarType dtype) {
  promise(kind_ == Kind::attention, "Accumulator: a turn of a plain sum");
  Turn turn;
  if (sums_ || !waiting_.empty()) turn.before = sums();
  if (!expects_more_) {
    turn.total = empty(dtype);
    if (turn.before.lse.defined()) turn.total.lse = turn.before.lse;
    turn.sink = asked_sink_;
  } else {
    turn.total =
        turn.before.out.defined() ? turn.before : empty(type_of_sums());
  }
  return turn;
}

void Accumulator::end_turn(Turn turn) {
  if (expects_more_) {
    sums_ = std::move(turn.total);
    return;
  }
  has_sink_ = turn.sink.defined();
  sums_.reset();
  waiting_bytes_ = static_cast<int64_t>(turn.total.out.nbytes());
  waiting_.push_back({std::move(turn.total)});
}

TokenRange Accumulator::reach_of_waiting() const {
  TokenRange reach{sizes_[1], 0};
  for (const auto& [part, token] : waiting_) {
    reach.begin = std::min(reach.begin, token);
    reach.end = std::max(reach.end, token + part.out.size(1));
  }
  return reach;
}

void Accumulator::fold_waiting() {
  if (!sums_) {
    PartialAttention made = empty(type_of_sums());
    TokenRange reach{0, sizes_[1]};
    if (memory_.defined() && !waiting_.empty()) {
      const TokenRange said = reach_of_waiting();
      if (said.begin <= wanted_.begin && said.end >= wanted_.end) reach = said;
    }
    const bool done =
        !waiting_.empty() &&
        fold_on_device(nullptr, placed_from(reach.begin, waiting_),
                       box(made, 0, sizes_[0], reach.begin, reach.size()));
    if (done) {
      forget_waiting();
    } else {
      made.out.zero_();
      if (made.lse.defined()) made.lse.fill_(kMinusInfinity);
    }
    sums_ = std::move(made);
  }
  if (waiting_.empty()) return;
  const TokenRange reach = reach_of_waiting();
  const std::vector<PlacedPart> parts = placed_from(reach.begin, waiting_);
  const PartialAttention here =
      box(*sums_, 0, sizes_[0], reach.begin, reach.size());
  PartialAttention into = here;
  // Logs in other memory spare the kernel's threads waiting for one another.
  if (here.lse.defined() && reach.size() == sizes_[1]) {
    into.lse = at::empty_like(here.lse);
  }
  if (fold_on_device(&here, parts, into)) {
    if (reach.size() == sizes_[1]) sums_->lse = into.lse;
  } else {
    for (const auto& [part, token] : parts) {
      fold_in_place(box(here, 0, sizes_[0], token, part.out.size(1)), part);
    }
  }
  forget_waiting();
}

void Accumulator::forget_waiting() {
  waiting_.clear();
  waiting_bytes_ = 0;
}

PartialAttention& Accumulator::sums() {
  if (!sums_ || !waiting_.empty()) fold_waiting();
  return *sums_;
}

PartialAttention Accumulator::finish(at::ScalarType dtype) {
  if (!waiting_.empty()) {
    PartialAttention& first = waiting_.front().part;
    if (!sums_ && waiting_.size() == 1 && first.out.scalar_type() == dtype &&
        first.out.size(1) == sizes_[1]) {
      return std::move(first);
    }
    PartialAttention made = empty(dtype);
    if (fold_on_device(sums_ ? &*sums_ : nullptr, waiting_, made)) return made;
  }
  const PartialAttention& all = sums();
  return {all.out.to(dtype), all.lse};
}

}  // namespace longspan
