#include "socket.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
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

void Socket::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  Registry& registry = Registry::get();
  {
    const std::lock_guard lock(registry.mutex);
    registry.open.erase(std::remove(registry.open.begin(), registry.open.end(), fd), registry.open.end());
  }
  ::close(fd);
}

std::string lost_host(int fd, const std::string& address) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return "";
  if (error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH) return "";
  return "host " + address + " does not answer: it is down or cut off from the network";
}

}  // namespace commsched
