#include "longspan/plan/strategy.h"

#include <numeric>

#include "longspan/core/check.h"

namespace longspan {

Strategy Strategy::named(std::string_view name, int ranks, int64_t key_heads,
                         int head_ranks) {
  check(ranks >= 1, "Strategy: ", ranks, " ranks");
  check(head_ranks >= 0, "Strategy: head_ranks is ", head_ranks);
  const auto fixed = [&](KeyTransport transport, int members) {
    check(head_ranks == 0 || head_ranks == members, "Strategy: '", name,
          "' has teams of ", members, " but head_ranks is ", head_ranks,
          "; head_parallel_ring takes any divisor of the ranks");
    return Strategy{transport, members};
  };
  if (name == "ring") return fixed(KeyTransport::ring, 1);
  if (name == "gathered") return fixed(KeyTransport::gathered, 1);
  if (name == "needed") return fixed(KeyTransport::needed, 1);
  if (name == "head_parallel") return fixed(KeyTransport::ring, ranks);
  check(name == "head_parallel_ring", "Strategy: '", name,
        "' is not one of ring, gathered, needed, head_parallel, "
        "head_parallel_ring");
  const int members =
      head_ranks != 0 ? head_ranks
                      : static_cast<int>(std::gcd(int64_t{ranks}, key_heads));
  check(members >= 1 && ranks % members == 0, "Strategy: ", ranks,
        " ranks do not form teams of ", members,
        "; head_ranks must divide the ranks");
  return {KeyTransport::ring, members};
}

std::string Strategy::to_string() const {
  const char* keys = transport == KeyTransport::ring       ? "ring"
                     : transport == KeyTransport::gathered ? "gathered"
                                                           : "needed";
  return head_ranks == 1 ? keys : join(keys, " of teams of ", head_ranks);
}

std::string_view Strategy::name(int ranks) const {
  if (head_ranks > 1) {
    return head_ranks == ranks ? "head_parallel" : "head_parallel_ring";
  }
  return transport == KeyTransport::ring       ? "ring"
         : transport == KeyTransport::gathered ? "gathered"
                                               : "needed";
}

HeadShare HeadShare::of(int64_t heads, int64_t key_heads, int member,
                        int members) {
  check(key_heads >= 1 && heads % key_heads == 0, "HeadShare: ", heads,
        " heads do not share ", key_heads, " key heads evenly");
  const int64_t group = heads / key_heads;
  const TokenRange mine{heads * member / members,
                        heads * (member + 1) / members};
  if (mine.empty() || group == 0) return {};
  return {mine, {mine.begin / group, (mine.end + group - 1) / group}};
}

}  // namespace longspan
