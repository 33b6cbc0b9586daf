#include "longspan/kernels/attention/cpu/bf16/backward_keys.h"
#include "longspan/kernels/attention/cpu/bf16/forward.h"
#include "longspan/kernels/common/cpu/bf16/dot_engine.h"

namespace longspan {

const PanelSteps kAvx512Bf16Steps = {
    .forward = panel_forward_steps<DotEngine>(),
    .backward = panel_backward_steps<DotEngine>()};

}  // namespace longspan
