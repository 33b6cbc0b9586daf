#include "longspan/kernels/select_keys/cpu/wide.h"

namespace longspan {

const KeySelectionSteps kAvx512Selection = key_selection_steps();

}  // namespace longspan
