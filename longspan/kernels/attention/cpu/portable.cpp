#include "longspan/kernels/attention/cpu/simd/steps.h"

namespace longspan {

const AttentionSteps kPortableSteps = attention_steps();

}  // namespace longspan
