#include "longspan/models/layer_share.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/models/detail/run_chunks.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

template <class T>
at::Tensor numbers(const std::vector<T>& list, at::Device device) {
  return at::tensor(list, c10::CppTypeToScalarType<T>::value).to(device);
}

}  // namespace

struct LayerShare::Plans {
  AttentionLayout layout;
  Group group;
  at::Device device;
  int64_t tokens = 0;
  at::Tensor positions = {}, real = {};
  bool has_pads = false;
  std::map<int64_t, Halo> halos = {};
  std::map<std::pair<int64_t, PoolOverlap>, Pools> pools = {};
  std::map<std::pair<int64_t, StateWay>, RunChunks> chunks = {};
  std::map<StatePair, StateWay> ways = {};
};

LayerShare::LayerShare(AttentionLayout layout, Group group, at::Device device) {
  check(layout.masks.size() == 1, "LayerShare: the layout has ",
        layout.masks.size(),
        " masks; expected one: lay the rows end to end in one stream");
  const Mask& mask = layout.masks[0];
  check(mask.band() == Band{} && mask.groups().empty() &&
            mask.hidden().empty() && mask.ratio() == 0,
        "LayerShare: the mask has a window, groups, hidden tokens or "
        "compressed keys, which layers would not see; expected "
        "Mask::causal(packing)");
  check(layout.ownership.ranks() == group.size(),
        "LayerShare: the ownership is over ", layout.ownership.ranks(),
        " ranks but the group has ", group.size());
  plans_ = std::make_shared<Plans>(
      Plans{.layout = std::move(layout), .group = group, .device = device});
  const Ownership& ownership = plans_->layout.ownership;
  plans_->tokens = ownership.local_tokens(group.rank());
  std::vector<int64_t> positions(static_cast<std::size_t>(plans_->tokens), 0);
  at::Tensor real = at::zeros({plans_->tokens}, at::TensorOptions(at::kBool));
  int64_t found = 0;
  for (const DocumentRun& run :
       runs_of(plans_->layout.masks[0].packing(), ownership, group.rank())) {
    for (int64_t i = 0; i < run.size(); ++i) {
      positions[static_cast<std::size_t>(run.local + i)] = run.position + i;
    }
    real.narrow(0, run.local, run.size()).fill_(true);
    found += run.size();
  }
  plans_->has_pads = found < plans_->tokens;
  plans_->positions = numbers(positions, device);
  plans_->real = real.to(device);
}

const AttentionLayout& LayerShare::layout() const {
  return plans_->layout;
}
const Group& LayerShare::group() const {
  return plans_->group;
}
at::Device LayerShare::device() const {
  return plans_->device;
}
int64_t LayerShare::tokens() const {
  return plans_->tokens;
}
const at::Tensor& LayerShare::positions() const {
  return plans_->positions;
}
const at::Tensor& LayerShare::real() const {
  return plans_->real;
}
bool LayerShare::has_pads() const {
  return plans_->has_pads;
}

const LayerShare::Halo& LayerShare::halo(int64_t count) const {
  const auto found = plans_->halos.find(count);
  if (found != plans_->halos.end()) return found->second;
  Halo made{.plan = HaloPlan::of(layout(), count, group().rank())};
  made.sends = sends_tensor(made.plan.sends());
  made.seen = numbers(made.plan.seen(), device()).view({tokens(), count + 1});
  return plans_->halos.emplace(count, std::move(made)).first->second;
}

const LayerShare::Pools& LayerShare::pools(int64_t ratio,
                                           PoolOverlap overlap) const {
  const auto key = std::pair(ratio, overlap);
  const auto found = plans_->pools.find(key);
  if (found != plans_->pools.end()) return found->second;
  Pools made{.plan = PoolPlan::of(layout(), ratio, overlap, group().rank())};
  made.tables = PoolTables::of(made.plan, device());
  made.positions = numbers(made.plan.positions(), device());
  std::vector<int32_t> start, end;
  int64_t most = 0;
  for (const TokenRange& window : made.plan.windows()) {
    start.push_back(static_cast<int32_t>(window.begin));
    end.push_back(static_cast<int32_t>(window.end));
    most = std::max(most, window.size());
  }
  made.start = numbers(start, device());
  made.end = numbers(end, device());
  const at::Tensor steps =
      at::arange(most, at::TensorOptions(at::kInt).device(device()));
  const at::Tensor listed = made.start.unsqueeze(1) + steps;
  made.ended = at::where(listed < made.end.unsqueeze(1), listed, -1);
  return plans_->pools.emplace(key, std::move(made)).first->second;
}

const RunChunks& LayerShare::chunks(int64_t most, const StatePair& pair) const {
  auto way = plans_->ways.find(pair);
  if (way == plans_->ways.end()) {
    way = plans_->ways.emplace(pair, StatePlan::choose(layout(), pair)).first;
  }
  const auto key = std::pair(most, way->second);
  const auto found = plans_->chunks.find(key);
  if (found != plans_->chunks.end()) return found->second;
  const auto plan = StatePlan::of(layout(), group().rank(), 1, way->second);
  return plans_->chunks
      .emplace(key, RunChunks::of(plan, most, tokens(), device()))
      .first->second;
}

void LayerShare::check_tokens(const char* who, const char* name,
                              const at::Tensor& x,
                              at::IntArrayRef sizes) const {
  bool fits = x.defined() && x.is_floating_point() && x.device() == device() &&
              x.dim() == std::ssize(sizes) + 1 && x.size(0) == tokens();
  for (std::size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] == kAny || sizes[i] == x.size(static_cast<int64_t>(i) + 1);
  }
  if (fits) return;
  std::string expected = join("[", tokens());
  for (const int64_t size : sizes) {
    expected += size == kAny ? std::string(", n") : join(", ", size);
  }
  check(false, who, ": `", name, "` is ",
        x.defined() ? describe(x) : std::string("not there"),
        "; expected floating ", expected, "], a row for each token of rank ",
        group().rank(), ", on ", device().str());
}

}  // namespace longspan
