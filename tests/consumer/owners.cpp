#include <longspan/core/work.h>

#include <cstdio>

int main() {
  using namespace longspan;
  const auto owners = Ownership::head_tail(64, 4);
  const auto mask = Mask::causal(Packing::single(64));
  for (const RankWork& work : work_per_rank(mask, owners)) {
    std::printf("%lld\n", static_cast<long long>(work.pairs));
    if (work.pairs != 520) return 1;
  }
}
