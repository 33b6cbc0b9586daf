/// The backward kernels of dense attention, compiled for the machine on paper.
#include "longspan/kernels/attention/hopper/backward/instantiate/dims_128.cu"
#include "longspan/kernels/attention/hopper/backward/instantiate/dims_128_softcap.cu"
#include "longspan/kernels/attention/hopper/backward/instantiate/dims_256.cu"
#include "longspan/kernels/attention/hopper/backward/instantiate/dims_256_softcap.cu"
#include "longspan/kernels/attention/hopper/backward/instantiate/dims_64.cu"
#include "longspan/kernels/attention/hopper/backward/instantiate/dims_64_softcap.cu"
#include "longspan/kernels/attention/hopper/backward/launch.cu"
