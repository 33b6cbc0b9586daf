#include "longspan/ops/gradient_flow.h"

#include <utility>

namespace longspan {

namespace {

thread_local bool flows_here = false;

}  // namespace

bool gradients_flow() {
  return flows_here;
}

GradientFlow::GradientFlow(bool flows)
    : before_(std::exchange(flows_here, flows)) {}

GradientFlow::~GradientFlow() {
  flows_here = before_;
}

}  // namespace longspan
