#include "longspan/kernels/common/cpu/bf16/amx_tiles.h"
#include "longspan/kernels/common/cpu/bf16/tile_engine.h"
#include "longspan/kernels/select_keys/cpu/pairs.h"

namespace longspan {

const KeyScoreSteps kAmxScores =
    key_score_steps<PairOperands<TileEngine<AmxTiles>>>();

}  // namespace longspan
