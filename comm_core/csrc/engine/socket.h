// File descriptors that only this process uses: closed by their destructor, and replaced in forked children.
#pragma once

#include <cstdint>
#include <string>

namespace commsched {

// A forked child (such as a DataLoader worker) would keep its copies of the connections open after this process has died, and
// the peers would not notice the death. So a child points each descriptor to /dev/null. The connection is untouched, and the
// number stays taken, so the destructor cannot close another file.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

// The number of forks between the process that loaded the library and this one.
uint64_t forks() noexcept;

// Whether this process made the object. A forked child inherits objects without their threads and with locks in any state, so
// it must not use them.
class Owned {
 public:
  bool here() const noexcept { return born_ == forks(); }

 private:
  uint64_t born_ = forks();
};

// The error of a keepalive connection that poll() reports, if the other host is lost; "" if the connection ended in another
// way, which the data connection reports better. Clears the error of the socket.
std::string lost_host(int fd, const std::string& address);

}  // namespace commsched
