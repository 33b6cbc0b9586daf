#include "longspan/comm/detail/lifeline.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

/// How long a machine has to answer a later knock, and the pause between two.
constexpr std::chrono::milliseconds kAnswer{300}, kPause{500};

// ---- Addresses.

struct Address {
  sockaddr_storage bytes = {};
  socklen_t size = 0;

  static Address of(const sockaddr* from) {
    Address made;
    made.size = from->sa_family == AF_INET6 ? sizeof(sockaddr_in6)
                                            : sizeof(sockaddr_in);
    std::memcpy(&made.bytes, from, made.size);
    return made;
  }
  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&bytes);
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }

  /// Whether other machines can mean this one by it.
  bool is_public() const {
    if (bytes.ss_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(&bytes);
      const uint32_t number = ntohl(v4->sin_addr.s_addr);
      return number != 0 && number >> 24 != 127;
    }
    if (bytes.ss_family == AF_INET6) {
      const in6_addr& v6 =
          reinterpret_cast<const sockaddr_in6*>(&bytes)->sin6_addr;
      return !IN6_IS_ADDR_LOOPBACK(&v6) && !IN6_IS_ADDR_UNSPECIFIED(&v6) &&
             !IN6_IS_ADDR_LINKLOCAL(&v6);
    }
    return false;
  }

  /// In numbers; nothing where that cannot be said.
  std::string host() const {
    char text[NI_MAXHOST] = {};
    const int failed = getnameinfo(get(), size, text, sizeof(text), nullptr, 0,
                                   NI_NUMERICHOST);
    return failed == 0 ? text : "";
  }
};

std::optional<Address> resolve(const std::string& host,
                               const std::string& port) {
  addrinfo wanted = {};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &wanted, &found) != 0) {
    return std::nullopt;
  }
  std::optional<Address> first;
  for (const addrinfo* each = found; each != nullptr && !first;
       each = each->ai_next) {
    if (each->ai_family == AF_INET || each->ai_family == AF_INET6) {
      first = Address::of(each->ai_addr);
    }
  }
  freeaddrinfo(found);
  return first;
}

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// That of the interface that gloo was told to use.
std::optional<Address> address_of_interface() {
  std::string name = setting("GLOO_SOCKET_IFNAME");
  name = name.substr(0, name.find(','));
  ifaddrs* all = nullptr;
  if (name.empty() || getifaddrs(&all) != 0) return std::nullopt;
  std::optional<Address> found;
  for (const ifaddrs* each = all; each != nullptr && !found;
       each = each->ifa_next) {
    if (each->ifa_addr == nullptr || name != each->ifa_name) continue;
    const int family = each->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6) {
      found = Address::of(each->ifa_addr);
    }
  }
  freeifaddrs(all);
  return found;
}

/// The one that packets for the first rank would carry; none is sent.
std::optional<Address> address_towards_first() {
  const std::string first = setting("MASTER_ADDR");
  const auto to = first.empty() ? std::nullopt : resolve(first, "9");
  if (!to) return std::nullopt;
  const int fd = socket(to->bytes.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  Address mine;
  mine.size = sizeof(mine.bytes);
  const bool known = connect(fd, to->get(), to->size) == 0 &&
                     getsockname(fd, mine.get(), &mine.size) == 0;
  close(fd);
  return known && mine.is_public() ? std::optional(mine) : std::nullopt;
}

std::optional<Address> address_of_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  const auto found = resolve(name, "9");
  return found && found->is_public() ? found : std::nullopt;
}

// ---- This process's own end.

struct Door {
  std::mutex mutex;
  int socket = -1;
  pid_t process = 0;
  std::string address;
};

Door& door() {
  static auto* const only = new Door;  // a fork may come after statics ended
  return *only;
}

/// A child keeps what its parent opened, and would keep the parent's lines
/// uncut. Only the thread that forked is left, so nothing is locked.
void close_in_child() {
  if (door().socket >= 0) close(door().socket);
  door().socket = -1;
}

/// A socket that listens at any port of the address's family, and the port.
std::pair<int, int> listen_at(const Address& at) {
  const int fd = socket(at.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return {-1, 0};
  Address bound = at;
  // The family alone matters for the port: it is the second word of both.
  reinterpret_cast<sockaddr_in*>(bound.get())->sin_port = 0;
  if (bind(fd, bound.get(), bound.size) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, bound.get(), &bound.size) != 0) {
    close(fd);
    return {-1, 0};
  }
  return {fd, ntohs(reinterpret_cast<sockaddr_in*>(bound.get())->sin_port)};
}

// ---- Knocking.

enum class Answer { open, refused, none };

/// Tries to connect; the connection goes to `fd` where it is open.
Answer knock(const std::string& address, std::chrono::milliseconds patience,
             int& fd) {
  const auto gap = address.find(' ');
  if (gap == std::string::npos) return Answer::none;
  const auto to = resolve(address.substr(0, gap), address.substr(gap + 1));
  if (!to) return Answer::none;
  fd = socket(to->bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC,
              0);
  if (fd < 0) return Answer::none;
  int error = connect(fd, to->get(), to->size) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waits = {.fd = fd, .events = POLLOUT, .revents = 0};
    socklen_t size = sizeof(error);
    if (poll(&waits, 1, static_cast<int>(patience.count())) != 1 ||
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = ETIMEDOUT;
    }
  }
  if (error == 0) return Answer::open;
  close(fd);
  fd = -1;
  return error == ECONNREFUSED ? Answer::refused : Answer::none;
}

/// Nothing is ever sent, so whatever can be read is the end.
bool is_cut(int connection) {
  pollfd looked = {.fd = connection, .events = POLLIN, .revents = 0};
  return poll(&looked, 1, 0) == 1;
}

}  // namespace

std::string Lifeline::address() {
  Door& mine = door();
  const std::lock_guard lock(mine.mutex);
  if (mine.process == getpid()) return mine.address;
  static const int registered =
      pthread_atfork(nullptr, nullptr, close_in_child);
  if (mine.socket >= 0) close(mine.socket);
  mine.socket = -1;
  mine.process = getpid();
  mine.address.clear();
  auto found = address_of_interface();
  if (!found) found = address_towards_first();
  if (!found) found = address_of_name();
  if (!found || registered != 0) return "";
  const auto [fd, port] = listen_at(*found);
  if (fd < 0) return "";
  mine.socket = fd;
  mine.address = join(found->host(), " ", port);
  return mine.address;
}

std::shared_ptr<Lifeline> Lifeline::to(const std::string& address,
                                       std::chrono::milliseconds patience) {
  static auto* const mutex = new std::mutex;
  static auto* const lines = new std::map<std::string, std::weak_ptr<Lifeline>>;
  const std::lock_guard lock(*mutex);
  std::erase_if(*lines, [](const auto& each) { return each.second.expired(); });
  if (const auto known = lines->find(address); known != lines->end()) {
    if (auto line = known->second.lock()) return line;
  }
  int fd = -1;
  if (knock(address, patience, fd) != Answer::open) return nullptr;
  auto line = std::make_shared<Lifeline>(address, fd);
  (*lines)[address] = line;
  return line;
}

Lifeline::Lifeline(std::string address, int connection)
    : address_(std::move(address)), connection_(connection) {}

Lifeline::~Lifeline() {
  if (connection_ >= 0) close(connection_);
}

bool Lifeline::is_gone() {
  const std::lock_guard lock(mutex_);
  if (gone_ || (connection_ >= 0 && !is_cut(connection_))) return gone_;
  if (connection_ >= 0) close(connection_);
  connection_ = -1;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_knock_) return false;
  next_knock_ = now + kPause;
  gone_ = knock(address_, kAnswer, connection_) == Answer::refused;
  return gone_;
}

}  // namespace longspan
