#include "longspan/kernels/cpu/simd/selected_backward.h"
#include "longspan/kernels/cpu/simd/selected_forward.h"

namespace longspan {

const SelectedStepsOfTypes kPortableSelectedSteps = {
    {selected_steps<float>(), selected_steps<Bfloat16>(),
     selected_steps<Float16>(), selected_steps<double>()}};

}  // namespace longspan
