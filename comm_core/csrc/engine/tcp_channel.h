// Messages over sockets. The waiting thread itself moves the bytes: straight between the sockets and the buffers that were
// posted, many messages per system call, with no thread in between.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <mutex>
#include <vector>

#include "channel.h"
#include "connection.h"

namespace commsched {

class TcpChannel : public Channel {
 public:
  // One connection for each rank; that of this rank is empty.
  TcpChannel(int rank, std::vector<Connection> connections);
  ~TcpChannel() override;

  Request isend(const void* data, size_t bytes, int peer, const MessageTag& tag) override;
  Request irecv(void* data, size_t bytes, int peer, const MessageTag& tag) override;
  void wait(const Request& request) override;
  void abort(const std::string& reason) noexcept override;
  void close() noexcept override;
  int max_in_flight() const override { return kSlots; }
  void set_timeout(double seconds) override;
  void beat(std::atomic<int64_t>* pulse) noexcept override { pulse_ = pulse; }

 private:
  static constexpr int kSlots = 64;

  // Goes before every message.
  struct Header {
    uint64_t kind = 0;
    uint64_t bytes = 0;
    MessageTag tag;
  };
  struct Message {
    Header header;
    char* data = nullptr;
    Header arrived;  // the header received before it
  };
  // The messages of one direction, and the progress of the first unfinished one.
  struct Stream {
    std::array<Message, kSlots> messages;
    uint64_t posted = 0;
    uint64_t done = 0;
    size_t moved = 0;  // bytes of message `done`, header included

    Message& operator[](uint64_t i) { return messages[i % kSlots]; }
    bool idle() const { return posted == done; }
    int gather_outgoing(iovec* pieces);
    int gather_incoming(iovec* pieces);
  };
  struct Peer {
    Connection connection;
    Stream out;
    Stream in;
    int enough = 1;  // SO_RCVLOWAT: poll() reports the socket from this many bytes

    int fd() const { return connection.data.fd(); }
  };

  static size_t total(const Message& message) { return sizeof(Header) + message.header.bytes; }
  Request post(Stream& stream, bool is_send, const void* data, size_t bytes, int peer, const MessageTag& tag);
  bool done(const Request& request) const;
  bool write(int peer);
  bool read(int peer);
  void look_for_farewell(int peer);
  void skip_to_farewell(int peer);
  size_t receive(int peer, msghdr& batch, int flags);
  void advance(int peer, Stream& stream, bool incoming, size_t bytes);
  void check_arrived(int peer, const Message& message);
  bool move_ready();
  void check_hosts();
  void watch(size_t peer);
  void sleep(Deadline deadline);
  [[noreturn]] void lose(int peer, const std::string& why);
  [[noreturn]] void hear_farewell(int peer, const Header& header);
  void say_farewell(const std::string& reason) noexcept;

  const int rank_;
  Clock::duration timeout_ = to_duration(300);
  std::vector<Peer> peers_;
  std::vector<pollfd> polled_;  // the data of every peer, then the keepalive of every peer, then abort()'s eventfd
  Socket wake_;
  std::atomic<int64_t>* pulse_ = nullptr;
  const Owned owned_;

  std::mutex mutex_;  // guards the streams; released in poll()
  bool aborted_ = false;
  std::string reason_;
  int culprit_;  // the rank at fault, as far as this rank knows; sent with the farewell
};

}  // namespace commsched
