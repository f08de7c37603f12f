// Runs one plan - a total order of operations on buckets - once per step, on a thread of its own.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "event_log.h"
#include "socket.h"
#include "transport.h"

namespace commsched {

// The state shared by callers and the engine's thread. Both own it: if a transport never returns, the
// thread is left behind by close(), but not its memory.
class EngineCore {
 public:
  EngineCore(std::shared_ptr<Transport> transport, double timeout_seconds, size_t max_events);

  int add_bucket(const BucketSpec& spec);
  void clear_buckets();
  void install(const std::vector<PlanOp>& plan);
  int64_t begin_step();
  void mark_ready(int bucket);
  void mark_updated(int bucket);

  enum class Stage { reduced, gathered };
  // Of the step begun last. The waits fail once nothing has happened for the engine's time-out.
  bool done(int bucket, Stage stage);
  void wait(int bucket, Stage stage);
  void wait_all();

  void fail(EngineError error);
  void stop(const std::string& reason);  // the thread ends as soon as it can; later calls throw the reason
  bool wait_stopped(double seconds);     // false: the thread is still inside the transport
  void let_go() noexcept;                // of the buckets' memory, if the thread has ended
  void run();                            // the thread

  std::optional<EngineError> error() const;
  std::vector<Event> events(bool clear);
  int64_t begun() const;
  Transport& transport() const { return *transport_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Condition = std::function<bool()>;

  // Each field holds the last step in which the bucket reached that state.
  struct Bucket {
    BucketSpec spec;
    int64_t ready = 0, reduced = 0, updated = 0, gathered = 0;
    int64_t awaited = 0;  // the last step in which a caller waited for its last operation, or found it done
    Clock::time_point ready_at{}, reduced_at{}, updated_at{};
    bool in_plan = false, is_reduced = false, is_gathered = false;
    bool is_placed = false;  // Transport::place_residual() has been called

    int64_t reached(Stage stage) const { return stage == Stage::reduced ? reduced : gathered; }
    Stage last() const { return is_gathered ? Stage::gathered : Stage::reduced; }
  };

  // The engine's thread.
  bool run_step(Lock& lock, int64_t step);
  bool run_op(Lock& lock, const OpTag& tag);
  bool may_start(const OpTag& tag) const;
  Clock::time_point could_start_at(const OpTag& tag) const;
  void finish_op(const OpTag& tag, Clock::time_point ready, Clock::time_point start, int64_t sent);

  // Callers.
  const Bucket& checked(int bucket) const;
  Bucket& checked(int bucket) { return const_cast<Bucket&>(std::as_const(*this).checked(bucket)); }
  Bucket& staged(int bucket, Stage stage);
  void throw_if_failed() const;
  void release_buckets(Lock& lock) noexcept;
  void check_idle(const char* what) const;
  void check_plan(const std::vector<PlanOp>& plan) const;
  void wait_until(Lock& lock, const Condition& reached, const std::string& what);
  Deadline patience(Clock::time_point since) const;
  EngineError stuck(const std::string& what) const;
  std::string name(int bucket) const;

  EngineError located(EngineError error, const OpTag& tag) const;

  const std::shared_ptr<Transport> transport_;
  const double timeout_;

  mutable std::mutex mutex_;
  std::condition_variable thread_wakes_;
  std::condition_variable changed_;
  std::vector<Bucket> buckets_;
  std::vector<PlanOp> plan_;
  int64_t begun_ = 0;
  int64_t finished_ = 0;
  int awaited_ = -1;   // the bucket that the thread waits for
  int position_ = 0;   // in the plan, of the thread's current operation
  bool busy_ = false;  // the thread is inside the transport
  Clock::time_point progress_ = Clock::now();
  bool stopping_ = false;
  bool stopped_ = false;
  std::string closed_because_;
  std::optional<EngineError> error_;
  EventLog log_;
};

// All methods may be called from any thread. After a failure, every later mark throws it, and every wait for a bucket that has
// not arrived.
// In a forked child, which has neither the thread nor the connections, every call but close() is an error.
class Engine {
 public:
  explicit Engine(std::shared_ptr<Transport> transport, double timeout_seconds = 300, size_t max_events = 1 << 15);
  ~Engine() { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  EngineCore* operator->();

  void abort(const std::string& reason);

  // Aborts what is in flight, then gives back the thread, the connections and the buckets' memory. Never hangs. Later calls throw
  // the reason; buckets that have arrived stay readable.
  void close(const std::string& reason = "the engine is closed") noexcept;

 private:
  std::shared_ptr<EngineCore> core_;
  const Owned owned_;
  std::mutex closing_;
  std::thread thread_;
};

}  // namespace commsched
