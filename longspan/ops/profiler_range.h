#pragma once

#include <ATen/record_function.h>

namespace longspan {

/// A range in torch's profiler, and through it in NVTX, as long as it lives.
/// `name()` is asked while a profiler runs, and else it costs nothing.
class ProfilerRange {
 public:
  template <class Name>
  explicit ProfilerRange(const Name& name)
      : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) range_.before(name());
  }

 private:
  at::RecordFunction range_;
};

}  // namespace longspan
