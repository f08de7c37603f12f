#include "connection.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>

namespace commsched {
namespace {

constexpr size_t kMostDiscarded = 64 << 20;                  // bytes: a peer may send faster than they are discarded
constexpr auto kFarewellPatience = std::chrono::seconds(1);  // a peer that computes may have no room for a farewell

// Waits up to a millisecond. Returns whether the other kernel has yet to take bytes that this one holds.
bool unacknowledged(int fd) noexcept {
  int family = AF_UNIX, bytes = 0;
  socklen_t length = sizeof(family);
  getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length);
  if (family == AF_UNIX || ioctl(fd, SIOCOUTQ, &bytes) != 0 || bytes == 0) return false;  // AF_UNIX delivers at once
  pollfd entry{fd, 0, 0};  // no events: poll() reports the end of the connection anyway
  return ::poll(&entry, 1, 1) == 0;
}

}  // namespace

void say_waiting(int rank, int peer, const std::string& operation, Clock::duration timeout) noexcept {
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  std::fprintf(stderr, "commsched: rank %d has waited %.3g s for rank %d in %s; it waits %.6g s (COMMSCHED_TIMEOUT)\n", rank,
               seconds(warning_after(timeout)), peer, operation.c_str(), seconds(timeout));
}

void wake_from(int fd, size_t bytes, int& now) noexcept {
  const int enough = static_cast<int>(std::clamp<size_t>(bytes, 1, kWorthWaking));
  if (enough == now) return;
  now = enough;
  setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &enough, sizeof(enough));
}

size_t discard(int fd, size_t most) noexcept {
  std::array<char, 1 << 16> scratch;
  size_t read = 0;
  while (read < most) {
    const ssize_t got = ::recv(fd, scratch.data(), std::min(most - read, scratch.size()), MSG_DONTWAIT);
    if (got <= 0 && (got == 0 || errno != EINTR)) break;
    read += std::max<ssize_t>(got, 0);
  }
  return read;
}

std::string farewell_text(int fd, size_t bytes) {
  char text[kMaxText] = {};
  const ssize_t length = ::recv(fd, text, std::min(bytes, kMaxText), MSG_DONTWAIT);
  return std::string(text, std::max<ssize_t>(length, 0));
}

void send_farewell(int fd, const void* header, size_t bytes, const std::string& text, bool between_messages) noexcept {
  if (between_messages) {
    const std::string all = std::string(static_cast<const char*>(header), bytes) + text;
    [[maybe_unused]] const ssize_t sent = ::send(fd, all.data(), all.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  ::shutdown(fd, SHUT_WR);
}

void wait_for_room(const std::vector<Connection*>& connections) noexcept {
  const Deadline deadline = Clock::now() + kFarewellPatience;
  for (const Connection* connection : connections) {
    if (!connection->data) continue;
    pollfd entry{connection->data.fd(), POLLOUT, 0};
    int64_t left = 0;
    do left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    while (::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left, 0))) < 0 && errno == EINTR);
  }
}

// A closed socket answers further bytes of the peer with a reset, and so does one that is closed with unread bytes. The reset
// discards what this end has not sent yet, the farewell among it. Bytes that the other kernel has acknowledged are safe.
void close_connections(const std::vector<Connection*>& connections) noexcept {
  const Deadline deadline = Clock::now() + kFarewellPatience;
  for (Connection* connection : connections) {
    if (!connection->data) continue;
    do discard(connection->data.fd(), kMostDiscarded);
    while (unacknowledged(connection->data.fd()) && Clock::now() < deadline);
    connection->data.close();
    connection->keepalive.close();
  }
}

}  // namespace commsched
