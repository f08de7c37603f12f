#include "tcp_channel.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace commsched {
namespace {

constexpr uint64_t kMessage = 0x636f6d6d73636864;   // an ordinary message
constexpr uint64_t kFarewell = 0x636f6d6d73656e64;  // the sender leaves; tag.bucket is the rank at fault, a text follows
constexpr int kPieces = 16;                         // pieces of memory per system call
}  // namespace

TcpChannel::TcpChannel(int rank, std::vector<Connection> connections)
    : rank_(rank),
      peers_(connections.size()),
      polled_(2 * connections.size() + 1),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      culprit_(rank) {
  for (size_t i = 0; i < connections.size(); ++i) {
    peers_[i].connection = std::move(connections[i]);
    polled_[i] = {-1, 0, 0};
    polled_[peers_.size() + i] = {peers_[i].connection.keepalive.fd(), 0, 0};  // no events: poll() reports errors anyway
  }
  polled_.back() = {wake_.fd(), POLLIN, 0};
}

TcpChannel::~TcpChannel() { say_farewell(rank_name(rank_) + " closed its engine"); }

Request TcpChannel::post(Stream& stream, bool is_send, const void* data, size_t bytes, int peer, const MessageTag& tag) {
  if (stream.posted - stream.done >= kSlots) throw EngineError(ErrorKind::usage, "too many messages are under way", peer);
  Message& message = stream[stream.posted];
  message.header = {kMessage, bytes, tag};
  message.data = static_cast<char*>(const_cast<void*>(data));
  return {peer, is_send, stream.posted++};
}

Request TcpChannel::isend(const void* data, size_t bytes, int peer, const MessageTag& tag) {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
  Stream& stream = peers_[peer].out;
  const bool first = stream.idle();
  const Request request = post(stream, true, data, bytes, peer, tag);
  if (first) write(peer);  // most messages fit into the socket's buffer
  return request;
}

Request TcpChannel::irecv(void* data, size_t bytes, int peer, const MessageTag& tag) {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
  return post(peers_[peer].in, false, data, bytes, peer, tag);
}

bool TcpChannel::done(const Request& request) const {
  const Peer& peer = peers_[request.peer];
  return (request.is_send ? peer.out.done : peer.in.done) > request.sequence;
}

// The unsent bytes of the first messages, as pieces of memory.
int TcpChannel::Stream::gather_outgoing(iovec* pieces) {
  int count = 0;
  size_t skip = moved;
  for (uint64_t i = done; i < posted && count + 2 <= kPieces; ++i) {
    Message& message = (*this)[i];
    if (skip < sizeof(Header)) pieces[count++] = {reinterpret_cast<char*>(&message.header) + skip, sizeof(Header) - skip};
    const size_t begin = skip > sizeof(Header) ? skip - sizeof(Header) : 0;
    if (begin < message.header.bytes) pieces[count++] = {message.data + begin, message.header.bytes - begin};
    skip = 0;
  }
  return count;
}

// Memory for the next bytes: first a message's header; once it is checked, the rest of the message and the next header. So a
// destination buffer never receives the text of a farewell.
int TcpChannel::Stream::gather_incoming(iovec* pieces) {
  if (idle()) return 0;
  int count = 0;
  uint64_t next = done;
  size_t skip = moved;
  if (moved >= sizeof(Header)) {
    Message& message = (*this)[next++];
    pieces[count++] = {message.data + moved - sizeof(Header), total(message) - moved};
    skip = 0;
  }
  if (next < posted) pieces[count++] = {reinterpret_cast<char*>(&(*this)[next].arrived) + skip, sizeof(Header) - skip};
  return count;
}

void TcpChannel::advance(int peer, Stream& stream, bool incoming, size_t bytes) {
  while (bytes > 0) {
    Message& message = stream[stream.done];
    const size_t before = stream.moved;
    const size_t step = std::min(bytes, total(message) - before);
    stream.moved += step;
    bytes -= step;
    if (incoming && before < sizeof(Header) && stream.moved >= sizeof(Header)) check_arrived(peer, message);
    if (stream.moved == total(message)) {
      stream.moved = 0;
      ++stream.done;
    }
  }
}

bool TcpChannel::write(int peer) {
  Stream& stream = peers_[peer].out;
  iovec pieces[kPieces];
  msghdr batch{};
  batch.msg_iov = pieces;
  batch.msg_iovlen = stream.gather_outgoing(pieces);
  if (batch.msg_iovlen == 0) return false;
  const ssize_t sent = ::sendmsg(peers_[peer].fd(), &batch, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) {
    advance(peer, stream, false, sent);
    return true;
  }
  if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    const std::string why = std::strerror(errno);
    while (read(peer)) {
    }  // its farewell may say why it left
    skip_to_farewell(peer);
    lose(peer, why);
  }
  return false;
}

// Returns the number of bytes read, 0 if there were none.
size_t TcpChannel::receive(int peer, msghdr& batch, int flags) {
  const ssize_t got = ::recvmsg(peers_[peer].fd(), &batch, MSG_DONTWAIT | flags);
  if (got > 0) return got;
  if (got == 0) lose(peer, "it closed the connection");
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) lose(peer, std::strerror(errno));
  return 0;
}

bool TcpChannel::read(int peer) {
  Stream& stream = peers_[peer].in;
  if (stream.idle()) look_for_farewell(peer);
  bool moved = false;
  iovec pieces[2];
  msghdr batch{};
  batch.msg_iov = pieces;
  while ((batch.msg_iovlen = stream.gather_incoming(pieces)) > 0) {
    const size_t wanted = pieces[0].iov_len + (batch.msg_iovlen > 1 ? pieces[1].iov_len : 0);
    const size_t got = receive(peer, batch, 0);
    advance(peer, stream, true, got);
    moved |= got > 0;
    if (got < wanted) break;  // the socket is empty
  }
  return moved;
}

// Looks for a farewell while no receive is posted; other bytes stay in the socket.
void TcpChannel::look_for_farewell(int peer) {
  Header header;
  iovec piece{&header, sizeof(header)};
  msghdr batch{};
  batch.msg_iov = &piece;
  batch.msg_iovlen = 1;
  if (receive(peer, batch, MSG_PEEK) < sizeof(header) || header.kind != kFarewell) return;
  receive(peer, batch, 0);
  hear_farewell(peer, header);
}

// Reads over messages for which no receive is posted, up to a farewell. Only for a connection that is lost.
void TcpChannel::skip_to_farewell(int peer) {
  if (!peers_[peer].in.idle()) return;  // all that arrived was read
  for (;;) {
    look_for_farewell(peer);
    Header header;
    if (::recv(peers_[peer].fd(), &header, sizeof(header), MSG_DONTWAIT) != static_cast<ssize_t>(sizeof(header))) return;
    if (header.kind != kMessage || discard(peers_[peer].fd(), header.bytes) < header.bytes) return;
  }
}

void TcpChannel::check_arrived(int peer, const Message& message) {
  const Header& got = message.arrived;
  const Header& expected = message.header;
  if (got.kind == kFarewell) hear_farewell(peer, got);
  if (got.kind == kMessage && got.bytes == expected.bytes && got.tag == expected.tag) return;
  culprit_ = peer;
  throw EngineError(ErrorKind::mismatch,
                    rank_name(peer) + " sent " + std::to_string(got.bytes) + " bytes for " + describe(got.tag) +
                        ", but this rank expects " + std::to_string(expected.bytes) + " bytes for " + describe(expected.tag) +
                        "; do all ranks run the same plan?",
                    peer);
}

// Reads the text of a farewell whose header was read.
void TcpChannel::hear_farewell(int peer, const Header& header) {
  const std::string text = farewell_text(peers_[peer].fd(), header.bytes);
  culprit_ = static_cast<int>(header.tag.bucket);
  throw EngineError(ErrorKind::peer_lost, rank_name(peer) + " gave up: " + text, culprit_);
}

void TcpChannel::lose(int peer, const std::string& why) {
  culprit_ = peer;
  throw EngineError(ErrorKind::peer_lost, "the connection to " + rank_name(peer) + " is lost (" + why + ")", peer);
}

// Reads and writes on the sockets that poll() reported.
bool TcpChannel::move_ready() {
  bool moved = false;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const short events = polled_[i].revents;
    if (events == 0 || polled_[i].fd < 0) continue;
    const int peer = static_cast<int>(i);
    if ((events & POLLOUT) != 0) moved |= write(peer);
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) moved |= read(peer);
  }
  return moved;
}

// Reports a lost host, after reading everything that did arrive.
void TcpChannel::check_hosts() {
  for (size_t i = 0; i < peers_.size(); ++i) {
    pollfd& entry = polled_[peers_.size() + i];
    if (entry.fd < 0 || entry.revents == 0) continue;
    const std::string why = lost_host(entry.fd, peers_[i].connection.host);
    if (!why.empty()) lose(static_cast<int>(i), why);
    entry.fd = -1;  // its process ended: the data connection reports it
  }
}

// Sets poll events and SO_RCVLOWAT for this peer.
void TcpChannel::watch(size_t i) {
  Peer& peer = peers_[i];
  const short events = (peer.in.idle() ? 0 : POLLIN) | (peer.out.idle() ? 0 : POLLOUT);
  polled_[i] = {events != 0 ? peer.fd() : -1, events, 0};
  if (peer.in.idle()) return;
  // At most the rest of the next message: the peer may send more only after this message was answered.
  const size_t left = total(peer.in[peer.in.done]) - peer.in.moved;
  wake_from(peer.fd(), left, peer.enough);
}

void TcpChannel::sleep(Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  const auto nap =
      std::clamp<std::chrono::milliseconds>(left + std::chrono::milliseconds(1), std::chrono::milliseconds(0), kLongestSleep);
  if (::poll(polled_.data(), polled_.size(), static_cast<int>(nap.count())) > 0) return;
  for (pollfd& entry : polled_) entry.revents = entry.events;  // time-out or interrupted: try all sockets
}

void TcpChannel::set_timeout(double seconds) { timeout_ = to_duration(seconds); }

void TcpChannel::wait(const Request& request) {
  if (request.peer < 0) return;
  std::unique_lock lock(mutex_);
  const Clock::time_point start = Clock::now();
  Deadline deadline = start + timeout_;
  Interrupts interrupts(start);
  bool said = false;
  culprit_ = rank_;  // an earlier wait may have timed out and is repeated
  // Try the awaited peer before the first poll(): often its bytes have arrived.
  if (!done(request) && !aborted_) request.is_send ? write(request.peer) : read(request.peer);
  while (!done(request)) {
    if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
    for (size_t i = 0; i < peers_.size(); ++i) watch(i);
    if (pulse_ != nullptr) *pulse_ = Clock::now().time_since_epoch().count();
    lock.unlock();
    sleep(deadline);
    lock.lock();
    interrupts.look(lock);
    if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
    if (move_ready()) {
      deadline = Clock::now() + timeout_;
      continue;
    }
    check_hosts();
    if (!said && Clock::now() >= deadline - timeout_ + warning_after(timeout_)) {
      said = true;
      Peer& peer = peers_[request.peer];
      say_waiting(rank_, request.peer, describe((request.is_send ? peer.out : peer.in)[request.sequence].header.tag), timeout_);
    }
    if (Clock::now() >= deadline) {
      culprit_ = request.peer;
      throw EngineError(ErrorKind::timeout,
                        std::string("nothing ") + (request.is_send ? "could be sent to " : "came from ") + rank_name(request.peer),
                        request.peer);
    }
  }
}

void TcpChannel::abort(const std::string& reason) noexcept {
  if (!owned_.here()) return;  // in a forked child the lock may be held for ever
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.fd(), &one, sizeof(one));
  say_farewell(reason);
}

void TcpChannel::close() noexcept {
  if (!owned_.here()) return;
  std::vector<Connection*> connections;
  for (Peer& peer : peers_) connections.push_back(&peer.connection);
  wait_for_room(connections);
  abort(rank_name(rank_) + " closed its engine");
  const std::lock_guard lock(mutex_);
  close_connections(connections);
  for (pollfd& entry : polled_) entry.fd = -1;
  wake_.close();
}

// Sends a farewell with the reason to each peer, if no message is half sent. Otherwise the peer sees the connection close.
void TcpChannel::say_farewell(const std::string& reason) noexcept {
  const std::string text = reason.substr(0, kMaxText);
  Header header{kFarewell, text.size(), {}};
  header.tag.bucket = static_cast<uint32_t>(culprit_);
  for (Peer& peer : peers_) {
    if (peer.connection.data) send_farewell(peer.fd(), &header, sizeof(header), text, peer.out.moved == 0);
  }
}

}  // namespace commsched
