#include "longspan/models/rotary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/rotate_channels.h"

namespace longspan {

RotaryAngles rotary_angles(const at::Tensor& positions,
                           const RotaryConfig& config, at::ScalarType type) {
  const char* const who = "rotary_angles";
  check(config.channels >= 0 && config.channels % 2 == 0, who,
        ": `channels` is ", config.channels, "; expected an even number");
  const int64_t pairs = config.channels / 2;
  const auto options =
      positions.options().dtype(c10::promoteTypes(type, at::kFloat));
  at::Tensor frequencies = config.frequencies;
  if (frequencies.defined()) {
    check(frequencies.dim() == 1 && frequencies.size(0) == pairs, who,
          ": `frequencies` is ", describe(frequencies), "; expected [", pairs,
          "]");
  } else {
    const at::Tensor powers =
        at::arange(pairs, options.dtype(at::kDouble)) * -2.0 /
        static_cast<double>(std::max<int64_t>(config.channels, 1));
    frequencies = at::pow(config.theta, powers);
  }
  const at::Tensor angles =
      positions.to(options.dtype()).unsqueeze(-1) * frequencies.to(options);
  return {angles.cos() * config.scaling, angles.sin() * config.scaling};
}

at::Tensor rotated(const at::Tensor& x, const RotaryAngles& angles,
                   RotaryPlace place, RotaryTurn turn) {
  const int64_t channels = 2 * angles.cos.size(-1);
  check(x.size(-1) >= channels, "rotated: `x` is ", describe(x), " but ",
        channels, " channels turn");
  std::vector<int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes.front() = angles.cos.size(0);
  sizes.back() = angles.cos.size(1);
  return rotate_channels(
      x, angles.cos.view(sizes), angles.sin.view(sizes),
      {.first = place == RotaryPlace::first ? 0 : x.size(-1) - channels,
       .pairs = ChannelPairs::interleaved,
       .inverse = turn == RotaryTurn::back});
}

}  // namespace longspan
