// Channels of messages of several ranks in one process, over sockets, for the sanitizers to watch: messages of all lengths in
// several lanes, from several threads, waited for, watched or dropped, and every way to end. Ends with status 1 at the first
// wrong byte.
#include <atomic>
#include <deque>

#include "engine/message_channel.h"
#include "local_ranks.h"

namespace {

using Random = std::mt19937;
using Owned = std::shared_ptr<std::vector<char>>;
using MessageChannels = std::vector<std::unique_ptr<MessageChannel>>;

constexpr int kLanes = 3, kMessages = 60;
constexpr size_t kLengths[] = {0, 1, 1000, MessageChannel::kShort, MessageChannel::kShort + 1, 3 * MessageChannel::kFrame + 5};

std::atomic<int> arrived = 0, failed = 0;

MessageChannels channels_of(int size) {
  MessageChannels channels;
  for (int rank = 0; auto& row : rows_of_sockets(size))
    channels.push_back(std::make_unique<MessageChannel>(rank++, std::move(row)));
  return channels;
}

char byte_of(int sender, int lane, int number) { return static_cast<char>(1 + sender * 31 + lane * 7 + number); }

// Both ends know the length, and cut the bytes in their own ways; some pieces have no bytes and no address.
size_t length_of(int sender, int receiver, int lane, int number) {
  return kLengths[std::minstd_rand(1 + sender * 1000 + receiver * 100 + lane * 10000 + number)() % std::size(kLengths)];
}

std::vector<MessageChannel::Piece> pieces_of(std::vector<char>& bytes, Random& random) {
  std::vector<MessageChannel::Piece> pieces{{nullptr, 0}};
  for (size_t at = 0; at < bytes.size();) {
    const size_t piece = std::min<size_t>(bytes.size() - at, 1 + random() % (random() % 4 == 0 ? 100 : bytes.size()));
    pieces.push_back({bytes.data() + at, piece});
    if (random() % 3 == 0 || pieces.size() > 200) pieces.push_back({bytes.data(), 0});
    at += piece;
    if (pieces.size() > 300 && at < bytes.size()) {
      pieces.push_back({bytes.data() + at, bytes.size() - at});
      break;
    }
  }
  return pieces;
}

// One lane of one rank: sends to and receives from all others, some messages ahead of the waits.
void run_lane(MessageChannel& channel, int rank, int size, int lane, unsigned seed, bool may_fail) {
  Random random(seed);
  struct Coming {
    MessageChannel::Pending pending;
    Owned bytes;
    char expected;
  };
  std::deque<Coming> coming;
  std::vector<MessageChannel::Pending> leaving;
  const auto take = [&] {
    channel.wait(coming.front().pending);
    for (const char byte : *coming.front().bytes) require(byte == coming.front().expected, "a byte");
    ++arrived;
    coming.pop_front();
  };
  try {
    for (int number = 0; number < kMessages; ++number) {
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        const auto in = std::make_shared<std::vector<char>>(length_of(peer, rank, lane, number));
        const auto out = std::make_shared<std::vector<char>>(length_of(rank, peer, lane, number), byte_of(rank, lane, number));
        const std::string operation = "message " + std::to_string(number);
        const auto traffic = random() % 4 == 0 ? std::optional(Traffic::halo) : std::nullopt;
        MessageChannel::Exchange sends{operation, static_cast<uint32_t>(lane), traffic, {{peer, pieces_of(*out, random)}}, {}, out};
        leaving.push_back(channel.start(std::move(sends)));
        MessageChannel::Exchange receives{operation, static_cast<uint32_t>(lane), {}, {}, {{peer, pieces_of(*in, random)}}, in};
        coming.push_back({channel.start(std::move(receives)), in, byte_of(peer, lane, number)});
        if (random() % 2 == 0) channel.watch(coming.back().pending);
        if (random() % 8 == 0) leaving.pop_back();  // nobody waits for it
      }
      while (coming.size() > random() % 12) take();
    }
    while (!coming.empty()) take();
    for (const auto& pending : leaving) {
      channel.wait(pending);
      require(MessageChannel::done(pending), "that a message is over");
    }
  } catch (const EngineError& error) {
    if (!may_fail) std::fprintf(stderr, "%s\n", error.what());
    require(may_fail, "a message");
    ++failed;
  }
}

void run_lanes(MessageChannels& channels, Random& random, bool may_fail) {
  const int size = static_cast<int>(channels.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    for (int lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back(run_lane, std::ref(*channels[rank]), rank, size, lane, random(), may_fail);
    }
  }
  if (may_fail) {  // one rank ends in the midst of it
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    if (random() % 2 == 0)
      channels[random() % size]->abort("on purpose");
    else
      channels[random() % size]->close();
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  Random random(argc > 2 ? std::atoi(argv[2]) : 1);
  for (int i = 0; i < rounds; ++i) {
    MessageChannels channels = channels_of(2 + i % 2);
    run_lanes(channels, random, false);
    MessageChannels failing = channels_of(2 + i % 2);
    run_lanes(failing, random, true);
  }
  require(arrived > 0 && failed > 0, "that messages arrived, and that some ranks noticed the end of another one");
  std::printf("ok: %d rounds of messages\n", rounds);
  return 0;
}
