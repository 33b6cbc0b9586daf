#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace longspan {

struct GroupRecord;

/// The ranks that hold one sequence together: a context-parallel (CP) group.
///
/// A group of one is an ordinary group: every collective returns its argument.
/// Copies are cheap and share the traffic counter.
///
/// A group does not keep its process group alive: torch.distributed ends one
/// when told to, not when the last model that uses it is deleted. Once it is
/// gone, communication throws and everything else still answers.
class Group {
 public:
  Group(const Group&);
  Group(Group&&) noexcept;
  Group& operator=(const Group&);
  Group& operator=(Group&&) noexcept;
  ~Group();

  /// One rank, no communication.
  static Group solo();

  /// How long a wait may last; nothing: LONGSPAN_TIMEOUT (seconds), or else
  /// what the process group was made with.
  using Timeout = std::optional<std::chrono::milliseconds>;

  /// Any c10d group, whatever its backend. A group that c10d has not registered
  /// under a name gets one here. A timeout holds for all Groups of the process
  /// group.
  static Group of(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                  Timeout timeout = {});

  /// A group that keeps its process group alive, as do its copies: for one that
  /// nobody else holds.
  static Group owning(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  /// The group that c10d registered under this name; "" is solo. Operators get
  /// their group by its name.
  static Group named(const std::string& name);

  /// From torchrun's or Slurm's variables, over gloo; solo where
  /// there are none. Every call makes a new process group, which the result
  /// owns, so all ranks must call it equally often.
  static Group from_environment(Timeout timeout = {});

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// What named() takes; "" for solo.
  const std::string& name() const { return name_; }

  /// How long a wait may last; torch's default once the process group is gone.
  std::chrono::milliseconds timeout() const;

  /// Sets it, for all Groups of the process group. A peer whose process ended
  /// on this machine is noticed at once, whatever it is.
  void set_timeout(std::chrono::milliseconds timeout) const;

  /// Bytes of payload that this process sent to other ranks through this group
  /// since it was made, counted where tensors are handed to c10d.
  int64_t sent_bytes() const;

  /// How long this process waited for parcels of other ranks since the group
  /// was made: time of the host, which backends with streams do not block.
  std::chrono::nanoseconds waited() const;

  /// "rank 1 of 4 (gloo)", or "(destroyed)".
  std::string to_string() const;

  /// The process group; null for solo. Hold it only while it is in use. Throws
  /// when it is gone.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;

  /// What all Group values of one process group share; null for solo.
  const std::shared_ptr<GroupRecord>& record() const { return record_; }

 private:
  Group();

  int rank_ = 0;
  int size_ = 1;
  std::string name_;
  std::shared_ptr<GroupRecord> record_;
  c10::intrusive_ptr<c10d::ProcessGroup> owned_;  // by owning() only
};

}  // namespace longspan
