// Memory that the ranks of one host share: each rank has a board, which it writes and its neighbours read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "socket.h"
#include "types.h"

namespace commsched {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free, "processes share them");

// One board is one anonymous file (memfd) that all ranks of the host map. The kernel frees it when the last of them ends, however
// it ends: no name of it exists anywhere. comm_core/boards.py makes the files and opens those of the neighbours.
//
//   board of one rank:   head | shard 0: slot 0, slot 1, ... | shard 1: slot 0, ... | ... shard N-1
//
// A slot holds one segment of one shard. The board itself knows nothing of who may write or read when: see two_tier.h. The head
// holds the token by which a neighbour knows the board, how many segments its rank has published and of what, and when it last
// waited.
class HostBoard {
 public:
  static constexpr size_t kHead = 4096;  // bytes

  struct Shape {
    int shards;
    int slots;  // for each shard
    size_t slot_bytes;

    size_t bytes() const { return kHead + static_cast<size_t>(shards) * slots * slot_bytes; }
  };

  // Maps one open file for each rank of this host, in rank order; this rank's is number `place`. The files may be closed
  // afterwards.
  HostBoard(const std::vector<int>& files, int place, const Shape& shape);
  ~HostBoard() { release(); }
  HostBoard(const HostBoard&) = delete;
  HostBoard& operator=(const HostBoard&) = delete;

  const Shape& shape() const { return shape_; }
  int place() const { return place_; }
  int places() const { return static_cast<int>(boards_.size()); }

  // The slot of segment number `sequence`, counted over all operations.
  char* own(int shard, uint64_t sequence) { return slot(place_, shard, sequence); }
  const char* of(int place, int shard, uint64_t sequence) const { return slot(place, shard, sequence); }

  // What this rank wrote before is visible to a neighbour for which published(place, sequence, form) is true. Both give the same
  // form, a number that tells what the segment belongs to.
  void publish(uint64_t sequence, uint64_t form) {
    form_of(place_, sequence).store(form, std::memory_order_relaxed);
    counter(place_).store(sequence + 1, std::memory_order_release);
  }
  bool published(int place, uint64_t sequence, uint64_t form) const {
    return counter(place).load(std::memory_order_acquire) > sequence &&
           form_of(place, sequence).load(std::memory_order_relaxed) == form;
  }

  // Where this rank's channel writes the time while it waits, and the time since a neighbour's did so. The processes of one host
  // have one clock.
  std::atomic<int64_t>* pulse() { return &pulse_of(place_); }
  Clock::duration since_waiting(int place) const {
    return Clock::now().time_since_epoch() - Clock::duration(pulse_of(place).load());
  }

  // Unmaps the memory. No thread may use it then. Does nothing in a forked child, which never had it.
  void release() noexcept;

 private:
  char* slot(int place, int shard, uint64_t sequence) const {
    return boards_[place] + kHead + (static_cast<size_t>(shard) * shape_.slots + sequence % shape_.slots) * shape_.slot_bytes;
  }

  // Behind the token; files in memory begin as zeros.
  std::atomic<uint64_t>& counter(int place) const { return *reinterpret_cast<std::atomic<uint64_t>*>(boards_[place] + 64); }

  std::atomic<int64_t>& pulse_of(int place) const { return *reinterpret_cast<std::atomic<int64_t>*>(boards_[place] + 128); }

  // Of the segment in this slot.
  std::atomic<uint64_t>& form_of(int place, uint64_t sequence) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(boards_[place] + 192)[sequence % shape_.slots];
  }

  const Shape shape_;
  const int place_;
  const Owned owned_;
  std::vector<char*> boards_;  // by place on the host
};

}  // namespace commsched
