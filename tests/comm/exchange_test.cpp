#include "longspan/comm/detail/exchange.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "longspan/comm/run_ranks.h"
#include "tests/comm/ranks.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using test::loss_of;
using test::message_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

/// Names sender, receiver and number of a parcel in every entry.
at::Tensor marked(int from, int to, int number, int64_t length) {
  return at::full({length}, from * 10000 + to * 100 + number, at::kLong);
}

TEST(Exchange, DeliversEveryParcelInOrder) {
  for (const int size : test::kSizes) {
    run_ranks(size, [](const Group& group) {
      std::vector<Parcel> sends;
      std::vector<Parcel> receives;
      const int me = group.rank();
      for (int peer = 0; peer < group.size(); ++peer) {
        if (peer == me) continue;
        for (int number = 0; number < 3; ++number) {
          // Some parcels are empty, on both sides.
          const auto length = [&](int from, int to) {
            return (from + 2 * to + number) % 4 * 1000;
          };
          sends.push_back({peer, marked(me, peer, number, length(me, peer))});
          receives.push_back({peer, marked(99, 99, 99, length(peer, me))});
        }
      }
      start_exchange(group, sends, receives, "all to all").wait();
      for (std::size_t i = 0; i < receives.size(); ++i) {
        const auto& [peer, got] = receives[i];
        const at::Tensor expected =
            marked(peer, me, static_cast<int>(i % 3), got.numel());
        EXPECT_TRUE(at::equal(got, expected)) << got << expected;
      }
    });
  }
}

TEST(Exchange, TransfersOverlapAndFinishInAnyOrder) {
  run_ranks(2, [](const Group& group) {
    const int me = group.rank();
    const int peer = 1 - me;
    std::vector<at::Tensor> got;
    std::vector<Transfer> transfers;
    for (int number = 0; number < 4; ++number) {
      got.push_back(at::zeros({10000}, at::kLong));
      transfers.push_back(
          start_exchange(group, {{peer, marked(me, peer, number, 10000)}},
                         {{peer, got.back()}}, "hop"));
    }
    for (auto it = transfers.rbegin(); it != transfers.rend(); ++it) it->wait();
    for (int number = 0; number < 4; ++number) {
      EXPECT_TRUE(at::equal(got[static_cast<std::size_t>(number)],
                            marked(peer, me, number, 10000)));
    }
  });
}

TEST(Exchange, CountsTheBytesToOtherRanks) {
  run_ranks(3, [](const Group& group) {
    const int next = (group.rank() + 1) % 3;
    const int before = (group.rank() + 2) % 3;
    at::Tensor got = at::zeros({7, 2}, at::kHalf);
    start_exchange(group, {{next, at::ones({7, 2}, at::kHalf)}},
                   {{before, got}}, "ring")
        .wait();
    EXPECT_EQ(group.sent_bytes(), 28);
  });
}

TEST(Exchange, AnyTypeOfElementTravels) {
  for (const auto dtype : {at::kBool, at::kByte, at::kBFloat16, at::kDouble}) {
    run_ranks(2, [&](const Group& group) {
      const int peer = 1 - group.rank();
      at::Tensor got = at::zeros({3}, dtype);
      start_exchange(group, {{peer, at::ones({3}, dtype)}}, {{peer, got}}, "x")
          .wait();
      EXPECT_TRUE(at::equal(got, at::ones({3}, dtype)));
    });
  }
}

TEST(Exchange, WaitingTwiceOrForNothingIsFine) {
  Transfer nothing;
  nothing.wait();
  start_exchange(Group::solo(), {}, {}, "alone").wait();
  run_ranks(2, [](const Group& group) {
    const int peer = 1 - group.rank();
    at::Tensor got = at::zeros({1});
    Transfer transfer =
        start_exchange(group, {{peer, at::ones({1})}}, {{peer, got}}, "once");
    transfer.wait();
    transfer.wait();
    EXPECT_EQ(got.item<float>(), 1);
    start_exchange(group, {}, {}, "nobody").wait();
  });
}

TEST(Exchange, ForgottenTransfersStillArrive) {
  run_ranks(2, [](const Group& group) {
    const int peer = 1 - group.rank();
    for (int i = 0; i < 3; ++i) {
      at::Tensor got = at::zeros({1 << 16});
      start_exchange(group, {{peer, at::full({1 << 16}, i, at::kFloat)}},
                     {{peer, got}}, "forgotten");
      EXPECT_TRUE(got.eq(i).all().item<bool>());
    }
  });
}

TEST(Exchange, ASlowPeerIsWaitedFor) {
  run_ranks(
      2,
      [](const Group& group) {
        const int peer = 1 - group.rank();
        if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(400));
        at::Tensor got = at::zeros({1});
        start_exchange(group, {{peer, at::ones({1})}}, {{peer, got}}, "slow")
            .wait();
        EXPECT_EQ(got.item<float>(), 1);
      },
      test::kShort);
}

TEST(Exchange, ATooSlowPeerIsNamed) {
  const auto start = steady_clock::now();
  const std::string loss = loss_of([] {
    run_ranks(
        2,
        [](const Group& group) {
          const int peer = 1 - group.rank();
          if (group.rank() == 0)
            std::this_thread::sleep_for(milliseconds(2500));
          at::Tensor got = at::zeros({1});
          start_exchange(group, {}, {{peer, got}},
                         "ring attention forward, keys, hop 2 of 3")
              .wait();
        },
        test::kShort);
  });
  EXPECT_THAT(loss,
              ContainsRegex("^ring attention forward, keys, hop 2 of 3: rank 1 "
                            "waited 1 s for rank 0: .*; look at the log of "
                            "rank 0, or raise the group's timeout$"));
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(6));
}

TEST(Exchange, ParcelsOfUnequalSizeDoNotMeet) {
  for (const int64_t sent : {4, 6}) {
    EXPECT_THAT(loss_of([&] {
                  run_ranks(2,
                            [&](const Group& group) {
                              const int peer = 1 - group.rank();
                              at::Tensor got = at::zeros({5});
                              start_exchange(group, {{peer, at::ones({sent})}},
                                             {{peer, got}}, "unequal")
                                  .wait();
                            },
                            {.timeout = milliseconds(300)});
                }),
                HasSubstr("unequal: rank "));
  }
}

TEST(Exchange, ADeadPeerEndsTheWaitAtOnce) {
  const auto start = steady_clock::now();
  EXPECT_THROW(
      run_ranks(2,
                [&](const Group& group) {
                  const int peer = 1 - group.rank();
                  at::Tensor got = at::zeros({1 << 20});
                  Transfer transfer =
                      start_exchange(group, {}, {{peer, got}}, "half");
                  if (group.rank() == 0) throw std::domain_error("dies");
                  EXPECT_THAT(loss_of([&] { transfer.wait(); }),
                              ContainsRegex("^half: rank 1 waited .* for rank "
                                            "0: .*; look at the log of"));
                  // Later exchanges fail too, rather than hang.
                  EXPECT_THAT(
                      loss_of([&] {
                        start_exchange(group, {}, {{peer, got}}, "more").wait();
                      }),
                      HasSubstr("more: rank 1 "));
                }),
      std::domain_error);
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Exchange, RefusesBeforeAnythingIsSent) {
  run_ranks(2, [](const Group& group) {
    const int me = group.rank();
    const int peer = 1 - me;
    const at::Tensor one = at::ones({1});
    const auto refusal = [&](std::vector<Parcel> sends,
                             std::vector<Parcel> receives) {
      return message_of([&] {
        start_exchange(group, std::move(sends), std::move(receives), "move");
      });
    };
    EXPECT_EQ(refusal({{2, one}}, {}),
              "move: sends[0] names rank 2 of a group of 2");
    EXPECT_EQ(refusal({{-1, one}}, {}),
              "move: sends[0] names rank -1 of a group of 2");
    EXPECT_EQ(
        refusal({}, {{peer, one}, {me, one}}),
        join("move: receives[1] names rank ", me, " itself; copy what stays"));
    EXPECT_EQ(refusal({{peer, at::ones({2, 3}).t()}}, {}),
              "move: sends[0] is not contiguous; take .contiguous()");
    EXPECT_EQ(refusal({{peer, {}}}, {}), "move: sends[0] holds no tensor");
    EXPECT_EQ(refusal({{peer, one}},
                      {{peer, at::empty({1}, at::TensorOptions(at::kMeta))}}),
              "move: receives[0] is on meta, others on cpu; keep them on one "
              "device");
    EXPECT_EQ(group.sent_bytes(), 0);
    // The group still works.
    at::Tensor got = at::zeros({1});
    start_exchange(group, {{peer, one}}, {{peer, got}}, "move").wait();
    EXPECT_EQ(got.item<float>(), 1);
  });
}

}  // namespace
}  // namespace longspan
