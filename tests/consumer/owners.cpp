#include <longspan/longspan.h>

#include <cstdio>

int main() {
  using namespace longspan;
  const auto owners = Ownership::head_tail(64, 4);
  const auto mask = Mask::causal(Packing::single(64));
  for (const RankWork& work : work_per_rank(mask, owners)) {
    std::printf("%lld\n", static_cast<long long>(work.pairs));
    if (work.pairs != 520) return 1;
  }
  const auto layout = AttentionLayout::of(owners, {mask});
  const AttentionShape shape{.heads = 8, .key_heads = 2};
  const auto strategy = Strategy::named("ring").over(4, shape.key_heads);
  std::printf("%s\n%s\n", Plan::of(layout, strategy, 1).to_string().c_str(),
              to_text(draw_plan(layout, strategy, shape)).c_str());
}
