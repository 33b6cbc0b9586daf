#include "longspan/comm/detail/call.h"

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "longspan/comm/detail/group_record.h"
#include "longspan/comm/disagreement.h"
#include "longspan/comm/lost_peer.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/gradient_flow.h"

namespace longspan {

namespace {

thread_local std::string layer_here;

std::string first_line_of(std::string text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

CallScope::CallScope(const Group& group, const char* who)
    : group_(group), who_(who) {
  if (group.size() > 1) outermost_ = group.record()->enter(who);
}

CallScope::~CallScope() {
  if (outermost_) group_.record()->leave();
}

void CallScope::begin_with(std::string text) {
  try {
    group_.record()->begin(layer_here.empty()
                               ? std::move(text)
                               : quickly("in ", layer_here, "; ", text));
  } catch (const WaitStopped& stopped) {
    std::rethrow_exception(stopped.reason);
  } catch (const WaitEnded& ended) {
    const WaitEnded known = group_.record()->blame(ended.peer, ended.what());
    throw_lost_peer(group_, who_, known.peer, {}, known.what());
  }
}

void CallScope::fail(const std::exception_ptr& error) {
  if (!outermost_) return;
  try {
    std::rethrow_exception(error);
  } catch (const LostPeer&) {  // the others know, or will notice as we did
  } catch (const Disagreement&) {
    group_.record()->fail_together();
  } catch (const std::exception& other) {
    group_.record()->fail(first_line_of(other.what()));
  } catch (...) {
    group_.record()->fail("an error without words");
  }
}

std::string name_layer(std::string name) {
  return std::exchange(layer_here, std::move(name));
}

uint64_t call_seed(const Group& group) {
  return group.size() > 1 ? group.record()->tag_seed() : 0;
}

int64_t calls_of(const Group& group) {
  return group.size() > 1 ? group.record()->calls() : 0;
}

bool raised_last(const Group& group) {
  return group.size() > 1 && group.record()->raised_last();
}

void tell_raised(const Group& group, const std::string& what) {
  if (group.size() > 1) group.record()->fail(first_line_of(what));
}

void add_to(std::string& text, int64_t number) {
  char digits[24];
  text.append(digits,
              std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

void add_to(std::string& text, double number) {
  char digits[32];
  text.append(digits,
              std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

std::string gradient_facts() {
  return gradients_flow() ? "; with gradients" : "; without gradients";
}

std::string facts_of(const at::Tensor& tensor, at::IntArrayRef but) {
  if (!tensor.defined()) return "none";
  std::string text(c10::getDtypeNames(tensor.scalar_type()).first);
  text += " [";
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (axis > 0) text += ", ";
    const bool hidden =
        std::ranges::find(but, axis) != but.end() ||
        std::ranges::find(but, axis - tensor.dim()) != but.end();
    text += hidden ? "_" : std::to_string(tensor.size(axis));
  }
  return text + "]";
}

}  // namespace longspan
