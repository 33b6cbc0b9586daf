#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "longspan/ops/attend_selected.h"
#include "longspan/ops/select_keys.h"

namespace longspan::selected {

/// The operators of selected.h below autograd: what they check, and what they
/// do on this rank.

using OptionalTensor = std::optional<at::Tensor>;
using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors5 =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensors6 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                            at::Tensor, at::Tensor>;

/// What shapes and types say; also for traced tensors. With a layout every rank
/// brings the keys of its own tokens.
void check_select(const char* who, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& weights, const OptionalTensor& start,
                  const OptionalTensor& end, const OptionalTensor& layout,
                  const c10::SymInt& slots);
/// That the call is traced, not run with a layout that lost its values.
void check_meta(const char* who, const at::Tensor& q);
void check_keys(const char* who, const char* name, const at::Tensor& k,
                const at::Tensor& q, const OptionalTensor& layout);

void check_score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices,
                 const OptionalTensor& layout);
void check_weights(const at::Tensor& q, const at::Tensor& kv,
                   const at::Tensor& indices, const at::Tensor& lse,
                   const OptionalTensor& sink, const OptionalTensor& layout,
                   double scale);

/// The same for a layer of both.
void check_layer(const at::Tensor& q, const at::Tensor& kv,
                 const at::Tensor& index_q, const at::Tensor& index_k,
                 const at::Tensor& weights, const OptionalTensor& start,
                 const OptionalTensor& end, const OptionalTensor& sink,
                 const OptionalTensor& layout, const c10::SymInt& slots,
                 double scale, int64_t value_dim);

Tensors2 select(const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& weights, const OptionalTensor& start,
                const OptionalTensor& end, const OptionalTensor& layout,
                int64_t slots, bool scores, bool balanced,
                const std::string& group);

at::Tensor score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices,
                 const OptionalTensor& layout, const std::string& fetch,
                 const std::string& group);

Tensors3 score_backward(const at::Tensor& dscores, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& weights,
                        const at::Tensor& indices, const OptionalTensor& layout,
                        const std::string& fetch, const std::string& group);

Tensors2 attend(const at::Tensor& q, const at::Tensor& kv,
                const at::Tensor& indices, const OptionalTensor& sink,
                const OptionalTensor& layout, double scale, int64_t value_dim,
                const std::string& fetch, const std::string& group);

Tensors3 attend_backward(const at::Tensor& dout, const at::Tensor& q,
                         const at::Tensor& kv, const at::Tensor& indices,
                         const OptionalTensor& sink, const at::Tensor& out,
                         const at::Tensor& lse, const OptionalTensor& layout,
                         double scale, int64_t value_dim,
                         const std::string& fetch, const std::string& group);

at::Tensor weights(const at::Tensor& q, const at::Tensor& kv,
                   const at::Tensor& indices, const at::Tensor& lse,
                   const OptionalTensor& sink, const OptionalTensor& layout,
                   double scale, const std::string& fetch,
                   const std::string& group);

/// One layer: out, lse, scores, target, indices.
Tensors5 layer(const at::Tensor& q, const at::Tensor& kv,
               const at::Tensor& index_q, const at::Tensor& index_k,
               const at::Tensor& weights, const OptionalTensor& start,
               const OptionalTensor& end, const OptionalTensor& sink,
               const OptionalTensor& layout, int64_t slots, double scale,
               int64_t value_dim, bool scores, bool target, bool balanced,
               const std::string& fetch, const std::string& group);

/// dq, dkv, dsink, and where the indexer is trained its own three, else empty.
Tensors6 layer_backward(const at::Tensor& dout, const at::Tensor& dscores,
                        const at::Tensor& q, const at::Tensor& kv,
                        const at::Tensor& index_q, const at::Tensor& index_k,
                        const at::Tensor& weights, const at::Tensor& indices,
                        const OptionalTensor& sink, const at::Tensor& out,
                        const at::Tensor& lse, const OptionalTensor& layout,
                        double scale, int64_t value_dim, bool trained,
                        const std::string& fetch, const std::string& group);

}  // namespace longspan::selected
