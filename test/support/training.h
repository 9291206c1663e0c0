// One small program, trained three ways: plainly on the joined batch (REF), plainly with one backward a rank (REF-W), sharded.
//
//   Program program{.make = [] { return net_with_sgd(0.1, 0.9); }, .steps = 6, .prepare_at = 3};
//   run_ranks(2, [&](int rank, auto group) {
//     Trained trained = train_sharded(program, rank, group);
//     expect_same(trained.snapshot(), reference_w(program, 2));
//   });
//
// REF and REF-W are defined at the head of the project's list of cases: REF(k) is one unsharded process on the joined batch;
// REF-W(k) runs W backwards a step, one on each rank's rows, adds the gradients in rank order and divides by W.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/runtime/sharding.h"
#include "rebind/rebind.h"
#include "test/support/ranks.h"

namespace rebind::test {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// (input [n, 5]) -> tanh(first) -> second -> * scale: [n, 3]. Sizes no world size divides, one element (an empty shard), one
// parameter that no forward uses.
struct Net : torch::nn::Module {
  explicit Net(at::ScalarType dtype = at::kFloat);
  at::Tensor forward(const at::Tensor& input);

  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor scale;   // [1]
  at::Tensor unused;  // [3]
};

// Reproducible values, another tensor for every `seed`.
at::Tensor random_tensor(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kFloat);
void randomize(torch::nn::Module& model, uint64_t seed);

struct Setup {
  std::shared_ptr<torch::nn::Module> model;
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers;
  std::function<at::Tensor(const at::Tensor& input)> forward;
  std::vector<at::Tensor> free = {};  // in an optimizer and in no model; "free.<i>" in a Snapshot

  Optimizers pointers() const;
};
// A randomized Net, and optimizers made by `optimizers` from its parameters.
Setup net_with(const std::function<std::vector<std::shared_ptr<torch::optim::Optimizer>>(Net&)>& optimizers,
               at::ScalarType dtype = at::kFloat);

// The rows of `rank` in `step`: input [2, 5] and target [2, 3]. Gradients change sign between steps.
std::pair<at::Tensor, at::Tensor> rows(int rank, int step, at::ScalarType dtype);

// Options with which each parameter is one tensor of the optimizer, so that a test can look at it.
inline FsdpOptions one_tensor_each() {
  FsdpOptions options;
  options.coalesce = false;
  return options;
}

// Throws where prepare_fsdp returns an error.
inline std::unique_ptr<Fsdp> prepare(torch::nn::Module& model, const Optimizers& optimizers, const Group& group,
                                     const FsdpOptions& options = {}) {
  auto fsdp = prepare_fsdp(model, optimizers, group, options);
  EXPECT_OK(fsdp);
  return *std::move(fsdp);
}

struct Program {
  std::function<Setup()> make;
  int steps = 6;
  int prepare_at = 0;
  FsdpOptions options = {};
  // Between backward and step, in every form of the program.
  std::function<void(Setup&, int step)> before_step = nullptr;
  // Ends a step: by default optimizer.zero_grad() of each.
  std::function<void(Setup&, int step)> zero_grad = nullptr;
};

// Parameters by name, state as "0:<name>.<key>" (0: the optimizer), step counters as int64 tensors.
using Snapshot = std::map<std::string, at::Tensor>;
Snapshot snapshot(Setup& setup);                      // of a plain program
Snapshot snapshot(Setup& setup, Fsdp& fsdp);          // of a sharded one; collective

Snapshot reference(const Program& program, int world_size);    // REF
Snapshot reference_w(const Program& program, int world_size);  // REF-W

struct Trained {
  Setup setup;
  std::unique_ptr<Fsdp> fsdp;
};
// Plain (as REF-W) for prepare_at steps, then sharded. Padding is filled with NaN after prepare. Asserts invariants after each step.
Trained train_sharded(const Program& program, int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Throw with the first difference: key, element, both values.
void expect_same(const Snapshot& got, const Snapshot& expected);                      // bit for bit
void expect_close(const Snapshot& got, const Snapshot& expected, double tolerance);
void expect_same(const std::string& what, const at::Tensor& got, const at::Tensor& expected);

// What makes it a sharding and not only parity: elements that this rank's optimizers and their state hold are at most
// total / W plus padding, and no gathered memory is left.
void expect_sharded(const Setup& setup, Fsdp& fsdp);

// Gaps and tails of all flat shards become NaN.
void poison_padding(Fsdp& fsdp, torch::nn::Module& model);

}  // namespace rebind::test
