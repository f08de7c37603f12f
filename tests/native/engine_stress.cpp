// Runs engines of several ranks in one process, over sockets, for the sanitizers to watch: random plans, marks
// from several threads, polls, delays, and every way to fail. Ends with status 1 at the first wrong number.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <stop_token>
#include <thread>

#include "engine/direct.h"
#include "engine/engine.h"
#include "engine/link_gate.h"
#include "engine/ring.h"
#include "local_ranks.h"

using namespace commsched;
using Stage = EngineCore::Stage;
using Random = std::mt19937;

namespace {

std::atomic<int64_t> sent_by_rows = 0;  // bytes, of all ranks

enum class Kind { direct, ring, tiers };

// A transport for each rank. Without `hosts`, tiers put all ranks on one host.
std::vector<std::shared_ptr<Transport>> make_transports(const Channels& channels, Kind kind, size_t segment,
                                                        std::vector<int> hosts = {}) {
  const int size = static_cast<int>(channels.size());
  hosts.resize(size, 0);
  const HostBoard::Shape shape = TwoTierTransport::board_shape(size, segment, 3);
  const BoardFiles files(kind == Kind::tiers ? size : 0, shape);
  std::vector<std::shared_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    if (kind == Kind::direct) transports.push_back(std::make_shared<DirectTransport>(channels[rank], rank, size, segment, 3));
    if (kind == Kind::ring) transports.push_back(std::make_shared<RingTransport>(channels[rank], rank, size, segment, 2));
    if (kind != Kind::tiers) continue;
    transports.push_back(
        std::make_shared<TwoTierTransport>(channels[rank], rank, hosts, files.board(rank, hosts, shape), segment, 3));
  }
  return transports;
}

// Halos that come and go, which the engines let go first; every so often one that is not ended before its patience is.
void send_halos(const std::stop_token& stop) {
  LinkGate& gate = LinkGate::of_process();
  for (int i = 0; !stop.stop_requested(); ++i) {
    const int64_t number = gate.begin(Traffic::halo, 1, i % 8 == 0 ? 0.0001 : 1.0);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    gate.end(number);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// The memory of a rank's buckets: gradients, and parameters for the buckets that are updated in shards.
struct Buffers {
  std::vector<std::span<float>> gradients;
  std::vector<std::vector<float>> parameters, residuals, ordinary;
  std::vector<std::shared_ptr<void>> shared;

  // In the transport's memory, where it has some, for all buckets or every second one of this rank.
  float* add_gradients(Transport& transport, size_t count) {
    const bool tries = gradients.size() % 2 == 0 || transport.rank() != 1;
    shared.push_back(tries ? transport.take(count * sizeof(float)) : nullptr);
    float* memory = static_cast<float*>(shared.back().get());
    if (memory == nullptr) memory = ordinary.emplace_back(count).data();
    return gradients.emplace_back(memory, count).data();
  }
};

struct Job {
  int size;
  std::vector<int> hosts;           // of each rank
  std::vector<BucketSpec> buckets;  // without memory
  std::vector<PlanOp> plan;
};

BucketSpec make_bucket(size_t count, size_t row = 0) {
  BucketSpec bucket;
  bucket.count = count;
  bucket.row = row;
  return bucket;
}

// Hosts of the ranks, numbered without gaps.
std::vector<int> random_hosts(Random& random, int size) {
  std::vector<int> hosts(size);
  const int number = std::uniform_int_distribution<int>(1, size)(random);
  for (int rank = 0; rank < size; ++rank) {
    hosts[rank] = rank < number ? rank : std::uniform_int_distribution<int>(0, number - 1)(random);
  }
  std::shuffle(hosts.begin(), hosts.end(), random);
  return hosts;
}

Job random_job(Random& random, Kind kind) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  Job job{pick(1, 4), {}, {}, {}};
  job.hosts = random_hosts(random, job.size);
  const int buckets = pick(1, 5);
  for (int b = 0; b < buckets; ++b) {
    // Rows of up to two segments, whose number need not divide by the number of ranks; the ring sends none.
    const size_t row = kind != Kind::ring && pick(0, 1) == 0 ? pick(1, 100) : 0;
    BucketSpec bucket = make_bucket(row > 0 ? row * pick(0, 60) : static_cast<size_t>(job.size) * pick(0, 700), row);
    if (row == 0) {
      for (int r = 0; b % 2 == 1 && r < job.size; ++r) bucket.ends.push_back(pick(0, static_cast<int>(bucket.count)));
      std::sort(bucket.ends.begin(), bucket.ends.end());
      if (!bucket.ends.empty()) bucket.ends.back() = bucket.count;
      bucket.needs_update = pick(0, 2) == 0;
    }
    if (b % 2 == 1) bucket.wire_dtype = DType::bf16;
    if (b % 2 == 1 && row == 0 && kind != Kind::ring && pick(0, 1) == 0)
      bucket.wire_dtype = pick(0, 1) == 0 ? DType::qi8 : DType::qf8;
    job.plan.push_back({!bucket.needs_update && pick(0, 3) == 0 ? Op::AR : Op::RS, b});
    job.buckets.push_back(std::move(bucket));
  }
  std::shuffle(job.plan.begin(), job.plan.end(), random);
  for (int b = 0; b < buckets; ++b) {
    const auto reduce = std::find_if(job.plan.begin(), job.plan.end(), [&](const PlanOp& op) { return op.bucket == b; });
    if (reduce->op == Op::AR) continue;
    const int at = static_cast<int>(reduce - job.plan.begin());
    job.plan.insert(job.plan.begin() + pick(at + 1, static_cast<int>(job.plan.size())), {Op::AG, b});
  }
  return job;
}

void describe_buckets(Engine& engine, const Job& job, Buffers& buffers) {
  for (BucketSpec bucket : job.buckets) {
    bucket.name = "b" + std::to_string(buffers.gradients.size());
    bucket.reduce_ptr = buffers.add_gradients(engine->transport(), bucket.count);
    float* const parameters = buffers.parameters.emplace_back(bucket.count).data();
    bucket.gather_ptr = bucket.needs_update ? parameters : bucket.reduce_ptr;
    if (in_blocks(bucket.wire_dtype)) {
      bucket.sent_residual = buffers.residuals.emplace_back(bucket.count).data();
      bucket.sum_residual = buffers.residuals.emplace_back(bucket.count).data();  // of any part
    }
    engine->add_bucket(bucket);
  }
}

// Exact in bfloat16, and so are the sums. Every step touches other rows: some on all ranks, some on a few, some on none.
float gradient(const BucketSpec& bucket, int rank, int step, size_t i) {
  // A block is exact if it holds one magnitude, and its scale is exact if that is a multiple of both 127 and 7 (448 / 64).
  if (in_blocks(bucket.wire_dtype)) return static_cast<float>(static_cast<int>((i + step) % 3) - 1) * (127 * 7);
  const size_t row = i / (bucket.row > 0 ? bucket.row : 16) + step;
  return row % 5 == 0 || (row % 5 < 4 && (row + rank) % 3 == 0) ? 0 : static_cast<float>((i % 7) + rank + 1);
}

void check(const Job& job, const BucketSpec& bucket, int step, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    float expected = 0;
    for (int rank = 0; rank < job.size; ++rank) expected += gradient(bucket, rank, step, i);
    require(values[i] == expected, bucket.row > 0 ? "a sum of rows" : "a sum");
  }
}

void compute(Engine& engine, const Job& job, Buffers& buffers, int rank, int step) {
  try {
    for (size_t b = job.buckets.size(); b-- > 0;) {
      for (size_t i = 0; i < job.buckets[b].count; ++i) buffers.gradients[b][i] = gradient(job.buckets[b], rank, step, i);
      engine->mark_ready(static_cast<int>(b));
    }
  } catch (const EngineError&) {  // the waits of the other thread throw it too
  }
}

// Gradients come from one thread, as the backward's do; the caller's thread updates shards and waits.
void train(Engine& engine, const Job& job, Buffers& buffers, int rank, int steps) {
  for (int step = 1; step <= steps; ++step) {
    engine->begin_step();
    const std::jthread backward([&] { compute(engine, job, buffers, rank, step); });
    for (const PlanOp& op : job.plan) {  // in its order: an AG may stand before a later RS
      const BucketSpec& bucket = job.buckets[op.bucket];
      if (op.op != Op::RS || !bucket.needs_update) continue;
      engine->wait(op.bucket, Stage::reduced);
      for (size_t i = bucket.part_begin(rank, job.size); i < bucket.part_end(rank, job.size); ++i) {
        buffers.parameters[op.bucket][i] = buffers.gradients[op.bucket][i];
      }
      engine->mark_updated(op.bucket);
    }
    for (size_t b = 0; b < job.buckets.size(); ++b) {
      while (b % 2 == 0 && !engine->done(static_cast<int>(b), Stage::gathered)) std::this_thread::yield();
      engine->wait(static_cast<int>(b), Stage::gathered);
      check(job, job.buckets[b], step, job.buckets[b].needs_update ? std::span(buffers.parameters[b]) : buffers.gradients[b]);
    }
  }
  engine->wait_all();
}

void run_random_job(Random& random, const std::function<Channels(int, unsigned)>& make_channels, Kind kind) {
  const Job job = random_job(random, kind);
  // A segment holds one quantised block, in two tiers in float32.
  const auto is_in_blocks = [](const BucketSpec& bucket) { return in_blocks(bucket.wire_dtype); };
  const bool any = kind == Kind::tiers && std::any_of(job.buckets.begin(), job.buckets.end(), is_in_blocks);
  const auto transports = make_transports(make_channels(job.size, random()), kind, any ? 1024 : 264, job.hosts);
  on_ranks(job.size, [&](int rank) {
    Buffers buffers;
    Engine engine(transports[rank], 30);
    describe_buckets(engine, job, buffers);
    engine->install(job.plan);
    train(engine, job, buffers, rank, 4);
    require(engine->events(true).size() == 4 * job.plan.size(), "the number of events");
  });
}

// Parts of gradients are summed first; then the rows that are more than their part, on any rank, are summed anew.
void correct_rows(Engine& engine, int rank, int size, size_t rows, size_t row) {
  std::vector<float> sums(rows * row), whole(rows * row);
  std::vector<int32_t> changed(1 + rows);
  BucketSpec part = make_bucket(sums.size()), rest = make_bucket(whole.size(), row);
  part.ends.assign(size, sums.size());
  part.reduce_ptr = part.gather_ptr = rest.gather_ptr = sums.data();
  rest.reduce_ptr = whole.data();
  rest.changed = changed.data();
  engine->add_bucket(part);
  engine->add_bucket(rest);
  engine->install({{Op::RS, 0}, {Op::AG, 0}, {Op::RS, 1}, {Op::AG, 1}});
  for (int step = 1; step <= 4; ++step) {
    engine->begin_step();
    std::fill(sums.begin(), sums.end(), 1.0f);
    engine->mark_ready(0);
    const std::jthread backward([&] {
      for (size_t i = 0; i < whole.size(); ++i) whole[i] = 1 + gradient(rest, rank, step, i);
      const std::vector<float> ones(whole.size(), 1.0f);
      changed[0] = static_cast<int32_t>(find_changed(ones.data(), whole.data(), rows, row, changed.data() + 1));
      engine->mark_ready(1);
    });
    for (int bucket = 0; bucket < 2; ++bucket) engine->wait(bucket, Stage::gathered);
    for (size_t i = 0; i < sums.size(); ++i) {
      float expected = static_cast<float>(size);
      for (int r = 0; r < size; ++r) expected += gradient(rest, r, step, i);
      require(sums[i] == expected, "a corrected sum");
    }
  }
  engine->wait_all();
}

void run_corrections(Random& random, const std::function<Channels(int, unsigned)>& make_channels) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const int size = pick(2, 4);
  const size_t rows = pick(1, 40), row = pick(1, 100);
  const Kind kind = pick(0, 1) == 0 ? Kind::direct : Kind::tiers;
  const auto transports = make_transports(make_channels(size, random()), kind, 256, random_hosts(random, size));
  on_ranks(size, [&](int rank) {
    Engine engine(transports[rank], 30);
    correct_rows(engine, rank, size, rows, row);
  });
}

// Threads that wait for a bucket may wake up only after the buckets were replaced: they used to read the freed ones.
void run_waits_while_buckets_are_replaced() {
  constexpr int kWaiters = 16;
  const Job before{1, {0}, {make_bucket(100)}, {{Op::RS, 0}, {Op::AG, 0}}};
  const Job after{1, {0}, {make_bucket(100), make_bucket(100), make_bucket(100)}, {{Op::RS, 2}, {Op::AG, 2}}};
  Buffers first, second;
  Engine engine(make_transports(over_sockets(1, 1), Kind::direct, 256)[0], 30);
  describe_buckets(engine, before, first);
  engine->install(before.plan);
  engine->begin_step();
  std::atomic<int> waiting = 0;
  std::vector<std::jthread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&] {
      ++waiting;
      try {
        engine->wait(0, Stage::gathered);
      } catch (const EngineError&) {  // it came too late: there is no such bucket for a moment
      }
    });
  }
  while (waiting < kWaiters) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  engine->mark_ready(0);
  engine->wait_all();
  engine->clear_buckets();
  describe_buckets(engine, after, second);  // more than before, so that the old ones' memory is given back
  engine->install(after.plan);
}

// One rank stops after `healthy` steps, in one of several ways; the others must end with an error, and soon.
enum class Fault { close, abort, vanish };

void run_failing_job(const std::function<Channels(int, unsigned)>& make_channels, Fault fault, Kind kind) {
  constexpr int kSize = 3, kBad = 1;
  const Job job{kSize,
                {0, 0, 1},
                {make_bucket(3000), make_bucket(600, kind == Kind::ring ? 0 : 24)},
                {{Op::RS, 0}, {Op::RS, 1}, {Op::AG, 0}, {Op::AG, 1}}};
  const auto transports = make_transports(make_channels(kSize, 1), kind, 256, job.hosts);
  on_ranks(kSize, [&](int rank) {
    Buffers buffers;
    Engine engine(transports[rank], rank == kBad ? 20 : 4);
    describe_buckets(engine, job, buffers);
    engine->install(job.plan);
    if (rank == kBad) {
      train(engine, job, buffers, rank, 2);
      sent_by_rows += engine->transport().row_bytes();
      if (fault == Fault::abort) engine.abort("on purpose");
      if (fault == Fault::close) engine.close();
      return;  // whatever it was, the engine ends here while the others are in their next step
    }
    bool failed = false;
    try {
      train(engine, job, buffers, rank, 3);
    } catch (const EngineError& error) {
      failed = !std::string(error.what()).empty();
    }
    require(failed && engine->error().has_value(), "a rank went on without another one");
  });
}

// Rank 0 is closed by two threads while others wait for it and one is in an operation of its own; then rank 1 is.
void run_closing(Kind kind) {
  const Job job{2, {0, 0}, {make_bucket(3000)}, {{Op::RS, 0}, {Op::AG, 0}}};
  const auto transports = make_transports(over_sockets(2, 1), kind, 256);
  std::vector<Buffers> buffers(2);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int rank = 0; rank < 2; ++rank) {
    engines.push_back(std::make_unique<Engine>(transports[rank], 30));
    describe_buckets(*engines[rank], job, buffers[rank]);
    (*engines[rank])->install(job.plan);
  }
  std::atomic<int> ended = 0;
  const auto expect_an_end = [&](const std::function<void()>& call) {
    try {
      call();
    } catch (const EngineError&) {
      ++ended;
    }
  };
  (*engines[0])->begin_step();
  (*engines[0])->mark_ready(0);
  {
    std::vector<std::jthread> waiters;
    for (const Stage stage : {Stage::reduced, Stage::gathered}) {
      waiters.emplace_back([&, stage] { expect_an_end([&] { (*engines[0])->wait(0, stage); }); });
    }
    waiters.emplace_back([&] {
      std::vector<float> values(3000);
      BucketSpec bucket = make_bucket(values.size());
      bucket.reduce_ptr = bucket.gather_ptr = values.data();
      expect_an_end([&] {
        const Transport::Use use(*transports[1]);
        transports[1]->all_gather(bucket, {7, 0, Op::AG, 0});  // not what rank 0 does
      });
    });
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    for (int i = 0; i < 2; ++i) waiters.emplace_back([&] { engines[0]->close("on purpose"); });
  }
  engines[1]->close("on purpose");
  require(ended == 3, "that all waits end");
  expect_an_end([&] { (*engines[0])->wait_all(); });
  expect_an_end([&] { const Transport::Use use(*transports[0]); });
  require(ended == 5, "that a closed engine and its transport refuse work");
}

}  // namespace

int main(int argc, char** argv) {
  constexpr Kind kKinds[] = {Kind::direct, Kind::ring, Kind::tiers};
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  Random random(argc > 2 ? std::atoi(argv[2]) : 1);
  LinkGate::of_process().record(true);
  for (int i = 0; i < rounds; ++i) {
    const std::jthread halos = i % 4 < 2 ? std::jthread(send_halos) : std::jthread();
    run_random_job(random, over_slow_sockets, kKinds[i % 3]);
    run_random_job(random, over_sockets, kKinds[i % 3]);
    run_corrections(random, i % 2 == 1 ? over_slow_sockets : over_sockets);
  }
  for (const Kind kind : kKinds) {
    const std::jthread halos(send_halos);
    for (Fault fault : {Fault::close, Fault::abort, Fault::vanish}) {
      run_failing_job(over_sockets, fault, kind);
      run_failing_job(over_slow_sockets, fault, kind);
    }
  }
  require(sent_by_rows > 0, "that any rows travelled");
  for (int i = 0; i < 10 * rounds; ++i) run_closing(kKinds[i % 3]);
  for (int i = 0; i < 10 * rounds; ++i) run_waits_while_buckets_are_replaced();
  require(!LinkGate::of_process().passages(true).empty(), "that anything passed the gate");
  std::printf("ok: %d rounds\n", rounds);
  return 0;
}
