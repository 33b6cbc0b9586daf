#pragma once

#include <string>

#include "longspan/kernels/levels/levels.h"

/// The levels above AVX-512, which multiply bfloat16 in pairs and run other
/// types as AVX-512 does.
namespace longspan {

AttentionKernels avx512_bf16_kernels();
AttentionKernels amx_kernels();

/// Why this process cannot use them, or nothing; asks for what they need beyond
/// the level below. The first request for AMX also asks the system for the room
/// to save tiles.
std::string why_not_avx512_bf16();
std::string why_not_amx();

}  // namespace longspan
