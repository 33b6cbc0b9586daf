/// core_fuzz [calls [seed]]: calls of core, plan and draw with random
/// arguments, most of them wrong. Built under the sanitizers by `make
/// sanitize`.
///
/// Always true: a call answers or throws std::invalid_argument whose words
/// begin with a name of ours, and takes less than some seconds.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "longspan/core/detail/even_pieces.h"
#include "longspan/core/per_token.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "longspan/longspan.h"

namespace {

using namespace longspan;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr double kSeconds = 8;  // sanitizers slow things down

/// Whose words a refusal may be: what the functions below call themselves.
const std::vector<std::string> kSpeakers{
    "Packing",  "Ownership", "Mask",        "TokenRange",
    "Moves",    "Plan",      "Strategy",    "HeadShare",
    "draw",     "to_text",   "to_svg",      "work_of",
    "work_per", "tiles",     "even_pieces", "AttentionLayout",
    "round_up", "pads_for",  "padding_for", "common_multiple",
    "write_",   "forward_",  "key_value_",  "key_lines",
    "pass '",   "shard",     "fuzz",        "received_"};

class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}

  int64_t below(int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(bits_);
  }
  bool one_in(int64_t n) { return below(n) == 0; }

  /// Mostly a size that works, now and then one that cannot.
  int64_t size() {
    static const std::vector<int64_t> odd{-1,
                                          kLeast,
                                          kLeast + 1,
                                          kMost,
                                          kMost - 1,
                                          kMost - 7,
                                          kMost / 2,
                                          int64_t{1} << 62,
                                          int64_t{1} << 40,
                                          int64_t{1} << 33,
                                          int64_t{1} << 32,
                                          (int64_t{1} << 31) - 1,
                                          int64_t{1} << 31,
                                          3'000'000'000,
                                          3'000'000'001,
                                          65536};
    if (one_in(3)) return odd[static_cast<std::size_t>(below(std::ssize(odd)))];
    return below(40);
  }
  int small() {
    static const std::vector<int> odd{-1,
                                      0,
                                      std::numeric_limits<int>::max(),
                                      std::numeric_limits<int>::min(),
                                      1 << 20,
                                      1 << 24};
    if (one_in(5)) return odd[static_cast<std::size_t>(below(std::ssize(odd)))];
    return static_cast<int>(1 + below(8));
  }
  std::vector<int64_t> sizes() {
    std::vector<int64_t> list(static_cast<std::size_t>(below(5)));
    for (int64_t& one : list) one = one_in(8) ? size() : below(20);
    return list;
  }
  TokenRange range() {
    if (one_in(4)) return {size(), size()};
    const int64_t begin = below(20);
    return {begin, begin + below(20)};
  }
  std::vector<TokenRange> ranges() {
    std::vector<TokenRange> list(static_cast<std::size_t>(below(4)));
    for (TokenRange& one : list) one = range();
    return list;
  }

 private:
  std::mt19937_64 bits_;
};

Packing packing(Random& random) {
  switch (random.below(6)) {
    case 0:
      return Packing::of(random.sizes(), random.sizes());
    case 1:
      return Packing::of(random.sizes(), random.sizes(), random.size());
    case 2:
      return Packing::rows(random.size(), random.size());
    case 3:
      return Packing::single(random.size());
    case 4:
      return Packing::of(random.sizes())
          .with_slots_multiple_of(random.size())
          .with_tokens_multiple_of(random.size());
    default:
      return Packing::of(random.sizes());
  }
}

Ownership ownership(Random& random, const Packing& of) {
  switch (random.below(6)) {
    case 0:
      return Ownership::contiguous(random.size(), random.small());
    case 1:
      return Ownership::head_tail(random.size(), random.small());
    case 2:
      return Ownership::of_sizes(random.sizes());
    case 3: {
      std::vector<std::vector<TokenRange>> held(
          static_cast<std::size_t>(random.below(4)));
      for (auto& one : held) one = random.ranges();
      return Ownership::of_ranges(held);
    }
    default: {
      const auto kind = static_cast<OwnershipKind>(random.below(4));
      const int ranks = random.small();
      const int64_t share = random.one_in(4) ? random.size() : 1;
      return Ownership::of(kind, padded(of, padding_for(kind, ranks, share)),
                           ranks);
    }
  }
}

Mask mask(Random& random, const Packing& of) {
  const auto made = [&] {
    switch (random.below(5)) {
      case 0:
        return Mask::full(of);
      case 1:
        return Mask::sliding(of, random.size());
      case 2:
        return Mask::banded(of, {random.size(), random.size()});
      case 3:
        return Mask::compressed(of, random.size());
      default:
        return Mask::causal(of);
    }
  }();
  if (random.one_in(4)) return made.with_hidden(random.ranges());
  if (random.one_in(4)) {
    return made.with_groups(random.ranges())
        .with_group_reach(random.one_in(2) ? GroupReach::within_window
                                           : GroupReach::whole_group);
  }
  if (random.one_in(4)) return made.with_prefix(random.sizes());
  return random.one_in(4) ? made.with_pad_queries(PadQueries::see_document)
                          : made;
}

Strategy strategy(Random& random, int ranks) {
  const auto names = Strategy::names();
  const auto name = names[static_cast<std::size_t>(
      random.below(static_cast<int64_t>(names.size())))];
  return Strategy::named(name, random.one_in(3) ? random.small() : 0)
      .over(ranks, random.size());
}

AttentionShape shape(Random& random) {
  return {random.size(), random.size(), random.size(), random.size(),
          random.size()};
}

void look_at(Random& random, const Packing& p) {
  (void)p.to_string();
  (void)p.pads();
  (void)p.cumulative_lengths();
  (void)p.longest_padded();
  switch (random.below(5)) {
    case 0:
      (void)p.locate(random.size());
      break;
    case 1:
      (void)p.token_of({random.size(), random.size()});
      break;
    case 2:
      (void)p.real(random.size());
      break;
    case 3:
      (void)p.is_pad(random.size());
      break;
    default:
      (void)p.padded_length(random.size());
  }
}

void look_at(Random& random, const Ownership& o) {
  (void)o.to_string();
  switch (random.below(6)) {
    case 0:
      (void)o.local_of(random.size());
      break;
    case 1:
      (void)o.global_of(random.small(), random.size());
      break;
    case 2:
      (void)o.ranges_of(random.small());
      break;
    case 3:
      (void)o.holding(random.size());
      break;
    case 4:
      (void)o.to_rank(random.small());
      break;
    default:
      (void)o.to_all_ranks();
  }
}

void look_at(Random& random, const Mask& m) {
  (void)m.to_string();
  (void)m.why_not_one_range();
  switch (random.below(6)) {
    case 0:
      (void)m.allows(random.size(), random.size());
      break;
    case 1:
      (void)m.keys_of(random.size());
      break;
    case 2:
      (void)m.key_ranges_of(random.size());
      break;
    case 3:
      (void)m.reach(random.range());
      break;
    case 4:
      (void)m.pairs(random.range(), random.range());
      break;
    default:
      (void)m.coverage(random.range(), random.range());
  }
}

void plan(Random& random, const Mask& m, const Ownership& o) {
  const AttentionLayout layout =
      AttentionLayout::decode(AttentionLayout::of(o, {m}).encode());
  const Plan made =
      Plan::of(layout, strategy(random, o.ranks()),
               random.one_in(3) ? random.small() : 0, random.size());
  (void)made.to_string();
  (void)made.sent(shape(random),
                  random.one_in(2) ? Pass::forward : Pass::backward);
}

void decode(Random& random, const Mask& m, const Ownership& o) {
  std::vector<int64_t> code = AttentionLayout::of(o, {m}).encode();
  for (int64_t& number : code) {
    if (random.one_in(8)) number = random.size();
  }
  if (random.one_in(3)) code.resize(static_cast<std::size_t>(random.below(20)));
  (void)AttentionLayout::decode(code);
}

void picture(Random& random, const Mask& m, const Ownership& o) {
  const DrawOptions options{random.small(), random.small(), random.small()};
  const Picture made = [&] {
    switch (random.below(5)) {
      case 0:
        return draw_plan(AttentionLayout::of(o, {m}),
                         strategy(random, o.ranks()), shape(random), options);
      case 1:
        return draw_plan_of(AttentionLayout::of(o, {m}),
                            strategy(random, o.ranks()), random.small(),
                            shape(random), options);
      case 2:
        return draw_ownership(o, m.packing(), options);
      case 3:
        return draw_comparison(m, o, o, options);
      default:
        return draw(m, o, random.one_in(2) ? DrawOptions{} : options);
    }
  }();
  TextOptions text;
  if (random.one_in(2)) text.width = static_cast<int>(random.size());
  (void)to_text(made, text);
  (void)to_svg(made);
}

void numbers(Random& random, const Mask& m) {
  switch (random.below(6)) {
    case 0:
      (void)round_up(random.size(), random.size());
      break;
    case 1:
      (void)common_multiple(random.size(), random.size());
      break;
    case 2:
      (void)share_multiple(random.sizes());
      break;
    case 3:
      (void)pads_for(static_cast<OwnershipKind>(random.below(4)), random.size(),
                     random.small(), random.size());
      break;
    case 4:
      (void)forward_flops(random.size(), shape(random));
      (void)key_value_bytes(random.size(), shape(random));
      break;
    default:
      (void)even_pieces({m}, 1 + static_cast<int>(random.below(8)));
  }
}

void call(Random& random) {
  const Packing p = packing(random);
  look_at(random, p);
  const Ownership o = ownership(random, p);
  look_at(random, o);
  // Masks and owners that fit each other reach further.
  const Mask m =
      mask(random, random.one_in(4) ? p : Packing::single(o.tokens()));
  look_at(random, m);
  switch (random.below(6)) {
    case 0:
      return plan(random, m, o);
    case 1:
      return decode(random, m, o);
    case 2:
      return picture(random, m, o);
    case 3:
      return numbers(random, m);
    case 4:
      (void)work_of(m, o, random.small());
      (void)tiles_of(m, o, random.small());
      return;
    default:
      (void)work_per_rank(m, o);
  }
}

/// Drops what the first refusal would hide: each part is tried by itself too.
void parts(Random& random) {
  const auto alone = [&](const std::function<void()>& part) {
    try {
      part();
    } catch (const std::invalid_argument&) {
      // `call` looks at the words; here the next part counts.
    }
  };
  const Packing p = Packing::of({5, 0, 3}, {6, 2, 8}, 16);
  const Ownership o = Ownership::head_tail(16, 2);
  const Mask m = Mask::causal(p);
  for (int i = 0; i < 4; ++i) {
    alone([&] { look_at(random, p); });
    alone([&] { look_at(random, o); });
    alone([&] { look_at(random, m); });
    alone([&] { plan(random, m, o); });
    alone([&] { decode(random, m, o); });
    alone([&] { picture(random, m, o); });
    alone([&] { numbers(random, m); });
    alone([&] { look_at(random, ownership(random, p)); });
    alone([&] { look_at(random, mask(random, packing(random))); });
  }
}

/// What is wrong with the end of one call; "" when nothing is.
std::string complaint(uint64_t seed) {
  const auto begin = std::chrono::steady_clock::now();
  std::string wrong;
  try {
    Random random(seed);
    if (seed % 8 == 0) {
      parts(random);
    } else {
      call(random);
    }
  } catch (const std::invalid_argument& refusal) {
    const std::string words = refusal.what();
    bool ours = false;
    for (const std::string& speaker : kSpeakers) {
      ours = ours || words.starts_with(speaker);
    }
    if (!ours) wrong = "nobody's words: " + words;
  } catch (const std::exception& other) {
    wrong = std::string("not a refusal: ") + other.what();
  }
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  if (took > kSeconds) wrong += " took " + std::to_string(took) + " s";
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = argc > 1 ? std::atoll(argv[1]) : 10'000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const uint64_t first = calls == 1 ? seed : seed * 1'000'003;
  int64_t wrong = 0;
  for (int64_t i = 0; i < calls; ++i) {
    const uint64_t one = first + static_cast<uint64_t>(i);
    if (const std::string found = complaint(one); !found.empty()) {
      std::cerr << "core_fuzz: seed " << one << ": " << found << "\n";
      if (++wrong >= 20) break;
    }
  }
  std::cout << "core_fuzz: " << calls << " calls, " << wrong << " wrong\n";
  return wrong == 0 ? 0 : 1;
}
