#include "longspan/kernels/pool/pool_listed.h"
#include "longspan/kernels/common/none/absent.h"

namespace longspan {

std::optional<std::string> why_not_pool_listed() {
  return no_compiler();
}

void pool_listed(const PoolListedArgs<float>& /*args*/, void* /*stream*/) {
  never("pool_listed");
}

void pool_listed(const PoolListedArgs<double>& /*args*/, void* /*stream*/) {
  never("pool_listed");
}

void pool_listed_backward(const PoolListedArgs<float>& /*args*/,
                          const PoolListedGradients<float>& /*gradients*/,
                          void* /*stream*/) {
  never("pool_listed_backward");
}

void pool_listed_backward(const PoolListedArgs<double>& /*args*/,
                          const PoolListedGradients<double>& /*gradients*/,
                          void* /*stream*/) {
  never("pool_listed_backward");
}

}  // namespace longspan
