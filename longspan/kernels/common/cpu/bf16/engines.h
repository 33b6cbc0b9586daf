#pragma once

#include "longspan/kernels/common/cpu/bf16/amx_tiles.h"
#include "longspan/kernels/common/cpu/bf16/dot_engine.h"
#include "longspan/kernels/common/cpu/bf16/tile_engine.h"

namespace longspan {
namespace {

/// What multiplies pairs of bfloat16 at each level that does.
using Avx512Bf16Engine = DotEngine;
using AmxEngine = TileEngine<AmxTiles>;

}  // namespace
}  // namespace longspan
