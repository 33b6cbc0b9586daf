#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/kernels/common/none/absent.h"

namespace longspan::hopper {

std::optional<std::string> why_not_attention(const AttentionArgs& /*args*/) {
  return no_compiler();
}

ForwardWork forward_work(const DenseForwardArgs& /*args*/) {
  never("attention");
}

void attention_forward(const DenseForwardArgs& /*args*/,
                       const ForwardWork& /*work*/, void* /*memory*/,
                       void* /*stream*/) {
  never("attention");
}

std::optional<std::string> why_not_attention_backward(
    const AttentionArgs& /*args*/) {
  return no_compiler();
}

bool adds_up_queries(const AttentionArgs& /*args*/) {
  return false;
}

BackwardWork backward_work(const DenseBackwardArgs& /*args*/) {
  never("attention backward");
}

void attention_backward(const DenseBackwardArgs& /*args*/,
                        const BackwardWork& /*work*/, void* /*memory*/,
                        void* /*stream*/) {
  never("attention backward");
}

}  // namespace longspan::hopper
