#include "longspan/kernels/cpu/bf16/dot_engine.h"
#include "longspan/kernels/cpu/selection/pairs.h"

namespace longspan {

const KeyScoreSteps kAvx512Bf16Scores =
    key_score_steps<PairOperands<DotEngine>>();

}  // namespace longspan
