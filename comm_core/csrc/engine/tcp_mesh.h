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

// The connections to one other rank. `keepalive` never carries data, so it shows whether the other host answers even while
// bytes in `data` wait for a rank that computes for minutes.
struct Connection {
  Socket data;
  Socket keepalive;
  std::string host;  // the other end's address
};

// Builds the mesh of one rank. Listens from construction on, so that its address can be published before join().
class TcpMesh {
 public:
  TcpMesh(int rank, int size, const std::string& host);

  int rank() const { return rank_; }
  Address address() const { return {host_, port_}; }

  // One connection per rank (none for this one). `token` is a secret of the job that rejects connections from others.
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
