// The messages of stages and tiles: any number at a time, from any thread, in lanes. Unlike TcpChannel, which serves one engine
// thread that has nothing else to do, this channel serves threads that compute.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connection.h"
#include "link_gate.h"
#include "types.h"

namespace commsched {

// [Note: short and long messages]
//
// A short message (up to kShort bytes) is sent at once. The thread that computes writes it into the socket, which takes
// microseconds, and only the rank that waits for it is woken. If the socket is full, the channel keeps a copy of the rest, so the
// buffers are free in any case. A short message that nobody has asked for yet is read into memory of its own.
//
// A long message leaves once its receiver has asked for it, and goes straight into the receiver's buffers:
//
//     sender                                receiver
//                <-  grant (lane, number)   receive() was called; often long before the send
//     send()     ->  data, in frames of up to kFrame bytes
//
//     send()     ->  announcement           send() before receive(): the announcement shows a receiver that expects
//                <-  grant                  another message that the ranks differ
//                ->  data
//
// So the bytes in a connection always have a place to go: a reader never stops because a receive is missing, and a lane cannot
// block another one. (With plain sends a reader would have two bad choices: buffer gigabytes of a lane whose receives come
// later, or leave them in the socket in front of the message that it waits for.) Between the frames of a long message go short
// messages, grants, and frames of more urgent long messages.
//
// [Note: who moves the bytes]
//
// One thread at a time polls the sockets and moves bytes:
//   - a thread in wait(), the leader. Further waiting threads sleep until the leader tells that their messages are over; when
//     the leader leaves, one of them takes its place;
//   - while no thread waits, the channel's own thread, for long messages, for watched ones, and for what a full socket did not
//     take. It starts with the first of them. While somebody leads, and when there is nothing to do, it sleeps.
// A thread that sends writes too, but only if nothing was left to write, so that it ends no message that another thread waits
// for. A leader reads from every rank: in a ring of ranks that wait, everybody reads, so everybody's bytes arrive.
class MessageChannel {
 public:
  struct Piece {
    char* data;
    size_t bytes;
  };
  // A message, in pieces, to or from a peer.
  struct Parcel {
    int peer;
    std::vector<Piece> pieces;
  };
  // Messages that are waited for together.
  struct Exchange {
    std::string operation;  // for errors; both ends must name the same one
    uint32_t lane = 0;
    std::optional<Traffic> traffic;  // the kind that the link's gate knows, if other messages shall wait for these
    std::vector<Parcel> sends, receives;
    std::shared_ptr<void> owner;  // keeps the memory until all messages are over
  };
  struct Batch;
  using Pending = std::shared_ptr<Batch>;

  static constexpr size_t kShort = 64 << 10;   // bytes of a short message
  static constexpr size_t kFrame = 512 << 10;  // bytes of a long message before others get a turn
  // While nobody waits, at most so many bytes of short messages of a peer are read before they are asked for. The others stay
  // in the sockets until a thread waits: then all are read, because the awaited message may be behind them.
  static constexpr size_t kMostEarly = 64 << 20;

  // Less urgent messages wait so many seconds for one, and longer by its bytes on a slow link. A message that takes longer waits
  // for its receiver, and not for the link.
  static constexpr double kTurnPatience = 0.1;

  // One connection for each rank; that of this rank is empty.
  MessageChannel(int rank, std::vector<Connection> connections);
  ~MessageChannel() { close(); }

  // Starts messages. Those of a lane match in the order in which both ends start them. Blocks only at the link's gate.
  Pending start(Exchange exchange);

  // Returns when all messages have arrived and left. Throws EngineError when no byte of them has moved within the time-out, when
  // a peer is gone or runs a different operation, and after abort().
  void wait(const Pending& pending);

  // Moves also short messages in the background, so that their turn on the link ends when they are over.
  void watch(const Pending& pending);

  static bool done(const Pending& pending) noexcept;

  // From any thread: every current and later wait throws, here and with this reason at the other ranks.
  void abort(const std::string& reason) noexcept;

  // Sends what can be sent, says farewell, and gives back the connections and the thread.
  void close() noexcept;

  void set_timeout(double seconds);

  // False in a forked child, where the channel must neither be used nor destroyed.
  bool here() const noexcept { return owned_.here(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Key = uint64_t;  // lane and number of a message
  enum class Kind : uint32_t { data = 0x636d7367, announcement, grant, farewell };

  // Goes before every piece of the stream.
  struct Frame {
    Kind kind = Kind::data;
    uint32_t lane = 0;       // of a farewell: the rank at fault
    uint32_t number = 0;     // of the message in its lane
    uint32_t operation = 0;  // checksum of its name
    uint64_t total = 0;      // bytes of the message
    uint64_t bytes = 0;      // that follow

    Key key() const { return uint64_t{lane} << 32 | number; }
  };

  struct Message {
    Batch* batch = nullptr;
    int peer = -1;
    bool is_send = false;
    bool over = false;
    Frame frame;  // describes it
    std::vector<Piece> pieces;
    std::vector<char> copy;          // of the rest of a short message
    size_t moved = 0;                // bytes
    size_t piece = 0, in_piece = 0;  // the place of the next byte

    bool lengthy() const { return frame.total > kShort; }
    int gather(iovec* into, int most, size_t bytes) const;
    void advance(size_t bytes);
    void fill(const char* from, size_t bytes);
    void keep_copy();
  };
  using MessagePtr = std::shared_ptr<Message>;

  // Why a connection, or everything, has ended.
  struct Loss {
    ErrorKind kind;
    std::string why;
    int culprit;
  };

  struct Early {
    Frame frame;
    std::vector<char> bytes;
  };

  struct Out {
    std::deque<Frame> control;  // grants and announcements
    std::deque<MessagePtr> eager;
    std::deque<MessagePtr> granted;                  // the most urgent first
    std::unordered_map<Key, MessagePtr> waiting;     // for grants
    std::unordered_map<Key, Frame> grants;           // that came before their messages
    std::unordered_map<uint32_t, uint32_t> numbers;  // by lane
    Frame frame;                                     // the frame that is being sent
    size_t sent = 0;                                 // bytes of it, with its header
    size_t body = 0;                                 // bytes of its message that belong to it
    MessagePtr message;
    bool under_way = false;
    bool broken = false;  // nothing can be sent any more

    bool idle() const { return !under_way && control.empty() && eager.empty() && granted.empty(); }
  };

  struct In {
    std::vector<char> stage;  // headers and short messages, many per system call
    size_t begin = 0, end = 0;
    Frame frame;
    bool in_body = false;
    size_t left = 0;         // bytes of the frame
    MessagePtr message;      // where they go, or
    std::vector<char> body;  // here
    std::unordered_map<Key, MessagePtr> posted;
    std::unordered_map<Key, Early> early;
    std::unordered_map<Key, Frame> announced;
    std::unordered_map<uint32_t, uint32_t> numbers;  // by lane
    size_t early_bytes = 0;
    int enough = 1;  // SO_RCVLOWAT
  };

  struct Peer {
    Connection connection;
    Out out;
    In in;
    bool host_watched = false;
    std::optional<Loss> loss;
    short leader_polls = 0, thread_polls = 0;  // events

    int fd() const { return connection.data.fd(); }
    bool live() const { return connection.data && !loss; }
  };

  // One thread's turn to move bytes.
  struct Poller {
    std::vector<pollfd> entries;
    std::vector<int> peers;  // of each entry
    bool asleep = false;
  };

  MessagePtr make(const Pending& batch, Parcel& parcel, bool is_send);
  void post_receive(const MessagePtr& message);
  void post_send(const MessagePtr& message);
  void put_granted(Out& out, const MessagePtr& message);

  void write(int peer, size_t most);
  bool next_frame(Out& out);
  void end_frame(Out& out);
  void read(int peer);
  void take(int peer, size_t bytes);
  void parse(int peer);
  void begin_frame(int peer);
  void end_frame(int peer);
  bool matches(int peer, const Frame& got, MessagePtr message);
  void deliver(const MessagePtr& message, const Early& early);

  void finish(const MessagePtr& message);
  void fail(int peer, const Loss& loss);
  void fail_message(const MessagePtr& message, const Loss& loss, bool at_fault);
  EngineError error_of(const Batch& batch, int peer, const Loss& loss, bool at_fault) const;
  void say_farewell(Peer& peer, const std::string& reason) noexcept;

  short background_events(const Peer& peer) const;
  void fill(Poller& poller, bool leader);
  void sleep(Lock& lock, Poller& poller, Clock::duration longest);
  void lead(Lock& lock, Clock::duration longest);
  void move_ready(const Poller& poller);
  void hand_over();
  void wake_threads(bool ended_some);
  void run();
  void collect(Lock& lock);
  void flush(Lock& lock);

  const int rank_;
  const Owned owned_;
  Socket wake_leader_, wake_thread_;  // eventfds

  std::atomic<int> posting_{0};  // threads that compute and want the lock: they come first
  std::mutex mutex_;             // guards all that follows; released in poll()
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  Clock::duration timeout_ = to_duration(300);
  double timeout_seconds_ = 300;
  bool leading_ = false;
  int waiting_ = 0;  // threads in wait()
  Poller leader_;
  std::optional<Loss> aborted_;
  int culprit_;
  bool closing_ = false, closed_ = false;
  std::vector<std::shared_ptr<void>>
      over_;  // owners of messages that are over; released without the lock, for they may take the GIL
  std::thread thread_;
};

struct MessageChannel::Batch {
  std::string operation;
  std::vector<Message> messages;  // complete before the first pointer to one is made
  std::shared_ptr<void> owner;
  std::optional<Traffic> traffic;
  std::optional<EngineError> error;
  std::atomic<bool> over{false};
  size_t left = 0;   // messages
  size_t moved = 0;  // bytes
  int64_t turn = -1;
  int waiting = 0;  // threads
  bool watched = false;

  void end_turn() {
    if (turn >= 0) LinkGate::of_process().end(std::exchange(turn, -1));
  }
};

}  // namespace commsched
