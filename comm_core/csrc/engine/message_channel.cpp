#include "message_channel.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace commsched {
namespace {

constexpr int kPieces = 64;              // of one system call
constexpr size_t kStage = 16 << 10;      // bytes
constexpr double kSlowestLink = 10e6;    // bytes a second; see kTurnPatience
constexpr double kFlushPatience = 5;     // seconds
constexpr size_t kAtOnce = 1 << 20;      // bytes: then the lock is released, and other peers get a turn
constexpr size_t kWhenSent = 256 << 10;  // bytes that a thread that computes may write itself

uint32_t checksum(const std::string& text) {  // FNV-1a
  uint32_t sum = 2166136261u;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 16777619u;
  return sum;
}

void ring(const Socket& eventfd) noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(eventfd.fd(), &one, sizeof(one));
}

size_t total(const std::vector<MessageChannel::Piece>& pieces) {
  size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.bytes;
  return bytes;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

}  // namespace

// -- a message's memory --

// The places of its next bytes. Returns how many places there are.
int MessageChannel::Message::gather(iovec* into, int most, size_t bytes) const {
  int count = 0;
  size_t skip = in_piece;
  for (size_t i = piece; i < pieces.size() && bytes > 0 && count < most; ++i) {
    const size_t here = std::min(pieces[i].bytes - skip, bytes);
    if (here > 0) into[count++] = {pieces[i].data + skip, here};
    bytes -= here;
    skip = 0;
  }
  return count;
}

void MessageChannel::Message::advance(size_t bytes) {
  moved += bytes;
  batch->moved += bytes;
  while (bytes > 0) {
    const size_t here = std::min(bytes, pieces[piece].bytes - in_piece);
    in_piece += here;
    bytes -= here;
    if (in_piece == pieces[piece].bytes) {
      ++piece;
      in_piece = 0;
    }
  }
}

void MessageChannel::Message::fill(const char* from, size_t bytes) {
  iovec places[kPieces];
  while (bytes > 0) {
    const int count = gather(places, kPieces, bytes);
    for (int i = 0; i < count; ++i) {
      std::memcpy(places[i].iov_base, from, places[i].iov_len);
      from += places[i].iov_len;
      bytes -= places[i].iov_len;
      advance(places[i].iov_len);
    }
  }
}

// The caller may write over the buffers of a short message as soon as it is sent.
void MessageChannel::Message::keep_copy() {
  if (moved == frame.total) return;
  copy.reserve(frame.total - moved);
  for (; piece < pieces.size(); ++piece, in_piece = 0) {
    const char* const begin = pieces[piece].data + in_piece;
    if (pieces[piece].bytes > in_piece) copy.insert(copy.end(), begin, begin + (pieces[piece].bytes - in_piece));
  }
  pieces = {{copy.data(), copy.size()}};
  piece = in_piece = 0;
}

// -- starting messages --

MessageChannel::MessageChannel(int rank, std::vector<Connection> connections)
    : rank_(rank),
      wake_leader_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      wake_thread_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(connections.size()),
      culprit_(rank) {
  for (size_t i = 0; i < connections.size(); ++i) {
    peers_[i].host_watched = static_cast<bool>(connections[i].keepalive);
    peers_[i].connection = std::move(connections[i]);
    if (peers_[i].connection.data) peers_[i].in.stage.resize(kStage);
  }
}

MessageChannel::MessagePtr MessageChannel::make(const Pending& batch, Parcel& parcel, bool is_send) {
  Peer& peer = peers_[parcel.peer];
  Message& message = batch->messages[batch->left++];
  message.batch = batch.get();
  message.peer = parcel.peer;
  message.is_send = is_send;
  message.frame.number = (is_send ? peer.out.numbers : peer.in.numbers)[message.frame.lane]++;
  message.frame.total = total(parcel.pieces);
  message.pieces = std::move(parcel.pieces);
  return MessagePtr(batch, &message);  // counts as a reference to the batch
}

MessageChannel::Pending MessageChannel::start(Exchange exchange) {
  if (!here()) {
    throw EngineError(ErrorKind::usage, exchange.operation +
                                            ": this process was forked from the one that made the connections of " +
                                            rank_name(rank_) + ": they work only there; start the process with spawn");
  }
  size_t bytes = 0;
  for (const auto* parcels : {&exchange.sends, &exchange.receives}) {
    for (const Parcel& parcel : *parcels) {
      bytes += total(parcel.pieces);
      if (parcel.peer >= 0 && parcel.peer < static_cast<int>(peers_.size()) && parcel.peer != rank_) continue;
      throw EngineError(ErrorKind::usage, exchange.operation + ": " + rank_name(rank_) + " of " + std::to_string(peers_.size()) +
                                              " has no connection to " + rank_name(parcel.peer));
    }
  }
  const auto batch = std::make_shared<Batch>();
  batch->operation = std::move(exchange.operation);
  batch->owner = std::move(exchange.owner);
  batch->traffic = exchange.traffic;
  if (exchange.traffic)
    batch->turn =
        LinkGate::of_process().begin(*exchange.traffic, static_cast<int64_t>(bytes), kTurnPatience + bytes / kSlowestLink);
  Frame frame;
  frame.lane = exchange.lane;
  frame.operation = checksum(batch->operation);
  batch->messages.resize(exchange.sends.size() + exchange.receives.size());
  for (Message& message : batch->messages) message.frame = frame;

  ++posting_;
  Lock lock(mutex_);
  --posting_;
  std::vector<MessagePtr> sends, receives;
  // All messages are counted before one of them can end.
  for (Parcel& parcel : exchange.receives) receives.push_back(make(batch, parcel, false));
  for (Parcel& parcel : exchange.sends) sends.push_back(make(batch, parcel, true));
  if (batch->left == 0) {
    batch->end_turn();
    batch->over = true;
  }
  for (const MessagePtr& message : receives) post_receive(message);  // first, so that the peers' grants are on their way
  for (const MessagePtr& message : sends) post_send(message);
  wake_threads(false);
  collect(lock);
  return batch;
}

void MessageChannel::post_receive(const MessagePtr& message) {
  Peer& peer = peers_[message->peer];
  In& in = peer.in;
  const Key key = message->frame.key();
  if (aborted_) return fail_message(message, *aborted_, false);
  if (const auto place = in.early.find(key); place != in.early.end()) {
    const Early early = std::move(place->second);
    in.early.erase(place);
    in.early_bytes -= early.bytes.size();
    if (matches(message->peer, early.frame, message)) deliver(message, early);
    return;
  }
  if (const auto place = in.announced.find(key); place != in.announced.end()) {
    const Frame announcement = place->second;
    in.announced.erase(place);
    if (!matches(message->peer, announcement, message)) return;
  }
  if (peer.loss) return fail_message(message, *peer.loss, false);
  in.posted.emplace(key, message);
  if (!message->lengthy()) return;
  Frame grant = message->frame;
  grant.kind = Kind::grant;
  const bool idle = peer.out.idle();
  peer.out.control.push_back(grant);
  if (idle) write(message->peer, kWhenSent);
}

void MessageChannel::post_send(const MessagePtr& message) {
  Peer& peer = peers_[message->peer];
  Out& out = peer.out;
  const Key key = message->frame.key();
  if (aborted_) return fail_message(message, *aborted_, false);
  if (!peer.loss && message->lengthy() && out.grants.find(key) == out.grants.end() && !leading_) read(message->peer);
  if (peer.loss) return fail_message(message, *peer.loss, false);
  const bool idle = out.idle();
  const auto grant = out.grants.find(key);
  if (grant != out.grants.end()) {
    const Frame wanted = grant->second;
    out.grants.erase(grant);
    if (!matches(message->peer, wanted, message)) return;
    put_granted(out, message);
  } else if (message->lengthy()) {
    out.waiting.emplace(key, message);
    Frame announcement = message->frame;
    announcement.kind = Kind::announcement;
    out.control.push_back(announcement);
  } else {
    out.eager.push_back(message);
  }
  if (idle) write(message->peer, kWhenSent);
  if (!message->lengthy() && !message->over) message->keep_copy();
}

// Before less urgent messages. Those without a kind come last.
void MessageChannel::put_granted(Out& out, const MessagePtr& message) {
  const auto urgency = [](const MessagePtr& m) { return m->batch->traffic ? static_cast<int>(*m->batch->traffic) : 99; };
  const auto place = std::find_if(out.granted.begin(), out.granted.end(),
                                  [&](const MessagePtr& other) { return urgency(other) > urgency(message); });
  out.granted.insert(place, message);
}

// -- writing --

bool MessageChannel::next_frame(Out& out) {
  if (!out.control.empty()) {
    out.frame = out.control.front();
    out.control.pop_front();
    out.message = nullptr;
    out.body = 0;
  } else if (!out.eager.empty() || !out.granted.empty()) {
    out.message = out.eager.empty() ? out.granted.front() : out.eager.front();
    out.frame = out.message->frame;
    out.body = std::min(kFrame, out.message->frame.total - out.message->moved);
  } else {
    return false;
  }
  out.frame.bytes = out.body;
  out.sent = 0;
  return out.under_way = true;
}

void MessageChannel::end_frame(Out& out) {
  out.under_way = false;
  const MessagePtr message = std::exchange(out.message, nullptr);
  if (!message || message->moved < message->frame.total) return;
  std::deque<MessagePtr>& queue = message->lengthy() ? out.granted : out.eager;
  queue.erase(std::find(queue.begin(), queue.end(), message));
  finish(message);
}

// Writes until the socket is full, or about so many bytes are written.
void MessageChannel::write(int number, size_t most) {
  Peer& peer = peers_[number];
  Out& out = peer.out;
  size_t written = 0;
  while (peer.live() && !out.broken && written < most && (out.under_way || next_frame(out))) {
    iovec pieces[kPieces];
    int count = 0;
    size_t wanted = 0;
    if (out.sent < sizeof(Frame)) pieces[count++] = {reinterpret_cast<char*>(&out.frame) + out.sent, sizeof(Frame) - out.sent};
    const size_t body_left = out.body - (out.sent > sizeof(Frame) ? out.sent - sizeof(Frame) : 0);
    if (out.message) count += out.message->gather(pieces + count, kPieces - count, body_left);
    for (int i = 0; i < count; ++i) wanted += pieces[i].iov_len;
    msghdr batch{};
    batch.msg_iov = pieces;
    batch.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(peer.fd(), &batch, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      const std::string why = std::strerror(errno);
      out.broken = true;
      read(number);  // its farewell may say why it left
      return fail(number, {ErrorKind::peer_lost, why, number});
    }
    const size_t header = std::min(static_cast<size_t>(sent), out.sent < sizeof(Frame) ? sizeof(Frame) - out.sent : 0);
    out.sent += sent;
    written += sent;
    if (out.message) out.message->advance(sent - header);
    if (out.sent == sizeof(Frame) + out.body) end_frame(out);
    if (static_cast<size_t>(sent) < wanted) return;
  }
}

// -- reading --

void MessageChannel::read(int number) {
  Peer& peer = peers_[number];
  In& in = peer.in;
  const bool was_idle = peer.out.idle();
  size_t read_bytes = 0;
  while (peer.live() && read_bytes < kAtOnce) {
    iovec pieces[kPieces];
    int count = 0;
    size_t direct = 0;
    if (in.in_body) {  // the stage is empty
      if (in.message) {
        count = in.message->gather(pieces, kPieces - 1, in.left);
      } else {
        pieces[count++] = {in.body.data() + (in.body.size() - in.left), in.left};
      }
      for (int i = 0; i < count; ++i) direct += pieces[i].iov_len;
    }
    size_t wanted = direct;
    if (direct == in.left || !in.in_body) {
      pieces[count++] = {in.stage.data() + in.end, kStage - in.end};
      wanted += kStage - in.end;
    }
    msghdr batch{};
    batch.msg_iov = pieces;
    batch.msg_iovlen = count;
    const ssize_t got = ::recvmsg(peer.fd(), &batch, MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      return fail(number, {ErrorKind::peer_lost, std::strerror(errno), number});
    }
    read_bytes += got;
    if (got == 0) return fail(number, {ErrorKind::peer_lost, "it closed the connection", number});
    const size_t into_body = std::min<size_t>(got, direct);
    if (into_body > 0) {
      if (in.message) in.message->advance(into_body);
      take(number, into_body);
    }
    in.end += got - into_body;
    parse(number);
    if (static_cast<size_t>(got) < wanted) break;  // the socket is empty
  }
  if (was_idle && !peer.out.idle()) write(number, kWhenSent);  // what the peer has granted
}

// Counts bytes of the frame that have reached their place.
void MessageChannel::take(int number, size_t bytes) {
  In& in = peers_[number].in;
  in.left -= bytes;
  if (in.left == 0) end_frame(number);
}

// Takes the frames that are in the stage. A part of a header stays there.
void MessageChannel::parse(int number) {
  Peer& peer = peers_[number];
  In& in = peer.in;
  while (peer.live()) {
    const size_t staged = in.end - in.begin;
    if (!in.in_body) {
      if (staged < sizeof(Frame)) break;
      std::memcpy(&in.frame, in.stage.data() + in.begin, sizeof(Frame));
      in.begin += sizeof(Frame);
      begin_frame(number);
      continue;
    }
    const size_t here = std::min(staged, in.left);
    if (here == 0) break;
    const char* const from = in.stage.data() + in.begin;
    if (in.message) {
      in.message->fill(from, here);
    } else {
      std::memcpy(in.body.data() + (in.body.size() - in.left), from, here);
    }
    in.begin += here;
    take(number, here);
  }
  if (in.begin > 0) std::memmove(in.stage.data(), in.stage.data() + in.begin, in.end - in.begin);
  in.end -= in.begin;
  in.begin = 0;
}

void MessageChannel::begin_frame(int number) {
  Peer& peer = peers_[number];
  In& in = peer.in;
  const Frame& frame = in.frame;
  const Key key = frame.key();
  const auto posted = in.posted.find(key);
  if (frame.kind == Kind::grant) {
    const auto waiting = peer.out.waiting.find(key);
    if (waiting == peer.out.waiting.end()) {
      peer.out.grants.emplace(key, frame);
      return;
    }
    const MessagePtr message = waiting->second;
    if (!matches(number, frame, message)) return;
    peer.out.waiting.erase(waiting);
    put_granted(peer.out, message);
    return;
  }
  if (frame.kind == Kind::announcement) {
    if (posted == in.posted.end()) {
      in.announced.emplace(key, frame);
    } else {
      matches(number, frame, posted->second);
    }
    return;
  }
  if (frame.kind == Kind::data && posted != in.posted.end()) {
    if (!matches(number, frame, posted->second)) return;
    in.message = posted->second;
    if (frame.bytes > frame.total - in.message->moved) {
      return fail(number, {ErrorKind::mismatch, "it sent more bytes than the message has", number});
    }
  } else if ((frame.kind == Kind::data && frame.total <= kShort && frame.bytes == frame.total) ||
             (frame.kind == Kind::farewell && frame.bytes <= kMaxText)) {
    in.message = nullptr;
    in.body.assign(frame.bytes, 0);
  } else {
    return fail(number, {ErrorKind::mismatch, "it sent something that is no message", number});
  }
  in.in_body = true;
  in.left = frame.bytes;
  if (in.left == 0) end_frame(number);
}

void MessageChannel::end_frame(int number) {
  In& in = peers_[number].in;
  in.in_body = false;
  const MessagePtr message = std::exchange(in.message, nullptr);
  if (message) {
    if (message->moved < message->frame.total) return;
    in.posted.erase(message->frame.key());
    return finish(message);
  }
  if (in.frame.kind == Kind::farewell) {
    const std::string text(in.body.begin(), in.body.end());
    return fail(number, {ErrorKind::peer_lost, "it gave up: " + text, static_cast<int>(in.frame.lane)});
  }
  Early early{in.frame, std::move(in.body)};
  in.body = {};
  const auto posted = in.posted.find(early.frame.key());  // while the message came in
  if (posted == in.posted.end()) {
    in.early_bytes += early.bytes.size();
    in.early.emplace(early.frame.key(), std::move(early));
    return;
  }
  const MessagePtr receive = posted->second;
  if (!matches(number, early.frame, receive)) return;
  in.posted.erase(receive->frame.key());
  deliver(receive, early);
}

void MessageChannel::deliver(const MessagePtr& message, const Early& early) {
  message->fill(early.bytes.data(), early.bytes.size());
  finish(message);
}

// Whether the message is the one that the peer sends or expects. If not, the connection ends with an error.
bool MessageChannel::matches(int number, const Frame& got, MessagePtr message) {
  const Frame& own = message->frame;
  if (got.total == own.total && got.operation == own.operation) return true;
  std::string why;
  if (got.operation != own.operation) {
    why = "got a message of another operation of " + rank_name(number) + ": the ranks run different operations";
  } else if (got.kind == Kind::grant) {
    why = "sends " + std::to_string(own.total) + " bytes to " + rank_name(number) + ", which expects " + std::to_string(got.total) +
          ": the ranks run different programs, or a stage's output changed its shape";
  } else {
    why = "expected " + std::to_string(own.total) + " bytes of " + rank_name(number) + " and got " + std::to_string(got.total) +
          ": the ranks run different programs, or a stage's output changed its shape";
  }
  const std::string reason = message->batch->operation + ": " + rank_name(rank_) + " " + why;
  say_farewell(peers_[number], reason);
  const Loss loss{ErrorKind::mismatch, why, number};
  fail_message(message, loss, true);
  fail(number, loss);
  return false;
}

// -- the end of messages and connections --

void MessageChannel::finish(const MessagePtr& message) {
  if (std::exchange(message->over, true)) return;
  Batch& batch = *message->batch;
  if (--batch.left > 0 && !batch.error) return;
  batch.end_turn();
  if (batch.waiting > 0) wake_threads(true);
  if (batch.left > 0) return;
  batch.over = true;
  over_.push_back(std::move(batch.owner));
}

void MessageChannel::fail_message(const MessagePtr& message, const Loss& loss, bool at_fault) {
  Batch& batch = *message->batch;
  if (!message->over && !batch.error) batch.error = error_of(batch, message->peer, loss, at_fault);
  finish(message);
}

EngineError MessageChannel::error_of(const Batch& batch, int peer, const Loss& loss, bool at_fault) const {
  std::string text = batch.operation + ": " + rank_name(rank_) + " ";
  if (at_fault) {
    text += loss.why;
  } else if (loss.kind == ErrorKind::aborted) {
    text += "waited for " + rank_name(peer) + ", but " + loss.why;
  } else {
    text += "has lost " + rank_name(peer) + " (" + loss.why + "); look for the first error on " + rank_name(loss.culprit);
  }
  EngineError error(loss.kind, text, loss.culprit);
  error.rank = rank_;
  error.op = batch.operation;
  return error;
}

void MessageChannel::fail(int number, const Loss& loss) {
  Peer& peer = peers_[number];
  if (peer.loss || !peer.connection.data) return;
  peer.loss = loss;
  if (loss.kind != ErrorKind::aborted && culprit_ == rank_) culprit_ = loss.culprit;
  std::vector<MessagePtr> ended(peer.out.eager.begin(), peer.out.eager.end());
  ended.insert(ended.end(), peer.out.granted.begin(), peer.out.granted.end());
  for (const auto& [key, message] : peer.out.waiting) ended.push_back(message);
  for (const auto& [key, message] : peer.in.posted) ended.push_back(message);
  peer.out = Out{};
  peer.in.posted.clear();
  peer.in.message = nullptr;
  peer.in.in_body = false;
  for (const MessagePtr& message : ended) fail_message(message, loss, false);
}

// Says farewell unless a frame is half sent: the peer then sees the connection end.
void MessageChannel::say_farewell(Peer& peer, const std::string& reason) noexcept {
  if (!peer.live()) return;
  const std::string text = reason.substr(0, kMaxText);
  Frame frame;
  frame.kind = Kind::farewell;
  frame.lane = static_cast<uint32_t>(culprit_);
  frame.bytes = text.size();
  send_farewell(peer.fd(), &frame, sizeof(frame), text, !peer.out.under_way || peer.out.sent == 0);
}

void MessageChannel::abort(const std::string& reason) noexcept {
  if (!here()) return;  // in a forked child the lock may be held for ever
  Lock lock(mutex_);
  if (aborted_) return;
  aborted_ = Loss{ErrorKind::aborted, reason, culprit_};
  for (size_t i = 0; i < peers_.size(); ++i) {
    say_farewell(peers_[i], reason);
    fail(static_cast<int>(i), *aborted_);
  }
  wake_threads(true);
  collect(lock);
}

// Waits until the sockets have taken what can be sent now.
void MessageChannel::flush(Lock& lock) {
  const Deadline deadline = Clock::now() + to_duration(kFlushPatience);
  const auto unsent = [&] {
    return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.live() && !peer.out.idle(); });
  };
  while (unsent() && Clock::now() < deadline) {
    if (leading_) {
      changed_.wait_for(lock, kLongestSleep);
      continue;
    }
    leading_ = true;
    lead(lock, kLongestSleep);
    leading_ = false;
  }
}

void MessageChannel::close() noexcept {
  if (!here()) return;
  {
    Lock lock(mutex_);
    if (closing_) {
      changed_.wait(lock, [&] { return closed_; });
      return;
    }
    closing_ = true;
    flush(lock);
  }
  std::vector<Connection*> connections;
  for (Peer& peer : peers_) connections.push_back(&peer.connection);
  wait_for_room(connections);
  abort(rank_name(rank_) + " closed its connections");
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_ == 0; });  // abort() has woken them
  if (thread_.joinable()) {
    ring(wake_thread_);
    lock.unlock();
    thread_.join();
    lock.lock();
  }
  close_connections(connections);
  wake_leader_.close();
  wake_thread_.close();
  closed_ = true;
  changed_.notify_all();
}

// -- waiting, and the threads that move bytes --

bool MessageChannel::done(const Pending& pending) noexcept { return pending->over; }

void MessageChannel::set_timeout(double seconds) {
  const Lock lock(mutex_);
  timeout_ = to_duration(seconds);
  timeout_seconds_ = seconds;
}

void MessageChannel::wait(const Pending& pending) {
  Batch& batch = *pending;
  if (batch.over && !batch.error) return;
  if (!here())
    throw EngineError(ErrorKind::usage, batch.operation + ": this process was forked from the one that started the message");
  Lock lock(mutex_);
  const Clock::time_point start = Clock::now();
  Deadline deadline = start + timeout_;
  Interrupts interrupts(start);
  size_t moved = batch.moved;
  bool leads = false, first = true, said = false;
  ++waiting_;
  ++batch.waiting;
  const auto leave = [&] {
    --waiting_;
    --batch.waiting;
    if (leads) leading_ = false;
    hand_over();
    collect(lock);
  };
  try {
    while (batch.left > 0 && !batch.error) {
      if (leading_ && !leads) {
        changed_.wait_for(lock, kLongestSleep);
      } else {
        leads = leading_ = true;
        if (std::exchange(first, false)) {  // often the bytes have arrived
          for (const Message& message : batch.messages) {
            if (!message.over) read(message.peer);
          }
        } else {
          lead(lock, std::min<Clock::duration>(kLongestSleep, deadline - Clock::now()));
        }
        collect(lock);
      }
      const Deadline now = Clock::now();
      if (moved != batch.moved) deadline = now + timeout_;
      moved = batch.moved;
      if (interrupts.are_due()) {
        if (std::exchange(leads, false)) {  // a handler of the signal may wait here, too
          leading_ = false;
          hand_over();
        }
        interrupts.look(lock);
      }
      const bool says = !said && now >= deadline - timeout_ + warning_after(timeout_);
      if ((now < deadline && !says) || batch.left == 0 || batch.error) continue;
      const auto late = std::find_if(batch.messages.begin(), batch.messages.end(), [](const Message& m) { return !m.over; });
      if (says) {
        said = true;
        say_waiting(rank_, late->peer, batch.operation, timeout_);
        continue;
      }
      batch.end_turn();
      EngineError error(ErrorKind::timeout,
                        batch.operation + ": " + rank_name(rank_) +
                            (late->is_send ? " could send nothing to " : " heard nothing of ") + rank_name(late->peer) +
                            " within " + number(timeout_seconds_) + " s; look for the first error on " + rank_name(late->peer),
                        late->peer);
      error.rank = rank_;
      error.op = batch.operation;
      throw error;
    }
    if (batch.error) throw EngineError(*batch.error);
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void MessageChannel::watch(const Pending& pending) {
  if (!here() || pending->over) return;
  const Lock lock(mutex_);
  pending->watched = true;
  wake_threads(false);
}

// What the channel's thread polls of a peer while nobody waits.
short MessageChannel::background_events(const Peer& peer) const {
  if (!peer.live()) return 0;
  bool reads = !peer.out.waiting.empty();
  for (const auto& [key, message] : peer.in.posted) reads |= message->lengthy() || message->batch->watched;
  reads &= peer.in.early_bytes < kMostEarly;
  return static_cast<short>((reads ? POLLIN : 0) | (peer.out.idle() ? 0 : POLLOUT));
}

void MessageChannel::fill(Poller& poller, bool leader) {
  poller.entries.assign(1, {leader ? wake_leader_.fd() : wake_thread_.fd(), POLLIN, 0});
  poller.peers.assign(1, -1);
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    short events = 0;
    if (leader) {
      events = static_cast<short>(peer.live() ? POLLIN | (peer.out.idle() ? 0 : POLLOUT) : 0);
      peer.leader_polls = events;
    } else {
      events = leading_ || closing_ ? 0 : background_events(peer);
      peer.thread_polls = events;
    }
    if (events == 0) continue;
    poller.entries.push_back({peer.fd(), events, 0});
    poller.peers.push_back(static_cast<int>(i));
    if ((events & POLLIN) != 0) wake_from(peer.fd(), peer.in.in_body ? peer.in.left : 1, peer.in.enough);
    if (!peer.host_watched) continue;
    poller.entries.push_back({peer.connection.keepalive.fd(), 0, 0});  // no events: poll() reports errors anyway
    poller.peers.push_back(static_cast<int>(i));
  }
}

// Sleeps in poll(), without the lock.
void MessageChannel::sleep(Lock& lock, Poller& poller, Clock::duration longest) {
  const auto nap = std::chrono::duration_cast<std::chrono::milliseconds>(longest).count() + 1;
  poller.asleep = true;
  lock.unlock();
  const int ready = ::poll(poller.entries.data(), poller.entries.size(), static_cast<int>(std::max<int64_t>(nap, 0)));
  while (posting_ > 0) std::this_thread::yield();  // a mutex may go to this thread again and again
  lock.lock();
  poller.asleep = false;
  if (ready > 0) return;
  for (pollfd& entry : poller.entries) entry.revents = entry.events;  // time-out or interrupted: try all sockets
}

// Sleeps until something can be moved, and moves it.
void MessageChannel::lead(Lock& lock, Clock::duration longest) {
  fill(leader_, true);
  sleep(lock, leader_, longest);
  move_ready(leader_);
}

void MessageChannel::move_ready(const Poller& poller) {
  uint64_t rung = 0;
  if (poller.entries[0].revents != 0) {
    [[maybe_unused]] const ssize_t got = ::read(poller.entries[0].fd, &rung, sizeof(rung));
  }
  for (size_t i = 1; i < poller.entries.size(); ++i) {
    const pollfd& entry = poller.entries[i];
    const int number = poller.peers[i];
    Peer& peer = peers_[number];
    if (entry.revents == 0 || !peer.live()) continue;
    if (entry.fd == peer.fd()) {
      if ((entry.revents & POLLOUT) != 0) write(number, kAtOnce);
      if ((entry.revents & (POLLIN | POLLHUP | POLLERR)) != 0) read(number);
      continue;
    }
    const std::string why = lost_host(entry.fd, peer.connection.host);
    peer.host_watched = false;  // if only its process has ended, the data connection reports it
    if (why.empty()) continue;
    read(number);  // what did arrive
    fail(number, {ErrorKind::peer_lost, why, number});
  }
}

// Called by a thread that leaves wait(): the next one takes its place, or the channel's thread.
void MessageChannel::hand_over() {
  if (leading_) return;
  changed_.notify_all();  // close() may wait too
  if (waiting_ == 0) wake_threads(false);
}

// Wakes the thread that leads if there is something new for it, or else the channel's thread. With `ended_some`, messages have
// ended that other threads wait for.
void MessageChannel::wake_threads(bool ended_some) {
  if (ended_some) changed_.notify_all();
  bool for_leader = ended_some, for_thread = false;
  for (const Peer& peer : peers_) {
    const short wanted = background_events(peer);
    for_leader |= (wanted & ~peer.leader_polls & POLLOUT) != 0;
    for_thread |= (wanted & ~peer.thread_polls) != 0;
  }
  if (leading_) {
    if (for_leader && leader_.asleep) ring(wake_leader_);
    return;
  }
  if (!for_thread || waiting_ > 0 || closing_) return;
  if (thread_.joinable()) return ring(wake_thread_);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {  // no further threads: messages move while somebody waits
  }
}

void MessageChannel::run() {
  Poller poller;
  Lock lock(mutex_);
  while (!closing_) {
    fill(poller, false);
    sleep(lock, poller, poller.entries.size() > 1 ? kLongestSleep : std::chrono::hours(1));
    if (leading_ || closing_) {
      uint64_t rung = 0;
      [[maybe_unused]] const ssize_t got = ::read(wake_thread_.fd(), &rung, sizeof(rung));
    } else {
      move_ready(poller);
    }
    collect(lock);
  }
}

// Lets go of the memory of messages that are over, without the lock.
void MessageChannel::collect(Lock& lock) {
  if (over_.empty()) return;
  std::vector<std::shared_ptr<void>> over = std::exchange(over_, {});
  lock.unlock();
  over.clear();
  lock.lock();
}

}  // namespace commsched
