#include "longspan/kernels/common/cpu/bf16/dot_engine.h"
#include "longspan/kernels/select_keys/cpu/pairs.h"

namespace longspan {

const KeyScoreSteps kAvx512Bf16Scores =
    key_score_steps<PairOperands<DotEngine>>();

}  // namespace longspan
