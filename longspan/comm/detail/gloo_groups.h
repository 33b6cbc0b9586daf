#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "longspan/comm/detail/launch.h"
#include "longspan/comm/group.h"

namespace longspan {

/// Where the ranks of a new group leave each other their addresses.
struct MeetingPlace;

/// For threads of this process, which share the meeting place.
std::shared_ptr<MeetingPlace> meet_here(std::chrono::milliseconds timeout);

/// For processes, at the address of their launch; rank 0 serves it, unless it
/// is served already. Ranks that give the same `prefix` meet.
std::shared_ptr<MeetingPlace> meet_at(const Launch& launch,
                                      const std::string& prefix);

/// Where the ranks of a group listen.
enum class Network {
  loopback,           ///< threads and processes of this machine
  default_interface,  ///< GLOO_SOCKET_IFNAME, or the one of the host's name
};

struct GlooGroup {
  std::shared_ptr<MeetingPlace> place;
  int rank = 0;
  int size = 1;
  std::string name;
  Network network = Network::loopback;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// One rank of a group over gloo, registered under its name; the result owns
/// it. Returns when all ranks are connected; every rank must call it. From then
/// on the process ignores SIGPIPE, unless it handles that signal already: the
/// death of a peer must be an error here, not the end of this process.
Group make_gloo_group(const GlooGroup& group);

/// Closes the connections of a group that make_gloo_group made, so that waiting
/// peers notice at once, and unregisters its name. The group is unusable after
/// that.
void close_gloo_group(const Group& group);

/// Why this build cannot make groups; empty when it can.
std::string why_no_gloo();

}  // namespace longspan
