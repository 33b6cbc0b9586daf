#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "longspan/batch/cut.h"
#include "longspan/comm/run_ranks.h"
#include "longspan/models/layer_share.h"

/// Streams of documents cut over thread ranks, and what must hold for any layer
/// that reads them: outputs and every gradient are those of each document by
/// itself, in float64.
namespace longspan::test {

using Tensors = std::vector<at::Tensor>;

struct Stream {
  std::string name;
  Packing packing;
};

/// Documents that straddle ranks, of one token, shorter than a window; pads
/// between them and at the end, enough for a rank that has nothing else.
inline std::vector<Stream> streams() {
  return {{"one", Packing::of({48})},
          {"packed", Packing::of({19, 1, 3, 25})},
          {"padded", Packing::of({17, 1, 9}, {20, 2, 10}, 48)}};
}

/// Pieces of many lengths, dealt out in turn; the last rank holds its own from
/// the last to the first.
inline Ownership dealt(int64_t tokens, int ranks) {
  std::vector<std::vector<TokenRange>> held(static_cast<std::size_t>(ranks));
  int64_t begin = 0;
  for (std::size_t i = 0; begin < tokens; ++i) {
    const int64_t lengths[] = {2, 9, 5, 1, 7, 4, 3, 8, 6};
    const int64_t end = std::min(tokens, begin + lengths[i % 9]);
    held[i % held.size()].push_back({begin, end});
    begin = end;
  }
  std::reverse(held.back().begin(), held.back().end());
  return Ownership::of_ranges(held);
}

inline std::vector<Ownership> ownerships(int64_t tokens, int ranks) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(ranks), 5);
  sizes.back() = tokens - 5 * (ranks - 1);
  if (ranks == 4) sizes[1] = 0, sizes[3] += 5;  // one has nothing
  return {Ownership::contiguous(tokens, ranks),
          Ownership::head_tail(tokens, ranks), Ownership::of_sizes(sizes),
          dealt(tokens, ranks)};
}

/// Without a generator, which threads would share.
inline at::Tensor drawn(at::IntArrayRef sizes, int64_t seed) {
  return at::arange(c10::multiply_integers(sizes),
                    at::TensorOptions(at::kDouble))
      .mul_(1.7)
      .add_(0.31 * static_cast<double>(seed * seed + seed + 1))
      .sin_()
      .view(sizes);
}

/// A layer on tokens and parameters of this rank.
using Layer = std::function<at::Tensor(
    const Tensors& tokens, const Tensors& parameters, const LayerShare& share)>;
/// The same for one document, in the slow, obvious way.
using Oracle =
    std::function<at::Tensor(const Tensors& tokens, const Tensors& parameters)>;

struct Answer {
  at::Tensor out = {};
  Tensors token_gradients = {};      ///< each of all tokens
  Tensors parameter_gradients = {};  ///< summed
};

inline Tensors leaves(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& t : tensors) {
    made.push_back(t.detach().clone().set_requires_grad(true));
  }
  return made;
}

inline at::Tensor gradient_of(const at::Tensor& leaf) {
  return leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf);
}

/// How a loss looks at the tokens: it is the same for all ranks.
inline at::Tensor weights_like(const at::Tensor& out) {
  return drawn(out.sizes(), 77);
}

/// Every document by itself; 0 for pads.
inline Answer alone(const Oracle& oracle, const Packing& packing,
                    const Tensors& tokens, const Tensors& parameters) {
  const Tensors t = leaves(tokens), p = leaves(parameters);
  at::Tensor sum = at::zeros({}, at::TensorOptions(at::kDouble));
  at::Tensor out;
  for (int64_t d = 0; d < packing.documents(); ++d) {
    const TokenRange real = packing.real(d);
    if (real.size() == 0) continue;
    Tensors own;
    for (const at::Tensor& x : t) {
      own.push_back(x.narrow(0, real.begin, real.size()));
    }
    const at::Tensor made = oracle(own, p);
    if (!out.defined()) {
      std::vector<int64_t> sizes = made.sizes().vec();
      sizes[0] = packing.tokens();
      out = at::zeros(sizes, made.options());
    }
    sum = sum +
          (made * weights_like(out).narrow(0, real.begin, real.size())).sum();
    out.narrow(0, real.begin, real.size()).copy_(made.detach());
  }
  sum.backward();
  Answer answer{.out = out};
  for (const at::Tensor& x : t) {
    answer.token_gradients.push_back(gradient_of(x));
  }
  for (const at::Tensor& x : p) {
    answer.parameter_gradients.push_back(gradient_of(x));
  }
  return answer;
}

inline void expect_near(const at::Tensor& found, const at::Tensor& expected,
                        const std::string& what, double tolerance = 1e-11) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  if (found.numel() == 0) return;
  const double scale = std::max(1.0, expected.abs().max().item<double>());
  const double worst = (found - expected).abs().max().item<double>();
  EXPECT_LE(worst, tolerance * scale) << what;
}

/// One stream, cut in one way, and what each rank found.
struct Run {
  std::string name;
  Ownership ownership;
  Packing packing;
  Tensors tokens;
  const Answer* expected = nullptr;
  std::vector<Answer> found = {};
};

inline Answer on_rank(const Layer& layer, const Run& run,
                      const Tensors& parameters, const Group& group) {
  const LayerShare share(
      AttentionLayout::of(run.ownership, {Mask::causal(run.packing)}), group);
  const at::Tensor mine = token_indices(run.ownership, group.rank());
  Tensors own;
  for (const at::Tensor& x : run.tokens) {
    own.push_back(x.index_select(0, mine));
  }
  own = leaves(own);
  const Tensors p = leaves(parameters);
  const at::Tensor out = layer(own, p, share);
  (out * weights_like(run.expected->out).index_select(0, mine))
      .sum()
      .backward();
  Answer answer{.out = out.detach()};
  for (const at::Tensor& x : own) {
    answer.token_gradients.push_back(gradient_of(x));
  }
  for (const at::Tensor& x : p) {
    answer.parameter_gradients.push_back(gradient_of(x));
  }
  return answer;
}

inline void expect_found(const Run& run) {
  const Answer& expected = *run.expected;
  Tensors sums = run.found[0].parameter_gradients;
  for (std::size_t r = 0; r < run.found.size(); ++r) {
    const Answer& found = run.found[r];
    const at::Tensor mine = token_indices(run.ownership, static_cast<int>(r));
    const std::string rank = run.name + ": rank " + std::to_string(r) + " ";
    expect_near(found.out, expected.out.index_select(0, mine), rank + "out");
    for (std::size_t i = 0; i < run.tokens.size(); ++i) {
      expect_near(found.token_gradients[i],
                  expected.token_gradients[i].index_select(0, mine),
                  rank + "gradient of tensor " + std::to_string(i));
    }
    for (std::size_t i = 0; r > 0 && i < sums.size(); ++i) {
      sums[i] = sums[i] + found.parameter_gradients[i];
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    expect_near(sums[i], expected.parameter_gradients[i],
                run.name + ": gradient of parameter " + std::to_string(i));
  }
}

/// Outputs and gradients over 1 to 4 ranks, every ownership and stream, by
/// each of some layers, which compute the same.
inline void expect_alone(const std::vector<Layer>& layers, const Oracle& oracle,
                         const std::function<Tensors(int64_t)>& make_tokens,
                         const Tensors& parameters) {
  std::vector<Answer> expected;
  for (const Stream& stream : streams()) {
    expected.push_back(alone(oracle, stream.packing,
                             make_tokens(stream.packing.tokens()), parameters));
  }
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<Run> runs;
    for (std::size_t s = 0; s < expected.size(); ++s) {
      const Stream stream = streams()[s];
      const int64_t tokens = stream.packing.tokens();
      for (const Ownership& ownership : ownerships(tokens, ranks)) {
        runs.push_back({stream.name + ", " + ownership.to_string(), ownership,
                        stream.packing, make_tokens(tokens), &expected[s]});
        runs.back().found.resize(static_cast<std::size_t>(ranks));
      }
    }
    for (const Layer& layer : layers) {
      run_ranks(ranks, [&](const Group& group) {
        at::set_num_threads(1);
        for (Run& run : runs) {
          run.found[static_cast<std::size_t>(group.rank())] =
              on_rank(layer, run, parameters, group);
        }
      });
      for (const Run& run : runs) expect_found(run);
    }
  }
}

}  // namespace longspan::test
