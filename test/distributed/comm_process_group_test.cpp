#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "rebind/process_group.h"
#include "test/support/catch.h"
#include "test/support/ranks.h"

namespace rebind {
namespace {

using namespace std::chrono_literals;
using test::run_ranks;
using Clock = std::chrono::steady_clock;

ProcessGroupOptions with_timeout(std::chrono::milliseconds timeout) {
  ProcessGroupOptions options;
  options.timeout = timeout;
  return options;
}

TEST_CASE("group: one rank needs no store and answers a user's collectives itself", "[comm][group]") {
  const auto group = make_process_group(nullptr, 0, 1);
  REQUIRE(group.ok());
  CHECK((*group)->getRank() == 0);
  CHECK((*group)->getSize() == 1);
  CHECK((*group)->getStore() != nullptr);
  std::vector<at::Tensor> loss{at::full({2}, 3.5f)};
  CHECK((*group)->allreduce(loss)->wait());
  CHECK((*group)->broadcast(loss)->wait());
  CHECK((*group)->barrier()->wait());
  CHECK(loss[0].equal(at::full({2}, 3.5f)));
  at::Tensor gathered = at::zeros({2}), reduced = at::zeros({2});
  CHECK((*group)->_allgather_base(gathered, loss[0])->wait());
  CHECK((*group)->_reduce_scatter_base(reduced, loss[0])->wait());
  CHECK(gathered.equal(loss[0]));
  CHECK(reduced.equal(loss[0]));
}

TEST_CASE("group: several groups over one store, with their own sends and collectives", "[comm][group]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](int rank, auto) {
    const auto a = make_process_group(store, rank, 3, with_timeout(10s));
    const auto b = make_process_group(store, rank, 3, with_timeout(10s));
    EXPECT_OK(a);
    EXPECT_OK(b);
    std::vector<at::Tensor> in_a{at::full({1}, rank + 1.0f)}, in_b{at::full({1}, 10.0f * rank)};
    const auto first = (*b)->allreduce(in_b), second = (*a)->allreduce(in_a);
    first->wait();
    second->wait();
    EXPECT_EQ(in_a[0].item<float>(), 6.0f);
    EXPECT_EQ(in_b[0].item<float>(), 30.0f);
    std::vector<at::Tensor> message{at::full({1}, float(rank))};
    if (rank == 0) (*a)->send(message, 2, 5)->wait();
    if (rank == 2) (*a)->recv(message, 0, 5)->wait();
    EXPECT_EQ(message[0].item<float>(), rank == 1 ? 1.0f : 0.0f);
  });
}

TEST_CASE("group: ranks that do not arrive are named within the time-out", "[comm][group]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto begin = Clock::now();
  const auto group = make_process_group(store, 1, 4, with_timeout(300ms));
  const auto waited = Clock::now() - begin;
  CHECK(waited >= 300ms);
  CHECK(waited < 1500ms);
  CHECK(group.status().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(
      std::string(group.status().message()) ==
      "make_process_group, rank 1: ranks 0, 2, 3 of 4 did not arrive within 300 ms. Start all ranks, with the same WORLD_SIZE and "
      "master; look at the output of the missing ones first.");
}

TEST_CASE("group: wrong arguments are refused before anything is sent", "[comm][group]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto message = [&](int rank, int world_size, const std::string& backend, std::chrono::milliseconds timeout = 1s) {
    ProcessGroupOptions options = with_timeout(timeout);
    options.backend = backend;
    return make_process_group(store, rank, world_size, options).status().ToString();
  };
  CHECK(
      message(2, 2, "auto") ==
      "INVALID_ARGUMENT: make_process_group, rank 2: rank 2 of 2, expected 0 <= rank < world size. Pass each rank its own number.");
  CHECK(message(-1, 2, "auto") ==
        "INVALID_ARGUMENT: make_process_group: rank -1 of 2, expected 0 <= rank < world size. Pass each rank its own number.");
  CHECK(message(0, 2, "mpi") ==
        "INVALID_ARGUMENT: make_process_group, rank 0: backend 'mpi' is not known. Use 'auto', 'gloo' or 'nccl'.");
  CHECK(message(0, 1, "gloo", 0ms) ==
        "INVALID_ARGUMENT: make_process_group, rank 0: ProcessGroupOptions::timeout is 0 ms. Use a positive one.");
  CHECK(make_process_group(nullptr, 0, 2).status().ToString() ==
        "INVALID_ARGUMENT: make_process_group, rank 0: the store is null. Pass one that all ranks share.");
#ifndef REBIND_HAS_NCCL
  CHECK(message(0, 2, "nccl") ==
        "UNIMPLEMENTED: make_process_group, rank 0: rebind was built without the backend 'nccl'. Use 'gloo', or build with "
        "REBIND_NCCL=ON and a CUDA LibTorch.");
#endif
  CHECK(store->getNumKeys() == 0);
}

}  // namespace
}  // namespace rebind
