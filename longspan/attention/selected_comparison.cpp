#include "longspan/attention/detail/selected_comparison.h"

#include <ATen/ATen.h>

#include <limits>
#include <sstream>

#include "longspan/attention/detail/select_keys.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Which slots hold a key that is nowhere in the other list.
at::Tensor missing_in(const at::Tensor& other, const at::Tensor& list,
                      const at::Tensor& scores) {
  if (other.size(-1) == 0) return at::isneginf(scores).logical_not();
  const at::Tensor sorted = std::get<0>(other.sort(-1)).contiguous();
  const at::Tensor place =
      at::searchsorted(sorted, list).clamp_max(other.size(-1) - 1);
  return sorted.gather(-1, place).ne(list).logical_and_(
      at::isneginf(scores).logical_not());
}

}  // namespace

SelectionComparison compare_selections(const at::Tensor& a, const at::Tensor& b,
                                       const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& weights,
                                       const std::optional<at::Tensor>& layout,
                                       const Group& group) {
  const at::NoGradGuard no_grad;
  const auto check_lists = [&](const char* name, const at::Tensor& t) {
    check((t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) &&
              q.dim() >= 3 && t.dim() == q.dim() - 1 &&
              t.sizes().slice(0, t.sizes().size() - 1) ==
                  q.sizes().slice(0, q.sizes().size() - 2),
          "compare_selections: `", name, "` is ", describe(t), " but `q` ",
          describe(q), "; expected int32 or int64 [Tq, slots]");
  };
  check_lists("a", a);
  check_lists("b", b);
  const auto scored = [&](const at::Tensor& lists, bool sizes) {
    const selected::ScoreSelected call{
        sizes ? q.abs() : q,
        sizes ? k.abs() : k,
        sizes ? weights.abs() : weights,
        lists,
        {.layout = layout, .group = group.name()}};
    return call.run().to(at::kDouble);
  };
  const at::Tensor of_a = scored(a, false), of_b = scored(b, false);
  const at::Tensor sizes =
      at::cat({scored(a, true), scored(b, true)}, -1).clamp_min(0);
  const at::Tensor first = a.to(at::kLong), second = b.to(at::kLong);
  const at::Tensor lost = missing_in(second, first, of_a);
  const at::Tensor gained = missing_in(first, second, of_b);

  SelectionComparison result;
  result.slots = a.numel();
  result.per_query = at::maximum(lost.sum(-1), gained.sum(-1));
  result.differing = result.per_query.sum().item<int64_t>();
  result.queries = result.per_query.gt(0).sum().item<int64_t>();
  if (result.queries == 0) return result;
  // Empty slots are no least score; a query without keys has none.
  const auto with_column = [&](const at::Tensor& t, double value) {
    return at::constant_pad_nd(t, {0, 1}, value);
  };
  const at::Tensor least =
      with_column(of_a.masked_fill(at::isneginf(of_a), kInfinity), kInfinity)
          .amin(-1, true);
  const at::Tensor size = with_column(sizes, 0).amax(-1, true);
  const auto gaps = [&](const at::Tensor& scores, const at::Tensor& differs) {
    const at::Tensor far = (scores - least).abs();
    const at::Tensor gap = (far / size).nan_to_num(kInfinity, kInfinity);
    return gap.masked_fill(differs.logical_not().logical_or_(far == 0), 0);
  };
  const at::Tensor worst =
      with_column(at::cat({gaps(of_a, lost), gaps(of_b, gained)}, -1), 0)
          .amax(-1)
          .flatten();
  result.worst_query = worst.argmax().item<int64_t>();
  result.worst_gap = worst[result.worst_query].item<double>();
  return result;
}

std::string SelectionComparison::to_string() const {
  std::ostringstream text;
  if (differing == 0) {
    text << "selections agree in all " << slots << " slots";
    return text.str();
  }
  text.precision(2);
  text << "selections differ in " << differing << " of " << slots << " slots ("
       << queries << (queries == 1 ? " query" : " queries") << "); worst gap "
       << worst_gap << " of the scores, at query " << worst_query;
  return text.str();
}

}  // namespace longspan
