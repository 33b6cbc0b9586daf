#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "longspan/comm/group.h"

namespace longspan {

/// Whether LONGSPAN_AGREE is anything but "off".
bool compares_calls();

/// One call over a group: an operator with all its exchanges.
///
/// Calls are counted and their texts kept, so that ranks that do different
/// things are told what: a text holds everything that must be equal on all
/// ranks, and nothing else. Messages between ranks whose calls differ never
/// meet over gloo, so the ranks wait, look what the others do, and say so.
/// Elsewhere (NCCL) they compare a text when they see it for the first time,
/// and now and then. LONGSPAN_AGREE is "first" for this, "every" to compare
/// every call, "off" to compare none.
///
/// A call inside a call is part of it. A second thread inside a call of the
/// same group, and a forked process, are refused.
class CallScope {
 public:
  CallScope(const Group& group, const char* who);
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  ~CallScope();

  /// The call begins. text() is what follows `who`: facts with "; " between.
  /// It is only asked for where it is wanted: not inside another call, nor on
  /// one rank.
  template <class Text>
  void begin(const Text& text) {
    if (outermost_) begin_with(compares_calls() ? text() : std::string());
  }

  /// The call ends with this error, which the others are told of.
  void fail(const std::exception_ptr& error);

 private:
  void begin_with(std::string text);

  Group group_;
  const char* who_;
  bool outermost_ = false;
};

/// Runs a call: run(call) checks its arguments, begins the call and does it.
/// Whatever it throws, the others are told.
template <class Run>
auto as_call(const Group& group, const char* who, const Run& run) {
  CallScope call(group, who);
  try {
    return run(call);
  } catch (...) {
    call.fail(std::current_exception());
    throw;
  }
}

/// Calls of this thread say from now on that they are in this layer; returns
/// what they said before. Without names a layer that a rank leaves out is
/// noticed only where its calls no longer look like the others'.
std::string name_layer(std::string name);

/// What all messages of the call under way have in common; 0 on one rank.
uint64_t call_seed(const Group& group);

/// How many calls this rank has begun or raised in; 0 on one rank.
int64_t calls_of(const Group& group);

/// Whether nothing began since a call of this rank raised, so that the others
/// know.
bool raised_last(const Group& group);

/// Something raised outside of calls: counts as a call that raised, so that
/// ranks that wait for this one say why.
void tell_raised(const Group& group, const std::string& what);

/// Adds parts to the text of a call, which is made in every call: without the
/// streams that messages use.
inline void add_to(std::string& text, std::string_view part) {
  text += part;
}
void add_to(std::string& text, int64_t number);
void add_to(std::string& text, double number);  // with all its digits
template <class... Parts>
std::string quickly(const Parts&... parts) {
  std::string text;
  text.reserve(256);
  (add_to(text, parts), ...);
  return text;
}

/// "float32 [2, _, 64]": type and shape, but for the axes that differ between
/// ranks.
std::string facts_of(const at::Tensor& tensor, at::IntArrayRef but = {});

/// Whether there will be a backward pass, as the last facts of a text.
std::string gradient_facts();

}  // namespace longspan
