#include "longspan/models/glm_dsa.h"

#include <ATen/ATen.h>

#include <cmath>

#include "longspan/attention/selected.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

constexpr const char* kGlm = "glm_dsa";

/// Channels of a head that are not rotated, of a value, and of a row.
struct Widths {
  int64_t keys, values, latent, turned;
};

Widths check_tensors(const GlmDsaTensors& t, const LayerShare& share,
                     const GlmDsaOptions& options) {
  const int64_t any = LayerShare::kAny;
  share.check_tokens(kGlm, "q", t.q, {any, any});
  share.check_tokens(kGlm, "rows", t.rows, {any});
  check(
      t.expansion.defined() && t.expansion.dim() == 3 &&
          t.expansion.size(0) == t.q.size(1),
      kGlm, ": `expansion` is ",
      t.expansion.defined() ? describe(t.expansion) : std::string("not there"),
      "; expected [", t.q.size(1), ", key and value, latent]");
  Widths widths{
      .keys = 0, .values = 0, .latent = t.expansion.size(2), .turned = 0};
  widths.turned = t.rows.size(1) - widths.latent;
  widths.keys = t.q.size(2) - widths.turned;
  widths.values = t.expansion.size(1) - widths.keys;
  check(widths.turned >= 0 && widths.keys >= 0 && widths.values >= 1, kGlm,
        ": `rows` is ", describe(t.rows), ", `q` ", describe(t.q),
        " and `expansion` ", describe(t.expansion),
        "; expected [tokens, C + R], [tokens, H, K + R] and [H, K + V, C]");
  if (t.selection.defined()) {
    check(!t.index_q.defined() && !options.train_indexer, kGlm,
          ": got a selection and an indexer; give one of them");
    return widths;
  }
  check(options.slots >= 1, kGlm, ": `slots` is ", options.slots,
        "; expected at least 1");
  share.check_tokens(kGlm, "index_q", t.index_q, {any, any});
  share.check_tokens(kGlm, "index_k", t.index_k, {t.index_q.size(2)});
  share.check_tokens(kGlm, "index_weights", t.index_weights,
                     {t.index_q.size(1)});
  return widths;
}

/// [tokens, H, A] times a matrix of each head, [H, A, B].
at::Tensor of_heads(const at::Tensor& x, const at::Tensor& matrices) {
  return x.transpose(0, 1).matmul(matrices).transpose(0, 1);
}

}  // namespace

GlmDsaAnswer glm_dsa(const GlmDsaTensors& tensors, const LayerShare& share,
                     const GlmDsaOptions& options) {
  const Widths widths = check_tensors(tensors, share, options);
  const at::Tensor matrices = tensors.expansion.to(tensors.q.scalar_type());
  const at::Tensor to_keys = matrices.narrow(1, 0, widths.keys);
  const at::Tensor to_values =
      matrices.narrow(1, widths.keys, widths.values).transpose(1, 2);
  const at::Tensor q =
      at::cat({of_heads(tensors.q.narrow(2, 0, widths.keys), to_keys),
               tensors.q.narrow(2, widths.keys, widths.turned)},
              -1);
  const SelectedOptions attention = {
      .scale = options.scale.value_or(
          1 / std::sqrt(static_cast<double>(tensors.q.size(2)))),
      .value_dim = widths.latent};
  GlmDsaAnswer answer{};
  if (tensors.selection.defined()) {
    answer.out =
        attend_selected(q, tensors.rows, tensors.selection, share.layout(),
                        share.group(), attention, options.fetch)
            .out;
    answer.selection = tensors.selection;
  } else {
    LayerAnswer found = select_and_attend(
        {q, tensors.rows, tensors.index_q, tensors.index_k,
         tensors.index_weights},
        share.layout(), share.group(),
        {.slots = options.slots, .scores = options.train_indexer}, attention,
        options.fetch, /*with_target=*/options.train_indexer);
    answer = {found.out, found.indices, found.scores, found.target};
  }
  answer.out = of_heads(answer.out, to_values);
  return answer;
}

}  // namespace longspan
