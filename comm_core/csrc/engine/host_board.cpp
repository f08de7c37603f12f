#include "host_board.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <set>

#include "types.h"

namespace commsched {
namespace {

// Maps `bytes` of the file, or all of it where that is 0, and then says how many.
char* map_file(int file, size_t& bytes, size_t place) {
  const auto refuse = [&](const std::string& why) {
    throw EngineError(ErrorKind::usage, "the board of place " + std::to_string(place) + " of this host cannot be mapped: " + why);
  };
  struct stat facts{};
  if (fstat(file, &facts) != 0) refuse(std::string("fstat: ") + std::strerror(errno));
  if (bytes == 0) bytes = static_cast<size_t>(facts.st_size);
  if (static_cast<size_t>(facts.st_size) < bytes) {
    refuse("it has " + std::to_string(facts.st_size) + " bytes, but " + std::to_string(bytes) +
           " are needed; do all ranks use the same segment_bytes and depth?");
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
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

// The blocks of this process by address. Never destroyed: blocks may outlive static objects.
struct Blocks {
  struct Block {
    size_t bytes;
    int file;
    off_t offset;
  };
  std::mutex mutex;
  std::map<char*, Block> all;
  std::set<int> files;  // of this process

  static Blocks& get() {
    static Blocks& only = *new Blocks;
    return only;
  }

 private:
  // A forked child must neither write to gradients of this process nor find a hole where it has some: it maps every block again,
  // at the same address, but as memory of its own. It sees what this process writes to pages that it has not written itself. It
  // does not keep the files open, so that later blocks end with this process.
  Blocks() { pthread_atfork(before_fork, in_parent, in_child); }
  static void before_fork() { get().mutex.lock(); }
  static void in_parent() { get().mutex.unlock(); }
  static void in_child() {
    for (const auto& [begin, block] : get().all) {
      mmap(begin, block.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, block.file, block.offset);
    }
    for (const int file : get().files) close(file);
    get().all.clear();  // for a child of this one, they are ordinary memory, and the numbers of the files belong to others
    get().files.clear();
    get().mutex.unlock();
  }
};

}  // namespace

SharedMemory::SharedMemory(int file, size_t place, bool is_owner) {
  base_ = map_file(file, bytes_, place);
  madvise(base_, bytes_, MADV_DONTDUMP);
  if (!is_owner || (file_ = fcntl(file, F_DUPFD_CLOEXEC, 0)) < 0) return;
  const std::lock_guard lock(Blocks::get().mutex);
  Blocks::get().files.insert(file_);
}

SharedMemory::~SharedMemory() {
  if (!owned_.here()) return;  // in a forked child, other memory may lie at these addresses
  munmap(base_, bytes_);
  if (file_ < 0) return;
  const std::lock_guard lock(Blocks::get().mutex);
  Blocks::get().files.erase(file_);
  close(file_);
}

// The first gap that is long enough, behind the page with the token.
std::shared_ptr<void> SharedMemory::take(const std::shared_ptr<SharedMemory>& memory, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  if (bytes == 0 || memory->file_ < 0 || !memory->owned_.here()) return nullptr;
  Blocks& blocks = Blocks::get();
  const std::lock_guard lock(blocks.mutex);
  char *begin = memory->base_ + page, *const end = memory->base_ + memory->bytes_;
  for (auto next = blocks.all.lower_bound(begin); next != blocks.all.end() && next->first < end; ++next) {
    if (static_cast<size_t>(next->first - begin) >= bytes) break;
    begin = next->first + next->second.bytes;
  }
  if (begin > end || static_cast<size_t>(end - begin) < bytes) return nullptr;
  blocks.all[begin] = {bytes, memory->file_, begin - memory->base_};
  return {begin, [memory](char* block) { memory->give_back(block); }};
}

// The pages go back to the system, so the next block there begins as zeros.
void SharedMemory::give_back(char* block) noexcept {
  if (!owned_.here()) return;
  Blocks& blocks = Blocks::get();
  const std::lock_guard lock(blocks.mutex);
  const auto found = blocks.all.find(block);
  if (madvise(block, found->second.bytes, MADV_REMOVE) != 0) std::memset(block, 0, found->second.bytes);
  blocks.all.erase(found);
}

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
    size_t bytes = shape_.bytes();
    for (size_t i = 0; i < files.size(); ++i) boards_.push_back(map_file(files[i], bytes, i));
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

void HostBoard::leave() noexcept {
  if (!owned_.here()) return;
  const std::lock_guard lock(leaving_);
  if (!boards_.empty()) left_of(place_).exchange(1);
}

void HostBoard::share(const std::vector<int>& files) noexcept {
  shares_ = !files.empty();
  try {
    for (size_t i = 0; i < files.size(); ++i) {
      memory_.push_back(std::make_shared<SharedMemory>(files[i], i, static_cast<int>(i) == place_));
    }
  } catch (const EngineError&) {  // the limit of a process's address space, for example
    memory_.clear();
  }
}

void HostBoard::release() noexcept {
  if (!owned_.here()) return;  // in a forked child, other memory may lie at these addresses
  const std::lock_guard lock(leaving_);
  for (char* board : boards_) munmap(board, shape_.bytes());
  boards_.clear();
  memory_.clear();  // the blocks of this rank live on
}

}  // namespace commsched
