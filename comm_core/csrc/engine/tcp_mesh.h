// Joins the ranks of one engine by a TCP connection per pair.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace commsched {

// A file descriptor that closes itself.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_ = -1;
};

struct Address {
  std::string host;
  int port = 0;
};

// One rank's way into the mesh: listens from the beginning, so that its address can be told to the others before join().
class TcpMesh {
 public:
  TcpMesh(int rank, int size, const std::string& host);

  int rank() const { return rank_; }
  Address address() const { return {host_, port_}; }

  // One connected, non-blocking socket per rank (none for this one). `token` keeps strangers out: all ranks know it and
  // nobody else does.
  std::vector<Socket> join(const std::vector<Address>& addresses, const std::string& token, double timeout_seconds);

 private:
  const int rank_;
  const int size_;
  const std::string host_;
  int port_ = 0;
  Socket listener_;
};

}  // namespace commsched
