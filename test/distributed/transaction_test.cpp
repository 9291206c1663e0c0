// A16: prepare_fsdp in which one operation fails, for every operation, on every rank.
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "lib/comm/communicator.h"
#include "test/distributed/heap_failures.h"
#include "test/support/allocations.h"
#include "test/support/catch.h"
#include "test/support/ranks.h"
#include "test/support/transaction.h"

namespace rebind::test {
namespace {

using namespace std::chrono_literals;

TEST_CASE("A16: the subject of these tests can be prepared", "[cases][transaction]") {
  for (int world_size : {1, 2, 3}) {
    const Attempt attempt = try_prepare(world_size, {});
    INFO(shown(attempt));
    CHECK(all_ok(attempt));
    CHECK(attempt.problem.empty());
  }
}

TEST_CASE("A16: a tensor that cannot be allocated, on any rank, is the same error on all, at once, and changes nothing",
          "[cases][transaction]") {
  for (int world_size : {1, 2, 3}) {
    for (int failing = 0; failing < world_size; ++failing) {
      bool came = true;
      int number = 1;
      for (; came && number < 100; ++number) {
        Allocations counted;
        const auto arm = [&](int rank) {
          if (rank == failing) counted.fail_at(number);
        };
        // Counted are the allocations of the failing rank's own thread, in the call alone.
        std::unique_ptr<CountHere> here;
        const Attempt attempt = try_prepare(world_size, {.arm =
                                                             [&](int rank) {
                                                               if (rank == failing) here = std::make_unique<CountHere>(counted);
                                                               arm(rank);
                                                             },
                                                         .disarm =
                                                             [&](int rank) {
                                                               if (rank == failing) here.reset();
                                                             }});
        came = !counted.failure_pending();
        CAPTURE(world_size, failing, number);
        INFO(shown(attempt));
        CHECK(attempt.problem.empty());
        CHECK(attempt.seconds < 5);  // far from the time-out of 20 s: nobody waits for who has failed
        if (came) {
          CHECK(all_failed_alike(attempt));
          CHECK_THAT(attempt.statuses[0].ToString(),
                     Catch::Contains("RESOURCE_EXHAUSTED: prepare_fsdp") && Catch::Contains("out of memory. Nothing was changed"));
        } else {
          CHECK(all_ok(attempt));
        }
      }
      CHECK(number > 5);
    }
  }
}

// What set_fault_for_tests was given goes with the scope.
class FaultScope {
 public:
  explicit FaultScope(comm::Communicator::Fault fault) { comm::Communicator::set_fault_for_tests(std::move(fault)); }
  ~FaultScope() { comm::Communicator::set_fault_for_tests(nullptr); }
};

// Prepares while the number-th collective of one rank fails; 0: none does. `*collectives`: how many that rank came to.
Attempt with_collective_failure(int world_size, int failing, int number, std::chrono::milliseconds timeout,
                                int* collectives = nullptr) {
  std::atomic<int> count = 0;
  const FaultScope scope([&](int rank, const comm::Identity& identity, uint64_t) -> absl::Status {
    if (rank != failing || ++count != number) return absl::OkStatus();
    return absl::UnavailableError("prepare_fsdp, rank " + std::to_string(failing) + ": the network is down in " + identity.name);
  });
  const Attempt attempt = try_prepare(world_size, {.timeout = timeout});
  if (collectives != nullptr) *collectives = count;
  return attempt;
}

TEST_CASE("A16: a collective that fails, on any rank, is the same error on all, and changes nothing", "[cases][transaction]") {
  for (int world_size : {1, 2, 3}) {
    for (int failing = 0; failing < world_size; ++failing) {
      int collectives = 0;
      const Attempt whole = with_collective_failure(world_size, failing, 0, 20s, &collectives);
      INFO(shown(whole));
      CHECK(all_ok(whole));
      // Three parameters, a gradient, two moments of two parameters, a buffer; the end of staging. Alone only that.
      CHECK(collectives == (world_size == 1 ? 1 : 10));
      for (int number = 1; number <= collectives; ++number) {
        const Attempt attempt = with_collective_failure(world_size, failing, number, 400ms);
        CAPTURE(world_size, failing, number);
        INFO(shown(attempt));
        CHECK(attempt.problem.empty());
        CHECK(all_failed_alike(attempt));
        CHECK(attempt.seconds < 3);
      }
    }
  }
}

TEST_CASE("A16: once all is staged, memory that is not there is an error before the decision, and is not needed after it",
          "[cases][transaction]") {
  // Alone, so that the whole call is on one thread. LibTorch and Abseil are not made for an operator new that fails, and what comes
  // before is theirs for the most part; what comes here is ours.
  int64_t left = 0;
  int number = 1;
  for (; left == 0 && number < 100; ++number) {
    const FaultScope scope([&](int, const comm::Identity& identity, uint64_t) {
      if (identity.name == "the end of staging") fail_heap_at(number);
      return absl::OkStatus();
    });
    const Attempt attempt = try_prepare(1, {.disarm = [&](int) { left = fail_heap_at(0); }});
    CAPTURE(number);
    INFO(shown(attempt));
    CHECK(attempt.problem.empty());
    CHECK(all_ok(attempt) == (left != 0));
  }
  CHECK(number > 2);
}

// A rank's view of the store, in which one operation fails.
class FaultyStore final : public c10d::PrefixStore {
 public:
  enum Mode { kNotDone, kDoneWithoutAnswer, kDead };
  FaultyStore(c10::intrusive_ptr<c10d::Store> store, Mode mode) : PrefixStore("faulty", std::move(store)), mode_(mode) {}

  void fail_at(int64_t number) { until_failure_ = number; }
  bool failure_pending() const { return until_failure_ > 0; }

  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    operate([&] { PrefixStore::set(key, value); });
  }
  std::vector<uint8_t> get(const std::string& key) override {
    return operate([&] { return PrefixStore::get(key); });
  }
  int64_t add(const std::string& key, int64_t value) override {
    return operate([&] { return PrefixStore::add(key, value); });
  }
  bool check(const std::vector<std::string>& keys) override {
    return operate([&] { return PrefixStore::check(keys); });
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    operate([&] { PrefixStore::wait(keys, timeout); });
  }

 private:
  // Calls off the failure when it is destroyed after it threw.
  template <class Operation>
  auto operate(Operation operation) -> decltype(operation()) {
    if (dead_) throw std::runtime_error("the connection is lost");
    const bool fails = until_failure_ > 0 && --until_failure_ == 0;
    if (fails && mode_ == kDead) dead_ = true;
    if (fails && mode_ != kDoneWithoutAnswer) throw std::runtime_error("the connection is lost");
    if constexpr (std::is_void_v<decltype(operation())>) {
      operation();
      if (fails) throw std::runtime_error("the connection is lost");
    } else {
      auto result = operation();
      if (fails) throw std::runtime_error("the connection is lost");
      return result;
    }
  }

  const Mode mode_;
  std::atomic<int64_t> until_failure_{0};
  std::atomic<bool> dead_{false};
};

TEST_CASE("A16: a rank that has read the decision needs no memory to follow it", "[cases][transaction]") {
  // Rank 1's last operation on the store gives it the decision; then operator new fails on its thread.
  class LastOperation final : public c10d::PrefixStore {
   public:
    explicit LastOperation(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("last", std::move(store)) {}
    using PrefixStore::set;
    std::vector<uint8_t> get(const std::string& key) override {
      auto value = PrefixStore::get(key);
      if (armed && ++gets_ == 3) fail_heap_at(1);
      return value;
    }
    bool armed = false;

   private:
    int gets_ = 0;
  };
  int64_t left = 0;
  c10::intrusive_ptr<LastOperation> store;
  const Attempt attempt =
      try_prepare(2, {.arm =
                          [&](int rank) {
                            if (rank == 1) store->armed = true;
                          },
                      .disarm =
                          [&](int rank) {
                            if (rank == 1) left = fail_heap_at(0);
                          },
                      .store = [&](int rank, c10::intrusive_ptr<c10d::Store> shared) -> c10::intrusive_ptr<c10d::Store> {
                        auto own = c10::make_intrusive<LastOperation>(std::move(shared));
                        if (rank == 1) store = own;
                        return own;
                      }});
  INFO(shown(attempt));
  CHECK(attempt.problem.empty());
  CHECK(all_ok(attempt));
  CHECK(left == 1);  // it was to fail at the first allocation, and there was none
}

struct StoreAttempt {
  Attempt attempt;
  bool came = false;
};

StoreAttempt with_store_failure(int world_size, int failing, int number, FaultyStore::Mode mode) {
  c10::intrusive_ptr<FaultyStore> faulty;
  StoreAttempt result;
  result.attempt =
      try_prepare(world_size, {.timeout = 1s,
                               .arm =
                                   [&](int rank) {
                                     if (rank == failing) faulty->fail_at(number);
                                   },
                               .store = [&](int rank, c10::intrusive_ptr<c10d::Store> shared) -> c10::intrusive_ptr<c10d::Store> {
                                 auto own = c10::make_intrusive<FaultyStore>(std::move(shared), mode);
                                 if (rank == failing) faulty = own;
                                 return own;
                               }});
  result.came = !faulty->failure_pending();
  return result;
}

TEST_CASE("A16: a store operation that fails, on any rank, leaves every rank with the decision, or as it was",
          "[cases][transaction]") {
  int undecided = 0, survived = 0, failed = 0;
  for (int world_size : {2, 3}) {
    for (int failing = 0; failing < world_size; ++failing) {
      // begin, then three rounds: votes of the others and the decision; or a vote and the decision, of wait and get each.
      const int operations = failing == 0 ? 1 + 3 * (2 * (world_size - 1) + 1) : 1 + 3 * (1 + 2);
      for (const auto mode : {FaultyStore::kNotDone, FaultyStore::kDoneWithoutAnswer, FaultyStore::kDead}) {
        // Ranks that wait for one that has failed take no processor: several attempts at once.
        std::vector<StoreAttempt> results(operations + 1);
        std::vector<std::thread> threads;
        for (int number = 1; number <= operations + 1; ++number) {
          threads.emplace_back([&, number] { results[number - 1] = with_store_failure(world_size, failing, number, mode); });
          if (threads.size() < 16 && number <= operations) continue;
          for (std::thread& thread : threads) thread.join();
          threads.clear();
        }
        for (int number = 1; number <= operations + 1; ++number) {
          const auto& [attempt, came] = results[number - 1];
          CAPTURE(world_size, failing, mode, number);
          INFO(shown(attempt));
          CHECK(came == (number <= operations));
          CHECK(attempt.problem.empty());
          CHECK(attempt.seconds < 6);
          if (!came) CHECK(all_ok(attempt));
          if (!came) continue;
          bool some_ok = false, some_failed = false;
          for (const absl::Status& status : attempt.statuses) (status.ok() ? some_ok : some_failed) = true;
          undecided += some_ok && some_failed;
          survived += !some_failed;
          failed += !some_ok;
          if (!some_ok || !some_failed) continue;
          // The others have committed: it is the failing rank that does not know. Rank 0 can look what it wrote.
          CHECK((failing != 0 || mode != FaultyStore::kDoneWithoutAnswer));
          for (int rank = 0; rank < world_size; ++rank) CHECK(attempt.statuses[rank].ok() == (rank != failing));
          CHECK_THAT(std::string(attempt.statuses[failing].message()), Catch::Contains("undecided"));
        }
      }
    }
  }
  CHECK(undecided > 10);
  CHECK(survived > 5);
  CHECK(failed > 50);
}

TEST_CASE("A16: an empty ModuleHolder or pointer, on any rank, is InvalidArgument on all", "[cases][transaction]") {
  for (int world_size : {1, 2}) {
    for (const bool holder : {true, false}) {
      std::vector<absl::Status> statuses(world_size);
      run_ranks(world_size, [&](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
        Subject subject;
        const std::string objects = objects_of(subject);
        const bool empty = rank == world_size - 1;
        torch::nn::Linear body = subject.body;
        std::shared_ptr<torch::nn::LinearImpl> pointer = subject.body.ptr();
        if (empty) body = nullptr;
        if (empty) pointer = nullptr;
        torch::optim::SGD sgd(subject.body->parameters(), /*lr=*/0.1);
        statuses[rank] = holder ? prepare_fsdp(body, sgd, group).status() : prepare_fsdp(pointer, sgd, group).status();
        EXPECT_EQ(objects_of(subject), objects);
      });
      for (const absl::Status& status : statuses) {
        CHECK(status.ToString() ==
              "INVALID_ARGUMENT: prepare_fsdp, rank " + std::to_string(world_size - 1) + ": models[0] '' is null. Pass a module.");
      }
    }
  }
}

}  // namespace
}  // namespace rebind::test
