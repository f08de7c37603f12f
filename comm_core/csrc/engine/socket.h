// File descriptors that belong to this process alone: they close themselves, and a forked child loses its copies.
#pragma once

#include <cstdint>
#include <string>

namespace commsched {

// A forked child (a DataLoader's worker, for instance) would keep its copy of every connection open after this process has
// died, and the peers would not notice the death. In the child each descriptor therefore becomes one of /dev/null: the
// connection is not touched, and the number cannot be taken by another file that a destructor would then close.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();  // the caller's from now on, in forked children too
  void close();

 private:
  int fd_ = -1;
};

// How many forks lie between this process and the one that loaded the library.
uint64_t forks() noexcept;

// Whether this process made the object, rather than having inherited it from the process that forked it. Threads and locks
// are not inherited: another's object must not be used.
class Owned {
 public:
  bool here() const noexcept { return born_ == forks(); }

 private:
  uint64_t born_ = forks();
};

// Has the kernel ask the other host for a sign of life whenever a connection has been idle, so that it fails after about
// `seconds` without an answer. The other kernel answers, whatever its processes do. Only a connection that carries no data
// can be trusted with it: bytes that are not acknowledged, or that the receiver has no room for, suspend the questions.
void set_keepalive(int fd, double seconds);

// The address of the other end, "an unknown address" where there is none.
std::string peer_address(int fd);

// What is wrong with the host at the other end of a keepalive connection that poll() reports; "" where the connection has
// ended in another way, which the connection with the data tells better. Asking takes the error away from the socket.
std::string lost_host(int fd, const std::string& address);

}  // namespace commsched
