#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "lib/comm/communicator.h"
#include "test/support/catch.h"
#include "test/support/ranks.h"

namespace rebind::comm {
namespace {

using namespace std::chrono_literals;
using test::run_ranks;
using Clock = std::chrono::steady_clock;
using Words = std::vector<std::vector<uint64_t>>;

Identity unit(uint32_t index, uint64_t epoch = 0) {
  return {.unit = index, .epoch = epoch, .name = "unit 'block." + std::to_string(index) + "'"};
}

int64_t ms_since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

bool starts_with(const std::string& text, const std::string& beginning) { return text.rfind(beginning, 0) == 0; }
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("comm: all_gather fills every part on every rank", "[comm]") {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](int rank, auto group) {
      Communicator comm(group, 0, 5s);
      EXPECT_EQ(comm.rank(), rank);
      EXPECT_EQ(comm.world_size(), world_size);
      // rank r's part: 100 * r + 1, 100 * r + 2, 100 * r + 3
      std::vector<double> parts(3 * world_size, -1.0);
      for (int i = 0; i < 3; ++i) parts[3 * rank + i] = 100 * rank + i + 1;
      EXPECT_OK(comm.all_gather(unit(0), parts.data(), 3 * sizeof(double)));
      const std::vector<double> all{1, 2, 3, 101, 102, 103, 201, 202, 203, 301, 302, 303};
      EXPECT_EQ(parts, std::vector<double>(all.begin(), all.begin() + 3 * world_size));
      EXPECT_EQ(comm.position(), 1u);
    });
  }
}

TEST_CASE("comm: large parts arrive whole", "[comm]") {
  run_ranks(3, [](int rank, auto group) {
    Communicator comm(group, 0, 20s);
    const int64_t numel = 3'000'001;  // 12 MB, more than a socket buffer holds
    std::vector<int32_t> parts(3 * numel, -1);
    for (int64_t i = 0; i < numel; ++i) parts[rank * numel + i] = static_cast<int32_t>(1'000'000'000 * rank + i);
    EXPECT_OK(comm.all_gather(unit(0), parts.data(), numel * 4));
    for (int r = 0; r < 2; ++r) {  // 2 * 10^9 does not fit
      for (int64_t i = 0; i < numel; ++i) EXPECT(parts[r * numel + i] == 1'000'000'000 * r + i);
    }
  });
}

TEST_CASE("comm: reduce_scatter adds in rank order, to the bit", "[comm]") {
  // In fp32 1e8 + 1 is 1e8, so the order shows: ((1e8 + 1) + -1e8) = 0, (1e8 + -1e8) + 1 = 1, and so on.
  const std::vector<std::array<float, 3>> by_rank{
      {1e8f, 1e8f, 1.0f}, {1.0f, -1e8f, 1e8f}, {-1e8f, 1.0f, -1e8f}, {0.5f, 0.25f, 2.0f}};
  const std::vector<std::vector<float>> sums{{}, {1e8f, 1e8f, 1.0f}, {1e8f, 0.0f, 1e8f}, {0.0f, 1.0f, 0.0f}, {0.5f, 1.25f, 2.0f}};
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](int rank, auto group) {
      Communicator comm(group, 0, 5s);
      std::vector<float> buffer;  // the same for every part, so that each rank must get the same sum
      for (int part = 0; part < world_size; ++part) buffer.insert(buffer.end(), by_rank[rank].begin(), by_rank[rank].end());
      std::vector<float> out(3, -1.0f);
      const uint64_t word = 7 + rank;
      const auto words = comm.reduce_scatter(unit(0), buffer.data(), out.data(), 3, c10::kFloat, {&word, 1});
      EXPECT_OK(words);
      EXPECT_EQ(out, sums[world_size]);
      EXPECT_EQ(words->size(), static_cast<size_t>(world_size));
      for (int r = 0; r < world_size; ++r) EXPECT_EQ((*words)[r], std::vector<uint64_t>{uint64_t(7 + r)});
    });
  }
}

TEST_CASE("comm: reduce_scatter gives each rank its own part, in fp64 too", "[comm]") {
  run_ranks(3, [](int rank, auto group) {
    Communicator comm(group, 0, 5s);
    // part p of rank r: 10^p * (r + 1) over 5000 elements, more than a block of the sum
    for (const int64_t numel : {1, 5000}) {
      std::vector<double> buffer, out(numel, -1.0);
      for (const double part : {1.0, 10.0, 100.0}) buffer.insert(buffer.end(), numel, part * (rank + 1));
      EXPECT_OK(comm.reduce_scatter(unit(0), buffer.data(), out.data(), numel, c10::kDouble, {}));
      const double expected[] = {6.0, 60.0, 600.0};
      EXPECT_EQ(out, std::vector<double>(numel, expected[rank]));
    }
  });
}

TEST_CASE("comm: reduce_scatter refuses other element types by name", "[comm]") {
  run_ranks(2, [](int rank, auto group) {
    Communicator comm(group, 0, 5s);
    std::array<int16_t, 2> buffer{}, out{};
    const auto result = comm.reduce_scatter(unit(3), buffer.data(), out.data(), 1, c10::kBFloat16, {});
    EXPECT_EQ(result.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(std::string(result.status().message()),
              "reduce_scatter for unit 'block.3', rank " + std::to_string(rank) + ": sums of BFloat16. Use float32 or float64.");
    EXPECT_OK(comm.broken());
  });
}

TEST_CASE("comm: exchange gives everyone's words, few and many", "[comm]") {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](int rank, auto group) {
      Communicator comm(group, 0, 5s);
      for (const size_t count : {0, 1, 16, 17, 1000}) {
        std::vector<uint64_t> own(count);
        for (size_t i = 0; i < count; ++i) own[i] = rank * 10'000 + i;
        const auto words = comm.exchange(unit(0), own);
        EXPECT_OK(words);
        EXPECT_EQ(words->size(), static_cast<size_t>(world_size));
        for (int r = 0; r < world_size; ++r) {
          EXPECT_EQ((*words)[r].size(), count);
          for (size_t i = 0; i < count; ++i) EXPECT_EQ((*words)[r][i], r * 10'000 + i);
        }
      }
      EXPECT_EQ(comm.position(), 5u);
    });
  }
}

TEST_CASE("comm: broadcast gives rank 0's bytes to all", "[comm]") {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(world_size, [&](int rank, auto group) {
      Communicator comm(group, 0, 5s);
      std::vector<uint8_t> bytes{uint8_t(rank), 2, uint8_t(rank + 3)};
      EXPECT_OK(comm.broadcast(unit(0), bytes.data(), 3));
      EXPECT_EQ(bytes, std::vector<uint8_t>({0, 2, 3}));
    });
  }
}

TEST_CASE("comm: empty parts are fine", "[comm]") {
  for (const int world_size : {1, 3}) {
    run_ranks(world_size, [&](int, auto group) {
      Communicator comm(group, 0, 5s);
      EXPECT_OK(comm.all_gather(unit(0), nullptr, 0));
      const uint64_t word = 5;
      const auto words = comm.reduce_scatter(unit(0), nullptr, nullptr, 0, c10::kFloat, {&word, 1});
      EXPECT_OK(words);
      EXPECT_EQ(*words, Words(world_size, {5}));
      EXPECT_OK(comm.broadcast(unit(0), nullptr, 0));
      EXPECT_EQ(comm.position(), 3u);
    });
  }
}

TEST_CASE("comm: channels on one group do not meet, each used by a thread of its own", "[comm]") {
  run_ranks(2, [](int rank, auto group) {
    const auto rounds = [&](int channel) {
      Communicator comm(group, channel, 5s);
      for (int round = 0; round < 50; ++round) {
        std::array<int, 2> parts{-1, -1};
        parts[rank] = 1000 * channel + 100 * rank + round;
        EXPECT_OK(comm.all_gather(unit(0), parts.data(), sizeof(int)));
        EXPECT_EQ(parts, (std::array<int, 2>{1000 * channel + round, 1000 * channel + 100 + round}));
      }
    };
    auto other = std::async(std::launch::async, [&] { rounds(1); });
    rounds(Communicator::kChannels - 1);
    other.get();
  });
}

TEST_CASE("comm: a user's own sends and collectives on the group are left alone", "[comm]") {
  run_ranks(2, [](int rank, auto group) {
    Communicator comm(group, 0, 5s);
    std::array<int, 2> ours{-1, -1};
    ours[rank] = rank;
    std::vector<at::Tensor> theirs{at::full({1}, rank + 1.0f)}, message{at::full({1}, 5.0f)};
    auto sum = group->allreduce(theirs);
    auto work = rank == 0 ? group->send(message, 1, /*tag=*/0) : group->recv(message, 0, /*tag=*/0);
    EXPECT_OK(comm.all_gather(unit(0), ours.data(), sizeof(int)));
    work->wait();
    sum->wait();
    EXPECT_EQ(theirs[0].item<float>(), 3.0f);
    EXPECT_EQ(ours, (std::array<int, 2>{0, 1}));
  });
}

struct Mismatch {
  const char* what;
  int64_t bytes;      // rank 1's part
  uint32_t unit;      // rank 1's
  uint64_t epoch;     // rank 1's
  const char* rank1;  // in the message
};

TEST_CASE("comm: ranks in different collectives get the same error and no data", "[comm]") {
  const Mismatch cases[] = {
      {"unit", 8, 4, 5, "all_gather for unit 'block.4' (collective 1, unit index 4, epoch 5, 8 bytes a part)"},
      {"epoch", 8, 3, 6, "all_gather for unit 'block.3' (collective 1, unit index 3, epoch 6, 8 bytes a part)"},
      {"bytes", 16, 3, 5, "all_gather for unit 'block.3' (collective 1, unit index 3, epoch 5, 16 bytes a part)"},
  };
  for (const Mismatch& wrong : cases) {
    INFO(wrong.what);
    run_ranks(3, [&](int rank, auto group) {
      Communicator comm(group, 0, 10s);
      EXPECT_OK(comm.exchange(unit(0), {}));
      const bool odd = rank == 1;
      const int64_t bytes = odd ? wrong.bytes : 8;
      std::vector<char> buffer(3 * bytes, 'x');
      const auto begin = Clock::now();
      const absl::Status status = comm.all_gather(unit(odd ? wrong.unit : 3, odd ? wrong.epoch : 5), buffer.data(), bytes);
      EXPECT(ms_since(begin) < 1000);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_EQ(
          std::string(status.message()),
          "all_gather for unit 'block." + std::to_string(odd ? wrong.unit : 3) + "', rank " + std::to_string(rank) +
              ": the ranks are in different collectives: rank 0 in all_gather for unit 'block.3' (collective 1, unit index 3, "
              "epoch 5, 8 bytes a part), rank 1 in " +
              wrong.rank1 +
              ". Nothing was exchanged. All ranks must run the same model code in the same order and number of steps.");
      EXPECT_EQ(buffer, std::vector<char>(3 * bytes, 'x'));
      // Broken stays broken, without a message to anybody.
      EXPECT_EQ(comm.exchange(unit(0), {}).status(), status);
      EXPECT_EQ(comm.broken(), status);
      EXPECT_EQ(comm.position(), 3u);  // the last one was posted, and failed at once
    });
  }
}

TEST_CASE("comm: different kinds, element types or numbers of words are different collectives", "[comm]") {
  run_ranks(2, [](int rank, auto group) {
    std::array<double, 2> buffer{}, out{7.0, 7.0};
    const uint64_t words[2] = {1, 2};
    Communicator kind(group, 0, 10s), type(group, 1, 10s), count(group, 2, 10s);
    const absl::Status by_kind = rank == 0 ? kind.all_gather(unit(1), buffer.data(), 8)
                                           : kind.reduce_scatter(unit(1), buffer.data(), out.data(), 1, c10::kDouble, {}).status();
    EXPECT_EQ(by_kind.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT(contains(std::string(by_kind.message()),
                    "rank 0 in all_gather for unit 'block.1' (collective 0, unit index 1, epoch 0, 8 bytes a part), rank 1 in "
                    "reduce_scatter for unit 'block.1' (collective 0, unit index 1, epoch 0, 8 bytes a part of Double)"));
    Communicator sender(group, 3, 10s);
    const absl::Status by_sender =
        rank == 0 ? sender.all_gather(unit(1), buffer.data(), 8) : sender.broadcast(unit(1), buffer.data(), 8);
    EXPECT_EQ(by_sender.code(), absl::StatusCode::kFailedPrecondition);
    const absl::Status by_type = (rank == 0 ? type.reduce_scatter(unit(1), buffer.data(), out.data(), 2, c10::kFloat, {})
                                            : type.reduce_scatter(unit(1), buffer.data(), out.data(), 1, c10::kDouble, {}))
                                     .status();
    EXPECT_EQ(by_type.code(), absl::StatusCode::kFailedPrecondition);
    const absl::Status by_count = count.exchange(unit(1), {words, rank == 0 ? size_t{1} : size_t{2}}).status();
    EXPECT_EQ(by_count.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT(contains(std::string(by_count.message()), "0 bytes a part, 1 words), rank 1 in "));
    EXPECT_EQ(out, (std::array<double, 2>{7.0, 7.0}));
  });
}

TEST_CASE("comm: a missing rank is named when the time is up, and broken stays broken", "[comm]") {
  run_ranks(4, [](int rank, auto group) {
    Communicator comm(group, 0, 1000ms);
    if (rank == 1 || rank == 3) {
      std::this_thread::sleep_for(2500ms);
      return;
    }
    std::array<int, 4> parts{};
    const auto begin = Clock::now();
    const absl::Status status = comm.all_gather(unit(3), parts.data(), sizeof(int));
    const int64_t waited = ms_since(begin);
    EXPECT(waited >= 1000 && waited < 2000);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    const std::string text(status.message());
    EXPECT(starts_with(text, "all_gather for unit 'block.3', rank " + std::to_string(rank) +
                                 ": no answer from ranks 1, 3 within 1000 ms (waited 1"));
    EXPECT(contains(text,
                    "collective 0). That rank has ended, is stuck, or did not come to this point; its output comes first. If it is "
                    "only slow, raise collective_timeout."));
    EXPECT(comm.waited_seconds() >= 1.0 && comm.waited_seconds() < 2.0);
    const auto again = Clock::now();
    EXPECT_EQ(comm.all_gather(unit(3), parts.data(), sizeof(int)), status);
    EXPECT(ms_since(again) < 100);
  });
}

TEST_CASE("comm: a rank that has gone is named at once, though another is late", "[comm]") {
  run_ranks(3, [](int rank, auto group) {
    Communicator comm(group, 0, 20s);
    EXPECT_OK(comm.exchange(unit(0), {}));
    if (rank == 1) return;  // its group ends with it
    if (rank == 2) std::this_thread::sleep_for(2s);
    std::array<int, 3> parts{};
    const auto begin = Clock::now();
    const absl::Status status = comm.all_gather(unit(3), parts.data(), sizeof(int));
    EXPECT(ms_since(begin) < 1500);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT(starts_with(std::string(status.message()), "all_gather for unit 'block.3', rank " + std::to_string(rank) +
                                                          ": the connection to rank 1 is closed (after "));
    std::this_thread::sleep_for(rank == 0 ? 2500ms : 0ms);  // what rank 0 sent must reach rank 2, which would else name rank 0
  });
}

TEST_CASE("comm: a group without a CPU backend, or a channel out of range, is an error of the first call", "[comm]") {
  run_ranks(2, [](int, auto group) {
    Communicator channel(group, Communicator::kChannels, 5s);
    EXPECT_EQ(channel.exchange(unit(0), {}).status().code(), absl::StatusCode::kInvalidArgument);
    Communicator bare(c10::make_intrusive<c10d::ProcessGroup>(group->getStore(), group->getRank(), 2), 0, 5s);
    EXPECT_EQ(bare.all_gather(unit(0), nullptr, 0).code(), absl::StatusCode::kFailedPrecondition);
  });
}

}  // namespace
}  // namespace rebind::comm
