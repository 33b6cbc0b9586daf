#include "longspan/plan/strategy.h"

#include <array>
#include <limits>
#include <numeric>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/nearest.h"

namespace longspan {

namespace {

constexpr std::array<std::string_view, 5> kStrategyNames{
    "ring", "gathered", "needed", "head_parallel", "head_parallel_ring"};

}  // namespace

std::span<const std::string_view> Strategy::names() {
  return kStrategyNames;
}

Strategy Strategy::named(std::string_view name, int head_ranks) {
  check(head_ranks >= 0, "Strategy: head_ranks is ", head_ranks);
  const auto fixed = [&](KeyTransport transport) {
    check(head_ranks == kFitting || head_ranks == 1, "Strategy: '", name,
          "' has teams of 1 but head_ranks is ", head_ranks,
          "; head_parallel_ring takes any divisor of the ranks");
    return Strategy{transport, 1};
  };
  if (name == "ring") return fixed(KeyTransport::ring);
  if (name == "gathered") return fixed(KeyTransport::gathered);
  if (name == "needed") return fixed(KeyTransport::needed);
  if (name == "head_parallel") {
    check(head_ranks == kFitting, "Strategy: 'head_parallel' is one team, but ",
          "head_ranks is ", head_ranks,
          "; head_parallel_ring takes any divisor of the ranks");
    return {KeyTransport::ring, kAllRanks};
  }
  if (name == "head_parallel_ring") return {KeyTransport::ring, head_ranks};
  throw std::invalid_argument(
      join("Strategy: '", name,
           "' is not one of ring, gathered, needed, head_parallel, "
           "head_parallel_ring",
           did_you_mean(name, kStrategyNames)));
}

Strategy Strategy::over(int ranks, int64_t key_heads) const {
  check(ranks >= 1, "Strategy: ", ranks, " ranks");
  check(key_heads >= 0, "Strategy: ", key_heads,
        " key heads; expected 0 or more");
  const int members =
      head_ranks == kAllRanks ? ranks
      : head_ranks == kFitting
          ? static_cast<int>(std::gcd(int64_t{ranks}, key_heads))
          : head_ranks;
  check(members >= 1 && ranks % members == 0, "Strategy: ", ranks,
        " ranks do not form teams of ", members,
        "; head_ranks must divide the ranks");
  return {transport, members};
}

std::string Strategy::to_string() const {
  if (head_ranks < 1) return std::string(name());
  const char* keys = transport == KeyTransport::ring       ? "ring"
                     : transport == KeyTransport::gathered ? "gathered"
                                                           : "needed";
  return head_ranks == 1 ? keys : join(keys, " of teams of ", head_ranks);
}

std::string_view Strategy::name() const {
  if (head_ranks == kAllRanks) return "head_parallel";
  if (head_ranks != 1) return "head_parallel_ring";
  return transport == KeyTransport::ring       ? "ring"
         : transport == KeyTransport::gathered ? "gathered"
                                               : "needed";
}

std::string_view Strategy::name(int ranks) const {
  return head_ranks > 1 && head_ranks == ranks ? "head_parallel" : name();
}

HeadShare HeadShare::of(int64_t heads, int64_t key_heads, int member,
                        int members) {
  check(key_heads >= 1 && heads % key_heads == 0, "HeadShare: ", heads,
        " heads do not share ", key_heads, " key heads evenly");
  const int64_t group = heads / key_heads;
  constexpr int64_t kMostHeads = std::numeric_limits<int32_t>::max();
  check(heads >= 0 && heads <= kMostHeads, "HeadShare: ", heads,
        " heads; expected 0 to ", kMostHeads);
  // heads * before / members, rounded down, without that product.
  const auto border = [&](int64_t before) {
    return heads / members * before + heads % members * before / members;
  };
  const TokenRange mine{border(member), border(member + int64_t{1})};
  if (mine.empty() || group == 0) return {};
  return {mine, {mine.begin / group, (mine.end + group - 1) / group}};
}

}  // namespace longspan
