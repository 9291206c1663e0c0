// One prepare_fsdp on all ranks in which something fails, and the proof that nothing happened.
//
//   const Attempt attempt = try_prepare(2, {.arm = [&](int rank) { if (rank == 1) counted.fail_at(3); }});
//   CHECK(attempt.problem.empty());                    // who returned an error is as before, and trains on
//   CHECK(all_failed_alike(attempt));
#pragma once

#include <absl/status/status.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "rebind/rebind.h"

namespace rebind::test {

// What prepare_fsdp is given here: two parameters in two groups with different options, one that is never used, a buffer; Adam has
// stepped once; the weight has a gradient.
struct Subject {
  explicit Subject(int rank = 0);  // buffers are each rank's own, the rest is equal
  void train(int steps);

  torch::nn::Linear body;
  std::shared_ptr<torch::nn::Module> model;
  std::unique_ptr<torch::optim::Adam> adam;
  int trained = 0;
};

// Every number that training depends on, as text: parameters, gradients, buffers, options, state.
std::string values_of(Subject& subject);
// Every object that the program may hold: tensors, storages, versions, vectors, options, states.
std::string objects_of(Subject& subject);

struct Attempt {
  std::vector<absl::Status> statuses;  // of each rank
  std::string problem;                 // what was not as it must be; empty: nothing
  double seconds = 0;                  // the longest call
};

struct AttemptOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(20);  // of collectives and votes
  std::function<void(int rank)> arm = nullptr;                   // just before the call, on the rank's thread
  std::function<void(int rank)> disarm = nullptr;                // just after it
  // The store of a rank's group, over the one that all share; null: that one.
  std::function<c10::intrusive_ptr<c10d::Store>(int rank, c10::intrusive_ptr<c10d::Store> shared)> store = nullptr;
};

// Every rank makes a Subject, calls prepare_fsdp, and, if it gets an error, compares objects and values with those of before, then
// trains on beside a twin that was never prepared. Safe to call from several threads at once.
Attempt try_prepare(int world_size, const AttemptOptions& options);

bool all_ok(const Attempt& attempt);
// All ranks have the same error.
bool all_failed_alike(const Attempt& attempt);
std::string shown(const Attempt& attempt);

}  // namespace rebind::test
