#include "host_board.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "types.h"

namespace commsched {
namespace {

char* map_board(int file, size_t bytes, size_t place) {
  const auto refuse = [&](const std::string& why) {
    throw EngineError(ErrorKind::usage, "the board of place " + std::to_string(place) + " of this host cannot be mapped: " + why);
  };
  struct stat facts{};
  if (fstat(file, &facts) != 0) refuse(std::string("fstat: ") + std::strerror(errno));
  if (static_cast<size_t>(facts.st_size) < bytes) {
    refuse("it has " + std::to_string(facts.st_size) + " bytes, but " + std::to_string(bytes) +
           " are needed; do all ranks use the same segment_bytes and depth?");
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) refuse(std::string("mmap: ") + std::strerror(errno));
  // A forked child (such as a DataLoader worker) does not get the mapping, so it neither keeps the memory nor can write to it.
  madvise(memory, bytes, MADV_DONTFORK);
  return static_cast<char*>(memory);
}

constexpr auto kSpin = std::chrono::microseconds(20);

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

HostBoard::HostBoard(const std::vector<int>& files, int place, const Shape& shape) : shape_(shape), place_(place) {
  if (place < 0 || place >= static_cast<int>(files.size())) {
    throw EngineError(ErrorKind::usage, "a board's place must be in [0, " + std::to_string(files.size()) +
                                            "), the number of ranks on this host, but is " + std::to_string(place));
  }
  constexpr int kMost = (kHead - kNotes) / sizeof(Note);
  if (shape.slots > kMost) {
    throw EngineError(ErrorKind::usage, "a board's head has room for the notes on " + std::to_string(kMost) +
                                            " slots of each shard, but there are " + std::to_string(shape.slots) +
                                            ", two for each segment of the depth; use a smaller depth");
  }
  try {
    for (size_t i = 0; i < files.size(); ++i) boards_.push_back(map_board(files[i], shape_.bytes(), i));
  } catch (...) {
    release();
    throw;
  }
}

bool HostBoard::comes_soon(int place, uint64_t sequence) const {
  if (published(place, sequence)) return true;
  if (processor_of(place).load(std::memory_order_relaxed) == sched_getcpu()) return false;
  for (const Deadline end = Clock::now() + kSpin; Clock::now() < end;) {
    for (int i = 0; i < 8; ++i) pause_briefly();
    if (published(place, sequence)) return true;
  }
  return false;
}

void HostBoard::release() noexcept {
  if (owned_.here()) {  // in a forked child, other memory may lie at these addresses
    for (char* board : boards_) munmap(board, shape_.bytes());
  }
  boards_.clear();
}

}  // namespace commsched
