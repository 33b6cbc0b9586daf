#include "longspan/kernels/attend_selected/cpu/bf16/backward.h"
#include "longspan/kernels/common/cpu/bf16/amx_tiles.h"
#include "longspan/kernels/common/cpu/bf16/tile_engine.h"

namespace longspan {

const SelectedSteps kAmxSelectedSteps =
    selected_pair_steps<TileEngine<AmxTiles>>();

}  // namespace longspan
