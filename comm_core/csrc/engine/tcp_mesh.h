// Joins the ranks of one engine by a TCP connection per pair.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "socket.h"
#include "types.h"

namespace commsched {

struct Address {
  std::string host;
  int port = 0;
};

// What joins this rank to another one. `keepalive` never carries data, so it tells whether the other host answers even where
// bytes in `data` wait for a rank that computes for minutes.
struct Connection {
  Socket data;
  Socket keepalive;
  std::string host;  // the other end's address
};

// One rank's way into the mesh: listens from the beginning, so that its address can be told to the others before join().
class TcpMesh {
 public:
  TcpMesh(int rank, int size, const std::string& host);

  int rank() const { return rank_; }
  Address address() const { return {host_, port_}; }

  // One connection per rank (none for this one). `token` keeps strangers out: all ranks know it and nobody else does.
  // `keepalive` fails when the other host has not answered for `host_timeout_seconds`.
  std::vector<Connection> join(const std::vector<Address>& addresses, const std::string& token, double timeout_seconds,
                               double host_timeout_seconds);

 private:
  const int rank_;
  const int size_;
  const std::string host_;
  int port_ = 0;
  Socket listener_;
};

}  // namespace commsched
