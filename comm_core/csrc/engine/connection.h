// The connections to one other rank, and how they end. For all channels.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "interrupts.h"
#include "socket.h"
#include "types.h"

namespace commsched {

// `keepalive` never carries data, so it shows whether the other host answers even while bytes in `data` wait for a rank that
// computes for minutes. Without it only the end of the other process is noticed.
struct Connection {
  Socket data;
  Socket keepalive;
  std::string host;  // the other end's address
};

constexpr size_t kMaxText = 400;            // bytes of a farewell's reason
constexpr size_t kWorthWaking = 256 << 10;  // bytes: fewer are not worth interrupting the computation

inline std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

// A rank that has waited so many seconds says for whom; 0: after a tenth of its time-out, at most 30 s.
inline std::atomic<double> given_warning{0};

// commsched.env.Settings.warning is the same rule.
inline Clock::duration warning_after(Clock::duration timeout) {
  const double given = given_warning;
  return given > 0 ? to_duration(given) : std::min<Clock::duration>(to_duration(30), timeout / 10);
}

// Says on stderr that a rank waits for a peer, and in which operation.
void say_waiting(int rank, int peer, const std::string& operation, Clock::duration timeout) noexcept;

// Sets SO_RCVLOWAT: poll() reports the socket from so many bytes, at most kWorthWaking. `now` is the value that it has.
void wake_from(int fd, size_t bytes, int& now) noexcept;

// Reads up to so many bytes that have arrived, and forgets them. Returns their number.
size_t discard(int fd, size_t most) noexcept;

// Reads the text of a farewell whose header was read.
std::string farewell_text(int fd, size_t bytes);

// Sends a farewell that fits into the socket's buffer, unless a message is half sent. The peer then sees the connection's end.
void send_farewell(int fd, const void* header, size_t bytes, const std::string& text, bool between_messages) noexcept;

// Waits, for about a second, until the sockets have room for a farewell behind what they hold for slower peers.
void wait_for_room(const std::vector<Connection*>& connections) noexcept;

// Closes connections whose farewell was sent.
void close_connections(const std::vector<Connection*>& connections) noexcept;

}  // namespace commsched
