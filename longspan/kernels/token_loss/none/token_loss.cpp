#include "longspan/kernels/token_loss/token_loss.h"
#include "longspan/kernels/common/none/absent.h"

namespace longspan {

std::optional<std::string> why_not_token_losses() {
  return no_compiler();
}

void token_losses(const TokenLossArgs<float>& /*args*/, void* /*stream*/) {
  never("token_losses");
}

void token_losses(const TokenLossArgs<double>& /*args*/, void* /*stream*/) {
  never("token_losses");
}

}  // namespace longspan
