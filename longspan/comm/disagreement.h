#pragma once

#include <c10/util/Exception.h>

namespace longspan {

/// The ranks of a group do different things, or one of them raised where the
/// others did not. Says what each did. In Python it is a ValueError, on every
/// way there, also out of a backward pass.
///
/// Where another rank raised in the call that ends with this, all ranks left
/// that call and may go on together; otherwise the group is unusable.
class Disagreement : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

}  // namespace longspan
