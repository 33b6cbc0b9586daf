#include "longspan/kernels/token_loss/token_loss.h"

#include <algorithm>

#include "longspan/kernels/levels/levels.h"

namespace longspan {

namespace {

constexpr int64_t kGrain = 1 << 14;  // exponentials that are worth a thread

int64_t rows_of(int64_t words) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, words));
}

}  // namespace

void token_losses(const TokenLossArgs<float>& args,
                  const ParallelFor& parallel) {
  const TokenLossSteps& steps = chosen_attention_kernels().token_loss;
  parallel(args.tokens, rows_of(args.words), [&](int64_t begin, int64_t end) {
    steps.of_floats(args, begin, end);
  });
}

void token_losses(const TokenLossArgs<double>& args,
                  const ParallelFor& parallel) {
  const TokenLossSteps& steps = chosen_attention_kernels().token_loss;
  parallel(args.tokens, rows_of(args.words), [&](int64_t begin, int64_t end) {
    steps.of_doubles(args, begin, end);
  });
}

}  // namespace longspan
