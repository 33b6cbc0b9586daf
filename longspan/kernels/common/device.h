#pragma once

namespace longspan {

/// The generation of the current CUDA device, 90 for Hopper; 0 when there is
/// none, or when longspan was built without a CUDA compiler.
int device_generation();

}  // namespace longspan
