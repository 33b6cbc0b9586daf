#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace longspan {

/// Where the ranks of a group listen.
enum class Network {
  loopback,           ///< threads and processes of this machine
  default_interface,  ///< GLOO_SOCKET_IFNAME, or the one of the host's name
};

struct GlooGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::string name;
  Network network = Network::loopback;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// One rank of a group over gloo, registered under its name. Returns when all
/// ranks are connected; every rank must call it. From then on the process
/// ignores SIGPIPE, unless it handles that signal already: a peer that dies
/// must be an error, not the end.
c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const GlooGroup& group);

/// Closes its connections, so that peers that wait find out at once, and takes
/// its name away. The group is of no use after that.
void close_gloo_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    const std::string& name);

/// Why this build cannot make groups; empty when it can.
std::string why_no_gloo();

}  // namespace longspan
