#include "longspan/kernels/attend_selected/cpu/bf16/backward.h"
#include "longspan/kernels/common/cpu/bf16/dot_engine.h"

namespace longspan {

const SelectedSteps kAvx512Bf16SelectedSteps = selected_pair_steps<DotEngine>();

}  // namespace longspan
