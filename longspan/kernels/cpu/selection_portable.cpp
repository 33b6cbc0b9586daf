#include "longspan/kernels/cpu/selection/wide.h"

namespace longspan {

const KeySelectionSteps kPortableSelection = key_selection_steps();

}  // namespace longspan
