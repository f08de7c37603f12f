// Buckets of rows, such as the gradient of an embedding: only touched rows travel. A row is touched unless all its bits are zero,
// so a bucket of which only touched rows were sent has the same bits as one that was sent whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace commsched {

// The numbers of touched rows, ascending, then the rows themselves: one message.
class RowMessage {
 public:
  void reset(uint64_t count, size_t row_bytes) {
    count_ = count;
    row_bytes_ = row_bytes;
    if (memory_.size() < bytes()) memory_.resize(bytes());
  }
  uint64_t count() const { return count_; }
  const uint64_t* count_address() const { return &count_; }
  size_t bytes() const { return begin_of_rows() + count_ * row_bytes_; }
  char* data() { return memory_.data(); }
  char* row(uint64_t k) { return memory_.data() + begin_of_rows() + k * row_bytes_; }
  const char* row(uint64_t k) const { return memory_.data() + begin_of_rows() + k * row_bytes_; }
  void set_number(uint64_t k, uint32_t number) { std::memcpy(memory_.data() + k * sizeof(number), &number, sizeof(number)); }
  uint32_t number(uint64_t k) const {
    uint32_t number;
    std::memcpy(&number, memory_.data() + k * sizeof(number), sizeof(number));
    return number;
  }

 private:
  size_t begin_of_rows() const { return (count_ * sizeof(uint32_t) + 7) / 8 * 8; }  // rows of doubles are aligned

  uint64_t count_ = 0;
  size_t row_bytes_ = 0;
  std::vector<char> memory_;
};

inline bool is_touched(const char* row, size_t bytes) {
  constexpr size_t kWords = 8;
  uint64_t words[kWords];
  size_t i = 0;
  for (; i + sizeof(words) <= bytes; i += sizeof(words)) {
    std::memcpy(words, row + i, sizeof(words));
    uint64_t any = 0;
    for (const uint64_t word : words) any |= word;
    if (any != 0) return true;
  }
  for (; i < bytes; ++i) {
    if (row[i] != 0) return true;
  }
  return false;
}

// The numbers of the touched rows among rows first, first + stride, ...
inline void find_touched(const char* base, size_t rows, size_t row_bytes, size_t first, size_t stride,
                         std::vector<uint32_t>& found) {
  found.clear();
  for (size_t k = first; k < rows; k += stride) {
    if (is_touched(base + k * row_bytes, row_bytes)) found.push_back(static_cast<uint32_t>(k));
  }
}

// Writes the numbers of rows in which `whole` has other bits than `part` + 0: autograd adds zeros there, and turns -0 into 0.
template <typename T>
size_t find_changed(const T* part, const T* whole, size_t rows, size_t row, int32_t* found) {
  size_t count = 0;
  for (size_t k = 0; k < rows; ++k, part += row, whole += row) {
    bool same = true;
    for (size_t i = 0; i < row; ++i) {
      const T sum = part[i] + T(0);
      same &= std::memcmp(&sum, whole + i, sizeof(T)) == 0;
    }
    if (!same) found[count++] = static_cast<int32_t>(k);
  }
  return count;
}

}  // namespace commsched
