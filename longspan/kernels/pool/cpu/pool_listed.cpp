#include "longspan/kernels/pool/pool_listed.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace longspan {

namespace {

constexpr int64_t kBlock = 64;       // channels that are pooled together
constexpr int64_t kGrain = 1 << 14;  // exponentials that are worth a thread

/// Some channels of all pools.
template <class T>
class ChannelBlock {
 public:
  ChannelBlock(const PoolListedArgs<T>& args, int64_t first)
      : args_(args),
        first_(first),
        count_(std::min(kBlock, args.channels - first)) {}

  void forward(int64_t pool) const {
    std::array<T, kBlock> most, sum, out;
    most.fill(-std::numeric_limits<T>::infinity());
    sum.fill(0);
    out.fill(0);
    each_slot(pool, [&](int64_t row, int64_t slot) {
      for (int64_t c = 0; c < count_; ++c) {
        const T gate = gate_of(row, slot, c);
        if (gate > most[at(c)]) most[at(c)] = gate;
      }
    });
    // Without a greatest number the differences below would be NaN.
    for (T& m : most) m = m == -std::numeric_limits<T>::infinity() ? T(0) : m;
    each_slot(pool, [&](int64_t row, int64_t slot) {
      const T* const value = args_.values + place(row);
      for (int64_t c = 0; c < count_; ++c) {
        const T weight = std::exp(gate_of(row, slot, c) - most[at(c)]);
        sum[at(c)] += weight;
        out[at(c)] += weight * value[c];
      }
    });
    for (int64_t c = 0; c < count_; ++c) {
      const bool saw_nothing = sum[at(c)] == 0;
      args_.out[place(pool) + c] = saw_nothing ? T(0) : out[at(c)] / sum[at(c)];
      args_.lse[place(pool) + c] = most[at(c)] + std::log(sum[at(c)]);
    }
  }

  void backward(int64_t pool, const PoolListedGradients<T>& to) const {
    const T* const out = args_.out + place(pool);
    const T* const lse = args_.lse + place(pool);
    const T* const dout = to.dout + place(pool);
    const T* const dlse = to.dlse + place(pool);
    each_slot(pool, [&](int64_t row, int64_t slot) {
      const T* const value = args_.values + place(row);
      for (int64_t c = 0; c < count_; ++c) {
        if (lse[c] == -std::numeric_limits<T>::infinity()) continue;
        const T weight = std::exp(gate_of(row, slot, c) - lse[c]);
        const T dgate = weight * (dout[c] * (value[c] - out[c]) + dlse[c]);
        to.dvalues[place(row) + c] += weight * dout[c];
        to.dgates[place(row) + c] += dgate;
        if (to.dbias != nullptr) to.dbias[place(slot) + c] += dgate;
      }
    });
  }

 private:
  static std::size_t at(int64_t channel) {
    return static_cast<std::size_t>(channel);
  }
  int64_t place(int64_t row) const { return row * args_.channels + first_; }
  T gate_of(int64_t row, int64_t slot, int64_t channel) const {
    const T gate = args_.gates[place(row) + channel];
    return args_.bias == nullptr ? gate
                                 : gate + args_.bias[place(slot) + channel];
  }

  template <class Visit>
  void each_slot(int64_t pool, const Visit& visit) const {
    const int32_t* const list = args_.list + pool * args_.slots;
    for (int64_t slot = 0; slot < args_.slots; ++slot) {
      const int64_t row = list[slot];
      if (row >= 0 && row < args_.rows) visit(row, slot);
    }
  }

  const PoolListedArgs<T>& args_;
  int64_t first_, count_;
};

template <class T>
void run_pool_listed(const PoolListedArgs<T>& args,
                     const ParallelFor& parallel) {
  if (args.channels == 0) return;
  const int64_t work = std::max<int64_t>(1, args.slots * args.channels);
  parallel(args.pools, std::max<int64_t>(1, kGrain / work),
           [&](int64_t begin, int64_t end) {
             for (int64_t pool = begin; pool < end; ++pool) {
               for (int64_t c = 0; c < args.channels; c += kBlock) {
                 ChannelBlock<T>(args, c).forward(pool);
               }
             }
           });
}

template <class T>
void run_pool_listed_backward(const PoolListedArgs<T>& args,
                              const PoolListedGradients<T>& gradients,
                              const ParallelFor& parallel) {
  // Threads share channels, not pools, so that each adds in one order.
  const int64_t blocks = (args.channels + kBlock - 1) / kBlock;
  const int64_t work = std::max<int64_t>(1, args.pools * args.slots * kBlock);
  parallel(blocks, std::max<int64_t>(1, kGrain / work),
           [&](int64_t begin, int64_t end) {
             for (int64_t block = begin; block < end; ++block) {
               const ChannelBlock<T> channels(args, block * kBlock);
               for (int64_t pool = 0; pool < args.pools; ++pool) {
                 channels.backward(pool, gradients);
               }
             }
           });
}

}  // namespace

void pool_listed(const PoolListedArgs<float>& args,
                 const ParallelFor& parallel) {
  run_pool_listed(args, parallel);
}

void pool_listed(const PoolListedArgs<double>& args,
                 const ParallelFor& parallel) {
  run_pool_listed(args, parallel);
}

void pool_listed_backward(const PoolListedArgs<float>& args,
                          const PoolListedGradients<float>& gradients,
                          const ParallelFor& parallel) {
  run_pool_listed_backward(args, gradients, parallel);
}

void pool_listed_backward(const PoolListedArgs<double>& args,
                          const PoolListedGradients<double>& gradients,
                          const ParallelFor& parallel) {
  run_pool_listed_backward(args, gradients, parallel);
}

}  // namespace longspan
