#pragma once

/// Layers of model families over the ranks of a group as functions, and their
/// weights, beside everything of <longspan/torch.h>. Link Longspan::models.
///
/// The layers as modules are in <longspan/models/layers.h>, by itself: torch's
/// modules take seconds to compile.

#include "longspan/models/convolve.h"
#include "longspan/models/deepseek_v4.h"
#include "longspan/models/delta.h"
#include "longspan/models/glm_dsa.h"
#include "longspan/models/layer_share.h"
#include "longspan/models/mamba2.h"
#include "longspan/models/rotary.h"
#include "longspan/models/safetensors.h"
#include "longspan/models/weights.h"
#include "longspan/torch.h"
