#include "longspan/kernels/cpu/bf16/amx_tiles.h"
#include "longspan/kernels/cpu/bf16/selected_backward.h"
#include "longspan/kernels/cpu/bf16/tile_engine.h"

namespace longspan {

const SelectedSteps kAmxSelectedSteps =
    selected_pair_steps<TileEngine<AmxTiles>>();

}  // namespace longspan
