/// The forward kernels of dense attention, compiled for the machine on paper.
#include "longspan/kernels/attention/hopper/forward/instantiate/dims_128.cu"
#include "longspan/kernels/attention/hopper/forward/instantiate/dims_192.cu"
#include "longspan/kernels/attention/hopper/forward/instantiate/dims_256.cu"
#include "longspan/kernels/attention/hopper/forward/instantiate/dims_512.cu"
#include "longspan/kernels/attention/hopper/forward/instantiate/dims_64.cu"
#include "longspan/kernels/attention/hopper/forward/instantiate/narrow_128.cu"
#include "longspan/kernels/attention/hopper/forward/instantiate/narrow_64.cu"
#include "longspan/kernels/attention/hopper/forward/launch.cu"
