// The engine's vocabulary. Plain C++: the engine and the exchanges must build without torch and Python, so that one small test
// program can run them under the sanitizers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace commsched {

// qi8 and qf8 are forms of float32 for the wire only: blocks of bytes with a scale (quantise.h).
enum class DType : uint8_t { f32, f64, f16, bf16, i32, i64, u8, qi8, qf8 };

constexpr bool in_blocks(DType type) { return type >= DType::qi8; }

constexpr size_t dtype_size(DType type) {
  switch (type) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
    case DType::qi8:
    case DType::qf8:
      break;  // see wire_bytes()
  }
  return 0;
}

constexpr size_t kQuantBlock = 256;                          // elements with one scale
constexpr size_t kQuantBytes = kQuantBlock + sizeof(float);  // of a whole block

// What n elements take in a message. Elements of blocks are counted from the start of a block.
constexpr size_t wire_bytes(DType wire, size_t n) {
  return in_blocks(wire) ? n + (n + kQuantBlock - 1) / kQuantBlock * sizeof(float) : n * dtype_size(wire);
}

// How many elements fit into so many bytes; of blocks whole ones.
constexpr size_t wire_elements(DType wire, size_t bytes) {
  return in_blocks(wire) ? bytes / kQuantBytes * kQuantBlock : bytes / dtype_size(wire);
}

constexpr const char* dtype_name(DType type) {
  constexpr const char* names[] = {"float32", "float64", "float16",        "bfloat16",     "int32",
                                   "int64",   "uint8",   "blocks of int8", "blocks of fp8"};
  return names[static_cast<int>(type)];
}

// RS reduce-scatter, AG all-gather, AR both.
enum class Op : uint8_t { RS, AG, AR };

// The op may come from another rank's message: one outside the plan has none of these numbers.
constexpr const char* op_name(Op op) {
  switch (op) {
    case Op::RS:
      return "RS";
    case Op::AG:
      return "AG";
    case Op::AR:
      return "AR";
  }
  return "an exchange outside the plan, after those";
}

struct PlanOp {
  Op op;
  int bucket;
};

// One flat buffer of gradients, and the flat buffer that its all-gather fills.
struct BucketSpec {
  std::string name;            // for errors and the event log
  void* reduce_ptr = nullptr;  // the gradients: `count` elements of `dtype`, summed in place
  void* gather_ptr = nullptr;  // what AG gathers: reduce_ptr again, or the parameters, `count` elements of `gather_dtype`
  size_t count = 0;            // elements
  size_t row = 0;              // elements of a row; only rows with a nonzero bit travel. 0: all elements do
  int32_t* changed = nullptr;  // of a correction, or none: how many rows this rank has changed, then their numbers, ascending
  std::vector<size_t> ends;    // where each rank's part ends; empty: all parts have count / N elements
  DType dtype = DType::f32;
  DType gather_dtype = DType::f32;
  DType wire_dtype = DType::f32;   // what gradients travel as; sums are formed in the wider of this and `dtype`
  float* sent_residual = nullptr;  // with blocks, or none: what rounding has lost so far of what this rank sends
  float* sum_residual = nullptr;   // with blocks, or none: what rounding the sums of this rank's part has lost so far
  double prescale = 1.0;           // applied to every rank's gradients before they are added
  double postscale = 1.0;          // applied to the sum, by its owner
  bool needs_update = false;       // AG waits for mark_updated
  bool gathered = false;           // an AG follows every RS, and nobody writes to this rank's gradients between them
  std::shared_ptr<void> owner;     // keeps the memory alive

  // Updated shards are gathered over the gradients that they were made from; parameters travel as they are.
  bool gathers_gradients() const { return (gather_ptr == reduce_ptr && !needs_update) || corrects(); }

  // A correction sums, of reduce_ptr, the rows that any rank has changed, and writes the sums over those in gather_ptr, which
  // another bucket has gathered. RS leaves the rows of all ranks in `changed`.
  bool corrects() const { return changed != nullptr; }

  float* sent_residual_at(size_t element) const { return sent_residual == nullptr ? nullptr : sent_residual + element; }
  float* sum_residual_at(size_t element) const { return sum_residual == nullptr ? nullptr : sum_residual + element; }

  // Rank r of N owns the elements [part_begin(r, N), part_end(r, N)).
  size_t part_begin(int rank, int size) const { return rank == 0 ? 0 : part_end(rank - 1, size); }
  size_t part_end(int rank, int size) const { return ends.empty() ? count / size * (rank + 1) : ends[rank]; }
};

// The operation and step in progress. Sent with every message, so that ranks with different plans notice it.
struct OpTag {
  int64_t step = 0;
  int position = 0;  // in the plan
  Op op = Op::RS;
  int bucket = 0;
};

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

inline double seconds(Clock::time_point t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); }

inline Clock::duration to_duration(double secs) {
  // At most a year: a longer time-out could overflow when it is added to now().
  const double bounded = secs < 0 ? 0 : (secs > 3.15e7 ? 3.15e7 : secs);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

enum class ErrorKind : uint8_t { timeout, peer_lost, aborted, mismatch, usage };

constexpr const char* kind_name(ErrorKind kind) {
  constexpr const char* names[] = {"timeout", "peer_lost", "aborted", "mismatch", "usage"};
  return names[static_cast<int>(kind)];
}

// An error and its place. Channels set kind, peer and text; the engine adds the rest.
struct EngineError : std::runtime_error {
  EngineError(ErrorKind kind, const std::string& text, int peer = -1) : std::runtime_error(text), kind(kind), peer(peer) {}

  ErrorKind kind;
  int peer = -1;
  int rank = -1;
  int bucket = -1;
  int64_t step = -1;
  std::string op;    // "" if no operation was in progress
  std::string name;  // the bucket's
};

}  // namespace commsched
