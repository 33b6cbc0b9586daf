#include "longspan/ops/move_tokens.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <span>
#include <type_traits>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/move/cpu/move_runs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/threads.h"

namespace longspan {

namespace {

/// Checks everything about the arguments that does not need the runs' values.
int64_t checked_axis(const at::Tensor& source, int64_t axis,
                     const at::Tensor& runs) {
  check(source.dim() > 0, "move_tokens: `source` has no axes");
  check(axis >= -source.dim() && axis < source.dim(), "move_tokens: axis ",
        axis, " of a tensor with ", source.dim(), " axes");
  check(runs.dim() == 2 && runs.sym_size(1) == 3 &&
            runs.scalar_type() == at::kLong,
        "move_tokens: `runs` is ", describe(runs),
        "; expected int64 [n, 3] = (source, target, length)");
  return axis < 0 ? axis + source.dim() : axis;
}

/// The runs as the kernel wants them, checked. Runs that ascend on both sides
/// and are not empty, as those of our own moves, are used where they lie.
class CheckedRuns {
 public:
  CheckedRuns(const at::Tensor& runs, int64_t source_tokens,
              int64_t target_tokens) {
    check(runs.device().is_cpu(), "move_tokens: `runs` is on ", runs.device(),
          "; they are plain numbers, keep them on the CPU");
    check(target_tokens >= 0, "move_tokens: ", target_tokens, " target tokens");
    table_ = runs.contiguous();
    static_assert(std::is_standard_layout_v<Run> &&
                  sizeof(Run) == 3 * sizeof(int64_t));
    view_ = {reinterpret_cast<const Run*>(table_.const_data_ptr<int64_t>()),
             static_cast<std::size_t>(table_.size(0))};
    if (ascend(source_tokens, target_tokens)) return;
    sorted_ =
        Moves::of({view_.begin(), view_.end()}, source_tokens, target_tokens);
    view_ = sorted_.runs();
  }
  CheckedRuns(const CheckedRuns&) = delete;
  CheckedRuns& operator=(const CheckedRuns&) = delete;

  std::span<const Run> view() const { return view_; }

  /// The runs as int64 [n, 3].
  at::Tensor table() const {
    return view_.data() == sorted_.runs().data() ? runs_tensor(sorted_)
                                                 : table_;
  }

  int64_t moved_tokens() const {
    int64_t moved = 0;
    for (const Run& run : view_) moved += run.length;
    return moved;
  }

 private:
  bool ascend(int64_t source_tokens, int64_t target_tokens) const {
    int64_t source = 0;
    int64_t target = 0;
    for (const Run& run : view_) {
      if (run.length <= 0 || run.source < source || run.target < target ||
          run.length > source_tokens - run.source ||
          run.length > target_tokens - run.target) {
        return false;
      }
      source = run.source + run.length;
      target = run.target + run.length;
    }
    return true;
  }

  at::Tensor table_;
  Moves sorted_;
  std::span<const Run> view_;
};

void check_fill(const at::Tensor& source, const at::Scalar& fill) {
  check(fits(fill, source.scalar_type()), "move_tokens: fill ", fill,
        " does not fit ", describe(source),
        "; choose another, or convert the tensor");
}

std::vector<c10::SymInt> target_sizes(const at::Tensor& source, int64_t axis,
                                      const c10::SymInt& target_tokens) {
  auto sizes = source.sym_sizes().vec();
  sizes[static_cast<std::size_t>(axis)] = target_tokens;
  return sizes;
}

at::Tensor move_meta(const at::Tensor& source, int64_t axis,
                     const at::Tensor& runs, c10::SymInt target_tokens,
                     const at::Scalar& /*fill*/) {
  axis = checked_axis(source, axis, runs);
  check(source.is_meta(), "move_tokens: `runs` is on meta, which holds no ",
        "values; keep them on the CPU");
  return at::empty_symint(target_sizes(source, axis, target_tokens),
                          source.options());
}

at::Tensor move_cpu(const at::Tensor& source_in, int64_t axis,
                    const at::Tensor& runs, int64_t target_tokens,
                    const at::Scalar& fill) {
  axis = checked_axis(source_in, axis, runs);
  const CheckedRuns checked(runs, source_in.size(axis), target_tokens);
  const at::Tensor source = source_in.contiguous();
  auto sizes = source.sizes().vec();
  sizes[static_cast<std::size_t>(axis)] = target_tokens;
  at::Tensor target = at::empty(sizes, source.options());
  if (target.numel() == 0) return target;
  // One element of the right type, taken apart into bytes by the kernel.
  const bool has_gaps = checked.moved_tokens() < target_tokens;
  if (has_gaps) check_fill(source, fill);
  const at::Tensor element =
      at::full({1}, has_gaps ? fill : at::Scalar(0), source.options());
  int64_t slices = 1;
  for (int64_t i = 0; i < axis; ++i) slices *= source.size(i);
  const auto element_bytes = static_cast<int64_t>(source.element_size());
  move_runs(
      {.source = static_cast<const std::byte*>(source.const_data_ptr()),
       .target = static_cast<std::byte*>(target.mutable_data_ptr()),
       .slices = slices,
       .source_tokens = source.size(axis),
       .target_tokens = target_tokens,
       .token_bytes = target.numel() / slices / target_tokens * element_bytes,
       .runs = checked.view(),
       .fill = {static_cast<const std::byte*>(element.const_data_ptr()),
                static_cast<std::size_t>(element_bytes)}},
      torch_threads());
  return target;
}

/// Other devices: one index for each moved token, built on the device from the
/// runs, then one gather and, where there are gaps, one scatter.
at::Tensor move_indexed(const at::Tensor& source, int64_t axis,
                        const at::Tensor& runs, int64_t target_tokens,
                        const at::Scalar& fill) {
  axis = checked_axis(source, axis, runs);
  const CheckedRuns checked(runs, source.size(axis), target_tokens);
  const int64_t moved = checked.moved_tokens();
  const at::Tensor columns = checked.table().t().contiguous().to(
      source.device(), /*non_blocking=*/true);
  const at::Tensor lengths = columns.select(0, 2);
  // The optional picks the overload that takes the size of the result, which
  // spares a read from the device.
  const at::Tensor run =
      at::repeat_interleave(lengths, std::optional<int64_t>(moved));
  const at::Tensor inside = at::arange(moved, columns.options()) -
                            (lengths.cumsum(0) - lengths).index_select(0, run);
  const at::Tensor from = columns.select(0, 0).index_select(0, run) + inside;
  at::Tensor picked = source.index_select(axis, from);
  if (moved == target_tokens) return picked;
  check_fill(source, fill);
  auto sizes = source.sizes().vec();
  sizes[static_cast<std::size_t>(axis)] = target_tokens;
  at::Tensor target = at::full(sizes, fill, source.options());
  const at::Tensor to = columns.select(0, 1).index_select(0, run) + inside;
  return target.index_copy_(axis, to, picked);
}

at::Tensor call_move(const at::Tensor& source, int64_t axis,
                     const at::Tensor& runs, c10::SymInt target_tokens,
                     const at::Scalar& fill) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, int64_t, const at::Tensor&,
                         c10::SymInt, const at::Scalar&)>(
          "longspan::move_tokens");
  return op.call(source, axis, runs, std::move(target_tokens), fill);
}

class MoveFunction : public torch::autograd::Function<MoveFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& source, int64_t axis,
                            const at::Tensor& runs, c10::SymInt target_tokens,
                            const at::Scalar& fill) {
    ctx->saved_data["axis"] = checked_axis(source, axis, runs);
    ctx->saved_data["source_tokens"] = source.sym_size(axis);
    ctx->save_for_backward({runs});
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_move(source, axis, runs, std::move(target_tokens), fill);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const at::Tensor runs = ctx->get_saved_variables()[0];
    // Source and target change places.
    const at::Tensor inverse = at::cat(
        {runs.narrow(1, 1, 1), runs.narrow(1, 0, 1), runs.narrow(1, 2, 1)}, 1);
    at::Tensor grad =
        call_move(grads[0], ctx->saved_data["axis"].toInt(), inverse,
                  ctx->saved_data["source_tokens"].toSymInt(), 0);
    return {grad, {}, {}, {}, {}};
  }
};

at::Tensor move_autograd(const at::Tensor& source, int64_t axis,
                         const at::Tensor& runs, c10::SymInt target_tokens,
                         const at::Scalar& fill) {
  refuse_transforms("unshard");
  if (has_tangent(source)) refuse_forward_mode("unshard");
  return MoveFunction::apply(source, axis, runs, std::move(target_tokens),
                             fill);
}

}  // namespace

at::Tensor runs_tensor(const Moves& moves) {
  const auto& runs = moves.runs();
  at::Tensor table =
      at::empty({std::ssize(runs), 3}, at::TensorOptions(at::kLong));
  int64_t* entry = table.mutable_data_ptr<int64_t>();
  for (const Run& run : runs) {
    *entry++ = run.source;
    *entry++ = run.target;
    *entry++ = run.length;
  }
  return table;
}

at::Tensor move_tokens_by_index(const at::Tensor& source, int64_t axis,
                                const Moves& moves, const at::Scalar& fill) {
  return move_indexed(source, axis, runs_tensor(moves), moves.target_tokens(),
                      fill);
}

TokenMover::TokenMover(Moves moves)
    : moves_(std::move(moves)), runs_(runs_tensor(moves_)) {}

at::Tensor TokenMover::operator()(const at::Tensor& source, int64_t axis,
                                  const at::Scalar& fill) const {
  check(source.defined(), "move_tokens: `source` is not a tensor");
  check(axis >= 0 && axis < source.dim(), "move_tokens: axis ", axis,
        " of a tensor with ", source.dim(), " axes");
  check(source.sym_size(axis) == moves_.source_tokens(), "move_tokens: axis ",
        axis, " of ", describe(source), " is not the ", moves_.source_tokens(),
        " tokens that move");
  if (moves_.is_identity()) return source;
  return call_move(source, axis, runs_, moves_.target_tokens(), fill);
}

at::Tensor move_tokens(const at::Tensor& source, int64_t axis,
                       const Moves& moves, const at::Scalar& fill) {
  return TokenMover(moves)(source, axis, fill);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "move_tokens(Tensor source, int axis, Tensor runs, SymInt target_tokens, "
      "Scalar fill) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("move_tokens", move_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("move_tokens", move_cpu);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("move_tokens", move_indexed);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("move_tokens", move_autograd);
}

}  // namespace longspan
