#include "longspan/comm/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <future>

#include "longspan/comm/agree.h"
#include "longspan/comm/collectives.h"
#include "longspan/comm/detail/gloo_groups.h"
#include "longspan/comm/detail/group_record.h"
#include "longspan/comm/detail/launch.h"
#include "longspan/core/detail/check.h"
#include "tests/comm/ranks.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using ::testing::HasSubstr;

c10::intrusive_ptr<c10d::ProcessGroup> lone_gloo_group(
    const std::string& name) {
  return make_gloo_group(
             {.place = meet_here(std::chrono::minutes(5)), .name = name})
      .process_group();
}

TEST(Group, SoloIsOneRankWithoutAName) {
  const Group group = Group::solo();
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  EXPECT_EQ(group.name(), "");
  EXPECT_EQ(group.sent_bytes(), 0);
  EXPECT_EQ(group.to_string(), "rank 0 of 1 (solo)");
  EXPECT_EQ(Group::named("").size(), 1);
}

TEST(Group, KnowsItsTimeoutAndBackend) {
  run_ranks(
      2,
      [](const Group& group) {
        EXPECT_EQ(group.timeout(), std::chrono::milliseconds(1000));
        EXPECT_EQ(group.to_string(),
                  join("rank ", group.rank(), " of 2 (gloo)"));
      },
      test::kShort);
}

/// A store whose first connection takes until it is let.
struct SlowStore : c10d::HashStore {
  std::promise<void> asked, let;

  c10::intrusive_ptr<c10d::Store> clone() override {
    asked.set_value();
    let.get_future().wait();
    return c10::make_intrusive<c10d::HashStore>();
  }
};

TEST(Group, EndsWhenItIsDestroyedThoughTheStoreIsSlow) {
  const auto store = c10::make_intrusive<SlowStore>();
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 2);
  const Group group = Group::of(process_group);
  group.record()->begin("the first call");
  group.record()->begin("the second, after which the others are looked at");
  store->asked.get_future().wait();
  process_group.reset();
  EXPECT_EQ(group.to_string(), "rank 0 of 2 (destroyed)");
  store->let.set_value();
}

TEST(Group, ARegisteredGroupKeepsItsName) {
  const auto process_group = lone_gloo_group("mine");
  EXPECT_EQ(Group::of(process_group).name(), "mine");
  close_gloo_group(Group::of(process_group));
}

TEST(Group, AnUnregisteredGroupGetsAName) {
  run_ranks(2, [](const Group& group) {
    auto wrapped = c10::make_intrusive<c10d::ProcessGroup>(
        group.process_group()->getStore(), group.rank(), group.size());
    wrapped->setBackend(
        c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
        group.process_group()->getBackend(c10::DeviceType::CPU));
    wrapped->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    const Group other = Group::of(wrapped);
    EXPECT_NE(other.name(), "");
    EXPECT_NE(other.name(), group.name());
    EXPECT_EQ(Group::named(other.name()).process_group(), wrapped);
    EXPECT_EQ(Group::of(wrapped).name(), other.name());
  });
}

TEST(Group, DoesNotKeepTheProcessGroupAlive) {
  auto process_group = lone_gloo_group("kept by its owner");
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> watched(process_group);
  const Group group = Group::of(process_group);
  const Group again = Group::named("kept by its owner");
  EXPECT_EQ(process_group.use_count(), 1U);
  EXPECT_EQ(group.process_group(), process_group);
  EXPECT_EQ(process_group.use_count(), 1U);
  process_group.reset();
  EXPECT_TRUE(watched.expired());
  c10d::unregister_process_group("kept by its owner");
}

TEST(Group, AnOwningGroupKeepsItAsLongAsItsCopies) {
  auto made = std::make_unique<Group>(Group::owning(lone_gloo_group("owned")));
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> watched(
      made->process_group());
  const Group known = Group::named("owned");
  auto copy = std::make_unique<Group>(*made);
  made.reset();
  EXPECT_FALSE(watched.expired());
  EXPECT_EQ(known.process_group(), copy->process_group());
  copy.reset();
  EXPECT_TRUE(watched.expired());
  c10d::unregister_process_group("owned");
}

TEST(Group, OnceItsProcessGroupIsGoneOnlyCommunicationThrows) {
  std::vector<Group> kept(2, Group::solo());
  run_ranks(2, [&](const Group& group) {
    rotate(at::ones({2}), 1, group);
    kept[static_cast<std::size_t>(group.rank())] = group;
  });
  for (int rank = 0; rank < 2; ++rank) {
    const Group& group = kept[static_cast<std::size_t>(rank)];
    EXPECT_EQ(group.rank(), rank);
    EXPECT_EQ(group.size(), 2);
    EXPECT_EQ(group.sent_bytes(), 8);
    EXPECT_GT(group.timeout(), std::chrono::milliseconds(0));
    EXPECT_EQ(group.to_string(), join("rank ", rank, " of 2 (destroyed)"));
    const std::string gone =
        join("Group: no process group named '", group.name(),
             "' is alive; keep it, and destroy it only after the last use of "
             "the group");
    EXPECT_EQ(message_of([&] { group.process_group(); }), gone);
    EXPECT_EQ(message_of([&] { rotate(at::ones({2}), 1, group); }), gone);
    EXPECT_EQ(message_of([&] { agree(group, {{"x", 1}}); }), gone);
  }
}

TEST(Group, RefusesWhatIsNoGroup) {
  EXPECT_EQ(message_of([] { Group::of({}); }),
            "Group: no process group; for one rank take Group::solo()");
  EXPECT_EQ(message_of([] { Group::named("nobody"); }),
            "Group: no process group named 'nobody' is alive; keep it, and "
            "destroy it only after the last use of the group");
}

// ---- Launchers.

using Variables = std::map<std::string, std::string>;

std::optional<Launch> launched(const Variables& variables) {
  return launch_from([&](const std::string& name) {
    const auto it = variables.find(name);
    return it == variables.end() ? std::nullopt : std::optional(it->second);
  });
}

TEST(Launch, NothingIsOneRank) {
  EXPECT_FALSE(launched({}).has_value());
  // An allocation is no task.
  EXPECT_FALSE(launched({{"SLURM_NTASKS", "4"}}).has_value());
}

TEST(Launch, ReadsTorchrun) {
  const auto launch = launched({{"RANK", "1"},
                                {"WORLD_SIZE", "4"},
                                {"MASTER_ADDR", "host"},
                                {"MASTER_PORT", "29500"},
                                {"SLURM_PROCID", "7"}});
  ASSERT_TRUE(launch.has_value());
  EXPECT_EQ(launch->rank, 1);
  EXPECT_EQ(launch->size, 4);
  EXPECT_EQ(launch->address, "host");
  EXPECT_EQ(launch->port, 29500);
  EXPECT_FALSE(launch->store_exists);
}

TEST(Launch, OneRankNeedsNoAddress) {
  EXPECT_EQ(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}})->size, 1);
}

TEST(Launch, ReadsSlurm) {
  const auto launch = launched({{"SLURM_PROCID", "3"},
                                {"SLURM_NTASKS", "8"},
                                {"SLURM_NODELIST", "gpu[07-09,12]"},
                                {"SLURM_JOB_ID", "40123"}});
  ASSERT_TRUE(launch.has_value());
  EXPECT_EQ(launch->rank, 3);
  EXPECT_EQ(launch->size, 8);
  EXPECT_EQ(launch->address, "gpu07");
  EXPECT_EQ(launch->port, 20123);
}

TEST(Launch, FindsTheFirstHost) {
  EXPECT_EQ(first_host("one"), "one");
  EXPECT_EQ(first_host("one,two[1-3]"), "one");
  EXPECT_EQ(first_host("node[03-07,9],login1"), "node03");
  EXPECT_EQ(first_host("node[4]"), "node4");
  EXPECT_EQ(first_host("rack[2-3]-node[05,07].local,x"), "rack2-node05.local");
}

TEST(Launch, NamesWhatIsMissing) {
  const auto refusal = [](const Variables& variables) {
    return message_of([&] { launched(variables); });
  };
  EXPECT_EQ(refusal({{"RANK", "0"}}),
            "from_environment: RANK is set but WORLD_SIZE is not; set both, or "
            "neither to run on one rank");
  EXPECT_EQ(refusal({{"WORLD_SIZE", "2"}}),
            "from_environment: WORLD_SIZE is set but RANK is not; set both, or "
            "neither to run on one rank");
  EXPECT_EQ(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}),
            "from_environment: MASTER_ADDR and MASTER_PORT are not set, so 2 "
            "ranks cannot meet; give the host of rank 0 and a free port there");
  EXPECT_EQ(refusal({{"MASTER_PORT", "1"}}),
            "from_environment: MASTER_PORT is set but RANK and WORLD_SIZE are "
            "not; set all of them, or none to run on one rank");
  EXPECT_EQ(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
            "from_environment: RANK='2'; expected a number from 0 to 1");
  EXPECT_EQ(refusal({{"SLURM_PROCID", "0"}}),
            "from_environment: SLURM_PROCID is set but SLURM_NTASKS is not; "
            "set both, or neither to run on one rank");
  EXPECT_THAT(refusal({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}}),
              HasSubstr("neither MASTER_ADDR nor SLURM_NODELIST is set"));
  EXPECT_THAT(refusal({{"SLURM_PROCID", "0"},
                       {"SLURM_NTASKS", "2"},
                       {"SLURM_NODELIST", "x[1-2"}}),
              HasSubstr("has a bracket without an end"));
}

}  // namespace
}  // namespace longspan
