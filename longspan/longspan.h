#pragma once

/// All of Longspan that needs no torch: who owns which token, where documents
/// lie, who sees whom, what each rank computes and sends, and pictures of it.
/// Link Longspan::core. What needs torch is in <longspan/torch.h>.

#include "longspan/core/coverage.h"
#include "longspan/core/document_runs.h"
#include "longspan/core/errors.h"
#include "longspan/core/key_lines.h"
#include "longspan/core/mask.h"
#include "longspan/core/moves.h"
#include "longspan/core/multiple.h"
#include "longspan/core/named_layout.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/core/padding.h"
#include "longspan/core/per_token.h"
#include "longspan/core/tile.h"
#include "longspan/core/token_range.h"
#include "longspan/core/work.h"
#include "longspan/draw/draw.h"
#include "longspan/draw/picture.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/halo_plan.h"
#include "longspan/plan/plan.h"
#include "longspan/plan/pool_plan.h"
#include "longspan/plan/state_plan.h"
#include "longspan/plan/strategy.h"
