// What the plan and the adapters take for granted about LibTorch. A newer LibTorch that changes one of these fails here and not in
// a user's run.
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/DispatchKey.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind {
namespace {

using test::Bag;
using torch::optim::OptimizerParamGroup;

// Works for Adam and AdamW.
template <class Optimizer, class State>
void check_adam_creates_state_lazily() {
  Bag model({{"used", {2}}, {"unused", {2}}});
  Optimizer optimizer(model.parameters());
  CHECK(optimizer.state().empty());
  model["used"].mutable_grad() = at::ones({2});
  optimizer.step();
  optimizer.step();
  REQUIRE(optimizer.state().size() == 1);
  const auto found = optimizer.state().find(model["used"].unsafeGetTensorImpl());
  REQUIRE(found != optimizer.state().end());
  const auto& state = static_cast<const State&>(*found->second);
  CHECK(state.step() == 2);
  CHECK(state.exp_avg().sizes() == model["used"].sizes());
  CHECK(state.exp_avg_sq().sizes() == model["used"].sizes());
  CHECK_FALSE(state.max_exp_avg_sq().defined());
}

TEST_CASE("facts: state is keyed by the TensorImpl and does not keep the tensor alive", "[facts]") {
  auto model = std::make_unique<Bag>(Bag({{"a", {2}}}));
  torch::optim::Adam adam(model->parameters());
  (*model)["a"].mutable_grad() = at::ones({2});
  adam.step();
  void* key = (*model)["a"].unsafeGetTensorImpl();
  CHECK(adam.state().count(key) == 1);

  c10::weak_intrusive_ptr<c10::TensorImpl> watcher((*model)["a"].getIntrusivePtr());
  adam.param_groups()[0].params().clear();
  model.reset();
  CHECK(watcher.expired());
  CHECK(adam.state().count(key) == 1);  // under an address that anyone may get next
}

TEST_CASE("facts: parameters() lists a tied tensor twice, and SGD then steps it twice", "[facts]") {
  Bag model({{"a", {}}});
  model.register_parameter("b", model["a"]);
  REQUIRE(model.parameters().size() == 2);
  CHECK(model.parameters()[0].is_same(model.parameters()[1]));
  torch::optim::SGD sgd(model.parameters(), 1.0);
  model["a"].mutable_grad() = at::ones({});
  sgd.step();
  CHECK(model["a"].item<double>() == -1.0);  // from 1, by gradient 1 and lr 1
}

TEST_CASE("facts: one tensor may be in two groups", "[facts]") {
  Bag model({{"a", {}}});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"]}), OptimizerParamGroup({model["a"]})}, 1.0);
  CHECK(sgd.param_groups().size() == 2);
}

TEST_CASE("facts: a group may be cleared and refilled in place", "[facts]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd(model.parameters(), 0.5);
  torch::optim::StepLR schedule(sgd, /*step_size=*/1, /*gamma=*/0.5);
  std::vector<at::Tensor>& params = sgd.param_groups()[0].params();
  const auto* options = &sgd.param_groups()[0].options();

  const at::Tensor shard = at::ones({1}).set_requires_grad(true);
  params.clear();
  params.push_back(shard);
  shard.mutable_grad() = at::ones({1});
  sgd.step();
  CHECK(shard.item<double>() == 0.5);
  CHECK(&sgd.param_groups()[0].params() == &params);
  CHECK(&sgd.param_groups()[0].options() == options);
  schedule.step();  // the first call of a StepLR changes nothing
  schedule.step();
  CHECK(sgd.param_groups()[0].options().get_lr() == 0.25);
}

TEST_CASE("facts: add_param_group refuses a tensor with state, and fills options from the defaults", "[facts]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  torch::optim::Adam adam({model["a"]}, torch::optim::AdamOptions(0.5));
  model["a"].mutable_grad() = at::ones({2});
  adam.step();
  CHECK_THROWS_AS(adam.add_param_group(OptimizerParamGroup({model["a"]})), c10::Error);
  static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(0.25);
  adam.add_param_group(OptimizerParamGroup({model["b"]}));
  CHECK(adam.param_groups()[1].options().get_lr() == 0.5);
}

TEST_CASE("facts: Adam and AdamW make state at a parameter's first step, with an int64 step", "[facts]") {
  check_adam_creates_state_lazily<torch::optim::Adam, torch::optim::AdamParamState>();
  check_adam_creates_state_lazily<torch::optim::AdamW, torch::optim::AdamWParamState>();
}

TEST_CASE("facts: SGD has a momentum buffer from the first step on, and no state without momentum", "[facts]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD plain(model.parameters(), 0.1);
  torch::optim::SGD momentum(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  model["a"].mutable_grad() = at::ones({2});
  CHECK(momentum.state().empty());
  plain.step();
  momentum.step();
  CHECK(plain.state().empty());
  REQUIRE(momentum.state().size() == 1);
  CHECK(static_cast<torch::optim::SGDParamState&>(*momentum.state().begin()->second).momentum_buffer().defined());
}

TEST_CASE("facts: zero_grad sets gradients to none, on optimizer and module", "[facts]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  model["a"].mutable_grad() = at::ones({2});
  sgd.zero_grad();
  CHECK_FALSE(model["a"].grad().defined());
  model["a"].mutable_grad() = at::ones({2});
  model.zero_grad();
  CHECK_FALSE(model["a"].grad().defined());
}

TEST_CASE("facts: Module::to keeps the TensorImpl, replaces its storage and leaves the gradient's dtype", "[facts]") {
  Bag model({{"a", {2}}});
  model["a"].mutable_grad() = at::ones({2});
  const void* impl = model["a"].unsafeGetTensorImpl();
  const void* storage = model["a"].storage().unsafeGetStorageImpl();
  model.to(at::kDouble);
  CHECK(model["a"].unsafeGetTensorImpl() == impl);
  CHECK(model["a"].storage().unsafeGetStorageImpl() != storage);
  CHECK(model["a"].scalar_type() == at::kDouble);
  CHECK(model["a"].grad().scalar_type() == at::kFloat);
}

TEST_CASE("facts: assigning to a member does not change the registered parameter", "[facts]") {
  torch::nn::Linear linear(2, 2);
  const at::Tensor registered = linear->named_parameters()["weight"];
  linear->weight = at::zeros({2, 2});
  CHECK(linear->named_parameters()["weight"].is_same(registered));
}

TEST_CASE("facts: an ordinary parameter has neither the key Fake nor a post-accumulate hook", "[facts]") {
  Bag model({{"a", {2}}});
  CHECK_FALSE(model["a"].unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Fake));
  CHECK(torch::autograd::impl::post_acc_grad_hooks(model["a"]) == nullptr);
}

TEST_CASE("facts: children of a module that no shared_ptr owns can be walked", "[facts]") {
  Bag model;  // on the stack: named_modules would throw
  model.register_module("child", std::make_shared<Bag>(Bag({{"a", {2}}})));
  REQUIRE(model.named_children().size() == 1);
  CHECK(model.named_children()[0].key() == "child");
  CHECK_THROWS_AS(model.named_modules(), c10::Error);
}

}  // namespace
}  // namespace rebind
