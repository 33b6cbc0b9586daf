#include "longspan/kernels/attention/cpu/simd/steps.h"

namespace longspan {

const AttentionSteps kAvx2Steps = attention_steps();

}  // namespace longspan
