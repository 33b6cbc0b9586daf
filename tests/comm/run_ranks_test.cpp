#include "longspan/comm/run_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "longspan/comm/detail/exchange.h"
#include "tests/comm/ranks.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

/// What a call throws, of whatever type.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

/// Returns when every rank got here.
void meet(const Group& group) {
  std::vector<Parcel> sends;
  std::vector<Parcel> receives;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank()) continue;
    sends.push_back({peer, at::ones({1})});
    receives.push_back({peer, at::zeros({1})});
  }
  start_exchange(group, sends, receives, "meet").wait();
}

TEST(RunRanks, GivesEveryRankItsPlace) {
  for (const int size : test::kSizes) {
    std::mutex mutex;
    std::multiset<int> seen;
    run_ranks(size, [&](const Group& group) {
      EXPECT_EQ(group.size(), size);
      const std::lock_guard lock(mutex);
      seen.insert(group.rank());
    });
    ASSERT_EQ(seen.size(), static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(seen.count(rank), 1U);
  }
}

TEST(RunRanks, OneRankRunsHere) {
  const auto here = std::this_thread::get_id();
  run_ranks(1, [&](const Group& group) {
    EXPECT_EQ(std::this_thread::get_id(), here);
    EXPECT_EQ(group.name(), "");
  });
}

TEST(RunRanks, GroupsAreKnownByNameAndShareTheirCounter) {
  run_ranks(2, [](const Group& group) {
    meet(group);
    const Group again = Group::named(group.name());
    EXPECT_EQ(again.rank(), group.rank());
    EXPECT_EQ(again.process_group(), group.process_group());
    EXPECT_EQ(again.sent_bytes(), 4);
    meet(again);
    EXPECT_EQ(group.sent_bytes(), 8);
  });
}

TEST(RunRanks, NamesEndWithTheRun) {
  std::string name;
  run_ranks(2, [&](const Group& group) {
    if (group.rank() == 1) name = group.name();
  });
  EXPECT_THAT(test::message_of([&] { Group::named(name); }),
              HasSubstr("no process group named '" + name + "' is alive"));
}

TEST(RunRanks, ThrowsTheErrorOfTheRankThatFailed) {
  for (const int culprit : {0, 1, 2}) {
    const auto start = steady_clock::now();
    EXPECT_EQ(error_of([&] {
                run_ranks(3, [&](const Group& group) {
                  meet(group);
                  if (group.rank() == culprit) throw std::out_of_range("mine");
                  meet(group);
                });
              }),
              "mine");
    // The others do not wait for the deadline of 30 s.
    EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10));
  }
}

TEST(RunRanks, ThrowsWhatIsNoStandardException) {
  EXPECT_THROW(run_ranks(2,
                         [](const Group& group) {
                           if (group.rank() == 1) throw 7;
                           meet(group);
                         }),
               int);
}

TEST(RunRanks, EndsWhenTheFailedRankLeftParcelsUnderWay) {
  EXPECT_EQ(error_of([] {
              run_ranks(2, [](const Group& group) {
                const int peer = 1 - group.rank();
                at::Tensor got = at::zeros({1 << 20});
                Transfer transfer = start_exchange(
                    group, {{peer, at::ones({1 << 20})}},
                    {{peer, got}, {peer, at::zeros({3})}}, "two of one");
                if (group.rank() == 0) throw std::domain_error("under way");
                transfer.wait();
              });
            }),
            "under way");
}

TEST(RunRanks, KeepsTheGroupOfARankThatIsDoneEarly) {
  run_ranks(2, [](const Group& group) {
    at::Tensor tensor = at::full({5}, group.rank(), at::kFloat);
    if (group.rank() == 0) {
      start_exchange(group, {{1, tensor}}, {}, "early").wait();
    } else {
      std::this_thread::sleep_for(milliseconds(100));
      start_exchange(group, {}, {{0, tensor}}, "early").wait();
      EXPECT_TRUE(tensor.eq(0).all().item<bool>());
    }
  });
}

TEST(RunRanks, TwoRunsAtOnceDoNotMix) {
  const auto run = [](float mark) {
    run_ranks(3, [mark](const Group& group) {
      for (int i = 0; i < 50; ++i) {
        const int next = (group.rank() + 1) % 3;
        const int before = (group.rank() + 2) % 3;
        const at::Tensor sent = at::full({64}, mark + group.rank());
        at::Tensor got = at::zeros({64});
        start_exchange(group, {{next, sent}}, {{before, got}}, "ring").wait();
        EXPECT_TRUE(got.eq(mark + before).all().item<bool>());
      }
    });
  };
  std::thread other([&] { run(100); });
  run(200);
  other.join();
}

TEST(RunRanks, RefusesNoRanks) {
  EXPECT_EQ(test::message_of([] { run_ranks(0, [](const Group&) {}); }),
            "run_ranks: 0 ranks; expected one or more");
}

}  // namespace
}  // namespace longspan
