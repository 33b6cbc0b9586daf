#include "longspan/kernels/select_keys/cpu/wide.h"

namespace longspan {

const KeySelectionSteps kPortableSelection = key_selection_steps();

}  // namespace longspan
