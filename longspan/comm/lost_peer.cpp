#include "longspan/comm/lost_peer.h"

#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

/// The first line without the trace that c10 adds, nor a final full stop.
std::string_view essence(std::string_view cause) {
  cause = cause.substr(0, cause.find('\n'));
  while (!cause.empty() && (cause.back() == '.' || cause.back() == ' ')) {
    cause.remove_suffix(1);
  }
  return cause.empty() ? "no reason given" : cause;
}

}  // namespace

void throw_lost_peer(const Group& group, const std::string& purpose, int peer,
                     std::optional<std::chrono::milliseconds> time,
                     std::string_view cause) {
  const std::string who =
      peer < 0 ? std::string("the other ranks") : join("rank ", peer);
  // To the nearest tenth: a wait may end a millisecond before its deadline.
  const std::string waited =
      time ? join(" waited ",
                  static_cast<double>((time->count() + 50) / 100) / 10,
                  " s for ")
           : std::string(" could not reach ");
  throw LostPeer(join(purpose, ": rank ", group.rank(), waited, who, ": ",
                      essence(cause), "; look at the log of ", who,
                      ", or raise the group's timeout"));
}

}  // namespace longspan
