// A group whose other ranks are not there: what they would send is given
// beforehand, so that one rank's share of a ring can be timed, and checked,
// without a wire. bench/ring_share.py loads this as a library of operators.

#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

class Done : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

/// What arrives in the order of the steps, again for each pass.
struct Arrivals {
  std::vector<at::Tensor> tensors;
  std::size_t next = 0;

  const at::Tensor& take() {
    check(!tensors.empty(), "absent_ranks: nothing is there to arrive");
    return tensors[next++ % tensors.size()];
  }
};

/// Keys have one type and gradients another, which tells them apart.
class AbsentRanks : public c10d::Backend {
 public:
  AbsentRanks(int rank, int ranks, std::vector<at::Tensor> keys,
              std::vector<at::Tensor> gradients, bool copies)
      : Backend(rank, ranks),
        keys_{std::move(keys)},
        gradients_{std::move(gradients)},
        copies_(copies) {}

  const std::string getBackendName() const override { return "absent"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors,
                                      int /*rank*/, int /*tag*/) override {
    if (keeps_ && tensors[0].scalar_type() == at::kFloat) {
      sent_.push_back(tensors[0].clone());
    }
    return c10::make_intrusive<Done>();
  }

  /// What arrives is there already: the buffer becomes that memory, or, for
  /// those who look at memory, is filled with it.
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors,
                                      int /*rank*/, int /*tag*/) override {
    at::Tensor& buffer = tensors[0];
    const bool is_key =
        buffer.scalar_type() == keys_.tensors.at(0).scalar_type();
    const at::Tensor& from = (is_key ? keys_ : gradients_).take();
    check(from.numel() == buffer.numel(), "absent_ranks: ", from.numel(),
          " numbers arrive where ", buffer.numel(), " are expected");
    const at::Storage& storage = buffer.storage();
    if (copies_ || storage.nbytes() != from.nbytes()) {
      buffer.copy_(from.view(buffer.sizes()));
    } else {
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
          c10::DataPtr(from.data_ptr(), from.device()));
    }
    return c10::make_intrusive<Done>();
  }

  /// Gradients that were sent since the last call; from now on they are kept.
  std::vector<at::Tensor> take_sent() {
    keeps_ = true;
    return std::exchange(sent_, {});
  }

 private:
  Arrivals keys_, gradients_;
  bool copies_;
  bool keeps_ = false;
  std::vector<at::Tensor> sent_;
};

std::string absent_ranks(int64_t rank, int64_t ranks,
                         std::vector<at::Tensor> keys,
                         std::vector<at::Tensor> gradients, bool copies) {
  const auto device = keys.at(0).device().type();
  const auto kind = c10d::ProcessGroup::BackendType::CUSTOM;
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(
      static_cast<int>(rank), static_cast<int>(ranks));
  group->setBackend(device, kind,
                    c10::make_intrusive<AbsentRanks>(
                        static_cast<int>(rank), static_cast<int>(ranks),
                        std::move(keys), std::move(gradients), copies));
  group->setDefaultBackend(kind);
  // Operators find groups by their names as long as somebody keeps them.
  static std::vector<Group> made;
  return made.emplace_back(Group::owning(group)).name();
}

std::vector<at::Tensor> sent_gradients(const std::string& name,
                                       const at::Tensor& like) {
  const auto backend =
      Group::named(name).process_group()->getBackend(like.device().type());
  auto* const absent = dynamic_cast<AbsentRanks*>(backend.get());
  check(absent != nullptr, "sent_gradients: ", name, " has ranks");
  return absent->take_sent();
}

}  // namespace

TORCH_LIBRARY(longspan_bench, m) {
  m.def(
      "absent_ranks(int rank, int ranks, Tensor[] keys, Tensor[] gradients, "
      "bool copies) -> str",
      absent_ranks);
  m.def("sent_gradients(str name, Tensor like) -> Tensor[]", sent_gradients);
}

}  // namespace longspan
