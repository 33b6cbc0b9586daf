#include "longspan/kernels/attend_selected/cpu/simd/backward.h"
#include "longspan/kernels/attend_selected/cpu/simd/forward.h"

namespace longspan {

const SelectedStepsOfTypes kPortableSelectedSteps = {
    {selected_steps<float>(), selected_steps<Bfloat16>(),
     selected_steps<Float16>(), selected_steps<double>()}};

}  // namespace longspan
