// Memory that the ranks of one host share: each rank has a board, which it writes and its neighbours read.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "channel.h"
#include "socket.h"
#include "types.h"

namespace commsched {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free, "processes share them");

// Memory for the buckets of one rank, which its neighbours read in place. It is an anonymous file like a board, as long as the
// buckets could ever be: only pages that are written take memory.
class SharedMemory {
 public:
  // Throws if there is no such file, or if it cannot be mapped. Only its owner may take(): others read.
  SharedMemory(int file, size_t place, bool is_owner);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Zeros that live as long as the pointer, also after the transport has ended; null where there is no room. The neighbours'
  // memory has no blocks here. In a forked child, a block is the child's own copy of it (see host_board.cpp).
  static std::shared_ptr<void> take(const std::shared_ptr<SharedMemory>& memory, size_t bytes);

  // Where memory begins in the file, counted from 1; 0: somewhere else.
  uint64_t where(const void* address) const {
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_);
    return offset < bytes_ ? offset + 1 : 0;
  }
  const char* at(uint64_t where) const { return base_ + (where - 1); }

 private:
  void give_back(char* block) noexcept;

  const Owned owned_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  int file_ = -1;  // the owner's own descriptor
};

// One board is one anonymous file (memfd) that all ranks of the host map. The kernel frees it when the last of them ends, however
// it ends: no name of it exists anywhere. comm_core/boards.py makes the files and opens those of the neighbours.
//
//   board of one rank:   head | shard 0: slot 0, slot 1, ... | shard 1: slot 0, ... | ... shard N-1
//
// A slot holds one segment of one shard. The board itself knows nothing of who may write or read when: see two_tier.h. The head
// holds the token by which a neighbour knows the board, how many segments its rank has published and of what, for which segment
// it sleeps, and when it last waited.
class HostBoard {
 public:
  static constexpr size_t kHead = 8192;  // bytes: room for the notes of the largest depth
  static constexpr size_t kNotes = 256;  // where in the head the notes on the segments in the slots of a shard begin

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

  // What a segment belongs to: its operation, and a number in which operations on other elements differ.
  struct Note {
    MessageTag tag;
    uint64_t form;
    uint64_t where;  // of its bucket in the shared memory, if that matters
  };
  static_assert(sizeof(Note) % sizeof(uint64_t) == 0, "notes are written word by word");

  // What this rank wrote before is visible to a neighbour for which published(place, sequence) is true.
  void publish(uint64_t sequence, const Note& note) {
    std::array<uint64_t, kWords> words;
    std::memcpy(words.data(), &note, sizeof(note));
    for (size_t i = 0; i < kWords; ++i) word_of(place_, sequence, i).store(words[i], std::memory_order_relaxed);
    processor_of(place_).store(sched_getcpu(), std::memory_order_relaxed);
    counter(place_).store(sequence + 1);
  }
  bool published(int place, uint64_t sequence) const { return counter(place).load() > sequence; }
  Note note(int place, uint64_t sequence) const {
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) words[i] = word_of(place, sequence, i).load(std::memory_order_relaxed);
    Note note;
    std::memcpy(static_cast<void*>(&note), words.data(), sizeof(note));
    return note;
  }

  // True if this rank must sleep until a message says that the neighbour has published the segment: it sends one to a rank for
  // which is_awaited() is true. Either this rank sees the segment, or the neighbour sees that this rank sleeps: both write first
  // and then read, in the one order of all such accesses (memory_order_seq_cst). If both see, whoever takes the wish back first
  // decides whether a message comes.
  bool must_sleep(int place, uint64_t sequence) {
    if (comes_soon(place, sequence)) return false;
    uint64_t wish = wish_for(place, sequence);
    wish_of(place_).store(wish);
    return !published(place, sequence) || !wish_of(place_).compare_exchange_strong(wish, 0);
  }
  bool is_awaited(int place, uint64_t sequence) {
    uint64_t wish = wish_for(place_, sequence);
    return wish_of(place).load() == wish && wish_of(place).compare_exchange_strong(wish, 0);
  }

  // Where this rank's channel writes the time while it waits, and the time since a neighbour's did so. The processes of one host
  // have one clock.
  std::atomic<int64_t>* pulse() { return &pulse_of(place_); }
  Clock::duration since_waiting(int place) const {
    return Clock::now().time_since_epoch() - Clock::duration(pulse_of(place).load());
  }

  // Maps the files of this host's shared memory, in the order of the boards; all ranks have them, or none. A rank that cannot map
  // them has no bucket there. To be called before the first operation.
  void share(const std::vector<int>& files) noexcept;
  bool shares() const { return shares_; }
  std::shared_ptr<void> take(size_t bytes) const { return memory_.empty() ? nullptr : SharedMemory::take(memory_[place_], bytes); }
  uint64_t where(const void* address) const { return memory_.empty() ? 0 : memory_[place_]->where(address); }
  const char* shared(int place, uint64_t where) const { return memory_[place]->at(where); }

  // Says that this rank's buckets may change in the middle of an operation, because it has failed here. From any thread.
  void leave() noexcept;
  // Whether what was read of the neighbour's bucket before this call may be worthless. It writes what it reads, so no read of the
  // bucket can come after it.
  bool has_left(int place) const { return left_of(place).fetch_or(0) != 0; }

  // Unmaps the memory. No thread may use it then. Does nothing in a forked child, which never had it.
  void release() noexcept;

 private:
  // Waits without sleeping, for as long as it takes to go to sleep and to be woken. Not for a neighbour that was last seen on this
  // rank's processor: it could not go on meanwhile.
  bool comes_soon(int place, uint64_t sequence) const;

  char* slot(int place, int shard, uint64_t sequence) const {
    return boards_[place] + kHead + (static_cast<size_t>(shard) * shape_.slots + sequence % shape_.slots) * shape_.slot_bytes;
  }

  // Behind the token, each in a cache line of its own; files in memory begin as zeros.
  std::atomic<uint64_t>& counter(int place) const { return *reinterpret_cast<std::atomic<uint64_t>*>(boards_[place] + 64); }

  // In the same line, because it is written with the counter.
  std::atomic<int>& processor_of(int place) const { return *reinterpret_cast<std::atomic<int>*>(boards_[place] + 72); }

  std::atomic<int>& left_of(int place) const { return *reinterpret_cast<std::atomic<int>*>(boards_[place] + 80); }

  std::atomic<int64_t>& pulse_of(int place) const { return *reinterpret_cast<std::atomic<int64_t>*>(boards_[place] + 128); }

  // The segment that this rank awaits; 0: none.
  std::atomic<uint64_t>& wish_of(int place) const { return *reinterpret_cast<std::atomic<uint64_t>*>(boards_[place] + 192); }
  static uint64_t wish_for(int place, uint64_t sequence) { return (sequence + 1) << 16 | static_cast<uint64_t>(place); }

  // Of the note on the segment in this slot.
  static constexpr size_t kWords = sizeof(Note) / sizeof(uint64_t);
  std::atomic<uint64_t>& word_of(int place, uint64_t sequence, size_t i) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(boards_[place] + kNotes)[sequence % shape_.slots * kWords + i];
  }

  const Shape shape_;
  const int place_;
  const Owned owned_;
  std::vector<char*> boards_;  // by place on the host
  bool shares_ = false;
  std::vector<std::shared_ptr<SharedMemory>> memory_;
  std::mutex leaving_;  // an abort may come while the boards are released
};

}  // namespace commsched
