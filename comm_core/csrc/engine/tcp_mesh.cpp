#include "tcp_mesh.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace commsched {
namespace {

constexpr size_t kTokenBytes = 32;

// The first bytes from the connecting side.
struct Hello {
  char token[kTokenBytes] = {};
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t is_keepalive = 0;
};

EngineError lost(const std::string& what, int peer = -1) {
  return EngineError(ErrorKind::peer_lost, what + ": " + std::strerror(errno), peer);
}

struct FreeAddresses {
  void operator()(addrinfo* info) const { freeaddrinfo(info); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (problem != 0) {
    throw EngineError(ErrorKind::usage, "the address '" + host + "' cannot be resolved: " + gai_strerror(problem));
  }
  return Addresses(found);
}

Socket open_socket(const addrinfo& address) {
  Socket socket(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol));
  if (!socket) throw lost("a socket cannot be opened");
  return socket;
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) throw lost("getsockname failed");
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

// Sets the socket's send and receive time-outs to the time left.
void set_deadline(const Socket& socket, Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
  timeval time{};
  time.tv_sec = left > 0 ? left / 1000000 : 0;
  time.tv_usec = left > 0 ? left % 1000000 : 1;
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
  setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
}

Socket connect_to(const Address& to, int peer, const Hello& hello, Deadline deadline) {
  const Addresses addresses = resolve(to.host, to.port);
  Socket socket = open_socket(*addresses);
  set_deadline(socket, deadline);
  if (::connect(socket.fd(), addresses->ai_addr, addresses->ai_addrlen) != 0) {
    throw lost("rank " + std::to_string(peer) + " at " + to.host + ":" + std::to_string(to.port) + " cannot be reached", peer);
  }
  if (::send(socket.fd(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
    throw lost("rank " + std::to_string(peer) + " does not take this rank's name", peer);
  }
  return socket;
}

// Accepts a connection and reads its greeting; false if no valid greeting came in time.
bool accept_one(const Socket& listener, Deadline deadline, Socket& socket, Hello& hello) {
  pollfd waiting{listener.fd(), POLLIN, 0};
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  if (left <= 0) throw EngineError(ErrorKind::timeout, "not all ranks connected in time");
  if (::poll(&waiting, 1, static_cast<int>(std::min<long long>(left, 1 << 30))) <= 0) return false;
  socket = Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket) return false;
  set_deadline(socket, std::min(deadline, Clock::now() + to_duration(5)));
  return ::recv(socket.fd(), &hello, sizeof(hello), MSG_WAITALL) == sizeof(hello);
}

Socket& socket_of(Connection& connection, const Hello& hello) {
  return hello.is_keepalive != 0 ? connection.keepalive : connection.data;
}

void make_ready(Connection& connection, double host_timeout_seconds) {
  if (!connection.data) return;
  const int on = 1;
  setsockopt(connection.data.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  set_deadline(connection.data, Clock::now());  // no time-outs: later calls use MSG_DONTWAIT
  set_keepalive(connection.keepalive.fd(), host_timeout_seconds);
  connection.host = peer_address(connection.keepalive.fd());
}

}  // namespace

TcpMesh::TcpMesh(int rank, int size, const std::string& host) : rank_(rank), size_(size), host_(host) {
  if (rank < 0 || rank >= size) {
    throw EngineError(ErrorKind::usage, "rank must be in [0, size), but rank is " + std::to_string(rank) + " and size is " + std::to_string(size));
  }
  const Addresses addresses = resolve(host, 0);
  listener_ = open_socket(*addresses);
  if (::bind(listener_.fd(), addresses->ai_addr, addresses->ai_addrlen) != 0) throw lost("cannot listen at " + host);
  // The peer may have closed the connection before it is accepted.
  ::fcntl(listener_.fd(), F_SETFL, O_NONBLOCK);
  if (::listen(listener_.fd(), 2 * size) != 0) throw lost("cannot listen at " + host);
  port_ = port_of(listener_);
}

std::vector<Connection> TcpMesh::join(const std::vector<Address>& addresses, const std::string& token, double timeout_seconds,
                                      double host_timeout_seconds) {
  if (addresses.size() != static_cast<size_t>(size_) || token.size() != kTokenBytes) {
    throw EngineError(ErrorKind::usage, "join() needs an address per rank and a token of " + std::to_string(kTokenBytes) +
                                            " bytes, but got " + std::to_string(addresses.size()) + " and " + std::to_string(token.size()));
  }
  const Deadline deadline = Clock::now() + to_duration(timeout_seconds);
  Hello mine;
  std::memcpy(mine.token, token.data(), kTokenBytes);
  mine.rank = rank_;
  mine.size = size_;
  std::vector<Connection> connections(size_);
  for (int peer = 0; peer < rank_; ++peer) {
    for (mine.is_keepalive = 0; mine.is_keepalive < 2; ++mine.is_keepalive) {
      socket_of(connections[peer], mine) = connect_to(addresses[peer], peer, mine, deadline);
    }
  }
  for (int missing = 2 * (size_ - 1 - rank_); missing > 0;) {
    Socket socket;
    Hello theirs;
    if (!accept_one(listener_, deadline, socket, theirs)) continue;
    const bool known = std::memcmp(theirs.token, mine.token, kTokenBytes) == 0 && theirs.size == mine.size;
    if (!known || theirs.rank <= mine.rank || theirs.rank >= mine.size) continue;
    Socket& place = socket_of(connections[theirs.rank], theirs);
    if (place) continue;
    place = std::move(socket);
    --missing;
  }
  for (Connection& connection : connections) make_ready(connection, host_timeout_seconds);
  listener_ = Socket();
  return connections;
}

}  // namespace commsched
