#include "socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <mutex>
#include <utility>
#include <vector>

namespace commsched {
namespace {

std::atomic<uint64_t> fork_count = 0;

// Every open Socket of this process. Never destroyed: sockets may outlive static objects.
struct Registry {
  std::mutex mutex;
  std::vector<int> open;
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);

  static Registry& get() {
    static Registry& only = *new Registry;
    return only;
  }

 private:
  // Hold the lock across the fork, so that the child sees a consistent list.
  Registry() { pthread_atfork(before_fork, in_parent, in_child); }
  static void before_fork() { get().mutex.lock(); }
  static void in_parent() { get().mutex.unlock(); }
  static void in_child() {
    Registry& registry = get();
    ++fork_count;
    for (int fd : registry.open) ::dup3(registry.nothing, fd, O_CLOEXEC);
    registry.mutex.unlock();
  }
};

[[maybe_unused]] const Registry& at_load = Registry::get();  // forks are counted from here on

constexpr int kProbes = 4;  // unanswered ones after which a host is lost

}  // namespace

uint64_t forks() noexcept { return fork_count; }

Socket::Socket(int fd) : fd_(fd) {
  if (fd < 0) return;
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  registry.open.push_back(fd);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    std::swap(fd_, other.fd_);
  }
  return *this;
}

int Socket::release() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return fd;
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  registry.open.erase(std::remove(registry.open.begin(), registry.open.end(), fd), registry.open.end());
  return fd;
}

void Socket::close() {
  const int fd = release();
  if (fd >= 0) ::close(fd);
}

void set_keepalive(int fd, double seconds) {
  const int on = 1, probes = kProbes;
  const int interval = std::max(1, static_cast<int>(std::lround(seconds / (kProbes + 1))));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &interval, sizeof(interval));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

std::string peer_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char text[INET6_ADDRSTRLEN] = {};
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "an unknown address";
  const void* raw = address.ss_family == AF_INET6 ? static_cast<void*>(&reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr)
                                                  : &reinterpret_cast<sockaddr_in*>(&address)->sin_addr;
  return inet_ntop(address.ss_family, raw, text, sizeof(text)) != nullptr ? text : "an unknown address";
}

std::string lost_host(int fd, const std::string& address) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return "";
  if (error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH) return "";
  return "host " + address + " does not answer: it is down or cut off from the network";
}

}  // namespace commsched
