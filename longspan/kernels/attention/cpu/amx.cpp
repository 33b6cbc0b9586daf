#include "longspan/kernels/attention/cpu/bf16/backward_keys.h"
#include "longspan/kernels/attention/cpu/bf16/forward.h"
#include "longspan/kernels/common/cpu/bf16/amx_tiles.h"
#include "longspan/kernels/common/cpu/bf16/tile_engine.h"

namespace longspan {

const PanelSteps kAmxSteps = {
    .forward = panel_forward_steps<TileEngine<AmxTiles>>(),
    .backward = panel_backward_steps<TileEngine<AmxTiles>>()};

}  // namespace longspan
