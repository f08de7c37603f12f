// Ranks of one process, joined by sockets.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/tcp_channel.h"
#include "engine/two_tier.h"

using Channels = std::vector<std::shared_ptr<commsched::Channel>>;

using namespace commsched;

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

inline void on_ranks(int size, const std::function<void(int)>& call) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(call, rank);
  for (auto& thread : threads) thread.join();
}

inline std::vector<std::vector<Connection>> rows_of_sockets(int size) {
  std::vector<std::vector<Connection>> rows(size);
  for (auto& row : rows) row.resize(size);
  for (int one = 0; one < size; ++one) {
    for (int other = 0; other < one; ++other) {
      int ends[2];
      require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a pair of sockets");
      rows[one][other].data = Socket(ends[0]);
      rows[other][one].data = Socket(ends[1]);
    }
  }
  return rows;
}

inline Channels over_sockets(int size, unsigned) {
  Channels channels;
  for (auto& row : rows_of_sockets(size))
    channels.push_back(std::make_shared<TcpChannel>(static_cast<int>(channels.size()), std::move(row)));
  return channels;
}

// The files of all ranks' boards. Each rank maps those of its host at other addresses, as processes do.
class BoardFiles {
 public:
  BoardFiles(int size, const HostBoard::Shape& shape) {
    for (int rank = 0; rank < size; ++rank) {
      files_.push_back(memfd_create("board", MFD_CLOEXEC));
      require(files_.back() >= 0 && ftruncate(files_.back(), static_cast<off_t>(shape.bytes())) == 0, "a file in memory");
      memory_.push_back(memfd_create("gradients", MFD_CLOEXEC));
      require(memory_.back() >= 0 && ftruncate(memory_.back(), 1 << 24) == 0, "shared memory");
    }
  }
  ~BoardFiles() {
    for (const int file : files_) close(file);
    for (const int file : memory_) close(file);
  }
  BoardFiles(const BoardFiles&) = delete;
  BoardFiles& operator=(const BoardFiles&) = delete;

  std::unique_ptr<HostBoard> board(int rank, const std::vector<int>& hosts, const HostBoard::Shape& shape) const {
    std::vector<int> files;
    int place = 0;
    for (size_t other = 0; other < hosts.size(); ++other) {
      if (hosts[other] != hosts[rank]) continue;
      if (static_cast<int>(other) < rank) ++place;
      files.push_back(files_[other]);
    }
    auto made = std::make_unique<HostBoard>(files, place, shape);
    if (files == files_) made->share(memory_);  // one host
    return made;
  }

 private:
  std::vector<int> files_, memory_;
};

// Waits up to half a millisecond before every message, so that messages of different ranks come in any order.
class DelayedChannel : public Channel {
 public:
  DelayedChannel(std::shared_ptr<Channel> channel, unsigned seed) : channel_(std::move(channel)), random_(seed) {}

  Request isend(const void* data, size_t bytes, int peer, const MessageTag& tag) override {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    return channel_->isend(data, bytes, peer, tag);
  }
  Request irecv(void* data, size_t bytes, int peer, const MessageTag& tag) override {
    return channel_->irecv(data, bytes, peer, tag);
  }
  void wait(const Request& request) override { channel_->wait(request); }
  void abort(const std::string& reason) noexcept override { channel_->abort(reason); }
  void close() noexcept override { channel_->close(); }
  int max_in_flight() const override { return channel_->max_in_flight(); }
  void set_timeout(double seconds) override { channel_->set_timeout(seconds); }
  void beat(std::atomic<int64_t>* pulse) noexcept override { channel_->beat(pulse); }

 private:
  const std::shared_ptr<Channel> channel_;
  std::mt19937 random_;  // used by the one thread that posts
};

inline Channels over_slow_sockets(int size, unsigned seed) {
  Channels channels = over_sockets(size, seed);
  for (auto& channel : channels) channel = std::make_shared<DelayedChannel>(channel, ++seed);
  return channels;
}
