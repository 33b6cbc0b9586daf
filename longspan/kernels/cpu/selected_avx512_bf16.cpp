#include "longspan/kernels/cpu/bf16/dot_engine.h"
#include "longspan/kernels/cpu/bf16/selected_backward.h"

namespace longspan {

const SelectedSteps kAvx512Bf16SelectedSteps = selected_pair_steps<DotEngine>();

}  // namespace longspan
