#pragma once

#include "longspan/kernels/common/hopper/ptx.cuh"

/// Stands before longspan/kernels/common/hopper/tma.cuh.
namespace longspan::hopper {

inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  machine::barrier_arrive(barrier, bytes);
}
inline void fetch_box(uint32_t to, const void* map, uint32_t barrier,
                      int channel, int token, int head, int row) {
  machine::fetch_box(to, map, barrier, {channel, token, head, row});
}
inline void add_box(const void* map, uint32_t from, int channel, int token,
                    int head, int row) {
  machine::add_box(map, from, {channel, token, head, row});
}
inline void boxes_commit() {
  machine::boxes_commit();
}
inline void boxes_wait_read() {
  machine::boxes_wait(true);
}
inline void boxes_wait() {
  machine::boxes_wait(false);
}
inline void prefetch_map(const void*) {}

}  // namespace longspan::hopper
