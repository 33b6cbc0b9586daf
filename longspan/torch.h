#pragma once

/// All of Longspan: batches, groups and their collectives, and attention over
/// the ranks, beside everything of <longspan/longspan.h>. Link Longspan::torch.

#include "longspan/attention/attend.h"
#include "longspan/attention/fetch.h"
#include "longspan/attention/selected.h"
#include "longspan/batch/cut.h"
#include "longspan/batch/derive.h"
#include "longspan/batch/documents.h"
#include "longspan/batch/groups.h"
#include "longspan/batch/lay_out.h"
#include "longspan/batch/pack.h"
#include "longspan/batch/row_batch.h"
#include "longspan/batch/shard.h"
#include "longspan/batch/shift.h"
#include "longspan/batch/token_table.h"
#include "longspan/comm/agree.h"
#include "longspan/comm/collectives.h"
#include "longspan/comm/disagreement.h"
#include "longspan/comm/group.h"
#include "longspan/comm/lost_peer.h"
#include "longspan/comm/needed.h"
#include "longspan/comm/reduce_loss.h"
#include "longspan/comm/run_ranks.h"
#include "longspan/longspan.h"
#include "longspan/ops/key_windows.h"
#include "longspan/ops/selection.h"
