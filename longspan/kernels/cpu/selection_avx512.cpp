#include "longspan/kernels/cpu/selection/wide.h"

namespace longspan {

const KeySelectionSteps kAvx512Selection = key_selection_steps();

}  // namespace longspan
