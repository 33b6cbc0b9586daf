#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace longspan::hopper {

/// Bytes that travel to the device as arguments of a launch: in the order of
/// the stream, kept by a graph, and without memory that somebody must hold
/// until they arrived.
template <int kBytes>
struct Luggage {
  uint4 data[kBytes / 16];
};

/// Lanes read arguments one after another, so several processors share them.
template <int kBytes>
__global__ void unpack(const __grid_constant__ Luggage<kBytes> luggage,
                       uint4* to, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) to[i] = luggage.data[i];
}

template <int kBytes>
cudaError_t upload_piece(std::span<const std::byte> piece, void* to,
                         cudaStream_t stream) {
  Luggage<kBytes> luggage;
  std::memcpy(&luggage, piece.data(), piece.size());
  const int count = static_cast<int>((piece.size() + 15) / 16);
  constexpr int kThreads = 128;
  unpack<kBytes><<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      luggage, static_cast<uint4*>(to), count);
  return cudaGetLastError();
}

/// `to` is aligned to 16 and the bytes are a multiple of that.
inline cudaError_t upload(std::span<const std::byte> bytes, void* to,
                          cudaStream_t stream) {
  constexpr std::size_t kSmall = 2048, kLarge = 32000;
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kLarge));
    const cudaError_t error = piece.size() <= kSmall
                                  ? upload_piece<kSmall>(piece, to, stream)
                                  : upload_piece<kLarge>(piece, to, stream);
    if (error != cudaSuccess) return error;
    to = static_cast<std::byte*>(to) + piece.size();
    bytes = bytes.subspan(piece.size());
  }
  return cudaSuccess;
}

}  // namespace longspan::hopper
