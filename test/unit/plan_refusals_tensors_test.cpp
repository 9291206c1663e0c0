// What a plan refuses of parameters, gradients, buffers and state, with its whole text.
#include <array>
#include <functional>
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_outcome.h"

namespace rebind {
namespace {

using test::Bag;
using test::outcome;
using test::outcome_with;
using test::outcome_with_b;
using test::outcome_with_gradient;
using torch::optim::OptimizerParamGroup;

TEST_CASE("plan: refuses complex parameters and other unknown dtypes", "[plan][refusal]") {
  const auto refused = [](const std::string& dtype) {
    return "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has dtype " + dtype +
           ", only float32, float64, bfloat16, float16, int8 to int64, uint8 and bool are supported. "
           "Register it as a buffer, or convert it.";
  };
  CHECK(outcome_with_b(at::ones({3}, at::kComplexFloat)) == refused("complex64"));
  CHECK(outcome_with_b(at::ones({3}, at::kComplexDouble), false) == refused("complex128"));
  CHECK(outcome_with_b(at::ones({3}).to(at::kFloat8_e4m3fn)) == refused("Float8_e4m3fn"));
}

TEST_CASE("plan: accepts every other dtype beside float32, integers frozen", "[plan]") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    CHECK(outcome_with_b(at::ones({3}, dtype)) == "accepted");
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool}) {
    CHECK(outcome_with_b(at::ones({3}, dtype), /*requires_grad=*/false) == "accepted");
  }
}

TEST_CASE("plan: refuses other devices", "[plan][refusal]") {
  CHECK(outcome_with_b(at::ones({3}, at::TensorOptions().device(at::kMeta))) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it is on device meta, only cpu is supported yet. "
        "Move the model to the CPU before building the optimizer.");
}

TEST_CASE("plan: refuses sparse and quantized parameters", "[plan][refusal]") {
  CHECK(outcome_with_b(at::ones({3}).to_sparse()) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it is a Sparse tensor, which is not supported. Use a dense (strided) "
        "tensor.");
  CHECK(outcome_with_b(at::quantize_per_tensor(at::ones({3}), 0.5, 0, at::kQInt8), false) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it is a quantized tensor, which is not supported. "
        "Use a dense (strided) tensor.");
}

TEST_CASE("plan: refuses parameters whose elements overlap or leave gaps, accepts every dense order", "[plan][refusal]") {
  const std::string remedy = ", so its elements overlap or leave gaps. Register t.contiguous() instead.";
  CHECK(outcome_with_b(at::ones({1}).expand({3})) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has shape [3] and strides [0]" + remedy);
  CHECK(outcome_with_b(at::ones({4, 3}).slice(1, 0, 2)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has shape [4, 2] and strides [3, 1]" + remedy);
  CHECK(outcome_with_b(at::ones({8}).unfold(0, 4, 2)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has shape [3, 4] and strides [2, 1]" + remedy);
  CHECK(outcome_with_b(at::ones({3})._neg_view()) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it is a negated view, which is not supported. "
        "Register t.resolve_neg() instead.");
  CHECK(outcome_with_b(at::ones({2, 3}).t()) == "accepted");
  CHECK(outcome_with_b(at::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)) == "accepted");
  CHECK(outcome_with_b(at::ones({2, 3, 4}).permute({2, 0, 1})) == "accepted");
  CHECK(outcome_with_b(at::ones({}).expand({1, 1})) == "accepted");
  CHECK(outcome_with_b(at::ones({3, 1}).expand({3, 0})) == "accepted");  // no element is there twice
}

TEST_CASE("plan: refuses parameters that are no leaves, or were made under InferenceMode", "[plan][refusal]") {
  CHECK(outcome_with_b(at::ones({3}).set_requires_grad(true) * 2) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it is not a leaf: it was computed from other tensors. "
        "Register a detached copy: t.detach().clone().");
  CHECK(outcome_with([](Bag& model) {
          c10::InferenceMode guard;
          model.register_parameter("b", at::ones({3}));
        }) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it was made under InferenceMode, which is not supported. "
        "Build the model outside InferenceMode.");
}

TEST_CASE("plan: refuses parameters that share storage, overlapping or not, and names both", "[plan][refusal]") {
  const std::string refused =
      "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b2': it shares its storage with parameter 'b1'. "
      "Give each its own memory (clone()), or register one and the same tensor under both names.";
  const at::Tensor base = at::ones({6});
  const auto with_pair = [](const at::Tensor& b1, const at::Tensor& b2) {
    return outcome_with([&](Bag& model) {
      model.register_parameter("b1", b1);
      model.register_parameter("b2", b2);
    });
  };
  CHECK(with_pair(base.slice(0, 0, 4), base.slice(0, 2, 6)) == refused);
  CHECK(with_pair(base.slice(0, 0, 3), base.slice(0, 3, 6)) == refused);
  std::array<float, 8> memory{};
  CHECK(with_pair(at::from_blob(memory.data(), {5}), at::from_blob(memory.data() + 4, {4})) == refused);
  CHECK(with_pair(at::from_blob(memory.data(), {4}), at::from_blob(memory.data() + 4, {4})) == "accepted");
  CHECK(with_pair(at::zeros({0}), at::zeros({0})) == "accepted");
  const at::Tensor none = at::zeros({0});
  CHECK(with_pair(none.detach(), none.detach()) == "accepted");  // without elements there is nothing to share
  CHECK(with_pair(base.slice(0, 0, 0), base.slice(0, 0, 3)) == "accepted");
}

TEST_CASE("plan: buffers may overlap each other, but no parameter", "[plan][refusal]") {
  //   memory     0 1 2 3 4 5 6 7
  //   large      |-------------|
  //   small        |-|
  //   parameter          |-|
  std::array<float, 8> memory{};
  const auto with_parameter_at = [&](float* place) {
    return outcome_with([&](Bag& model) {
      model.register_buffer("large", at::from_blob(memory.data(), {7}));
      model.register_buffer("small", at::from_blob(memory.data() + 1, {1}));
      model.register_parameter("b", at::from_blob(place, {1}));
    });
  };
  CHECK(with_parameter_at(memory.data() + 7) == "accepted");
  CHECK(with_parameter_at(memory.data() + 4) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: buffer 'large' shares its storage with parameter 'b'. "
        "Give the buffer its own memory (clone()).");
}

TEST_CASE("plan: refuses a buffer that shares a parameter's storage, and buffers elsewhere", "[plan][refusal]") {
  CHECK(outcome_with([](Bag& model) { model.register_buffer("view", model["a"].detach()); }) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: buffer 'view' shares its storage with parameter 'a'. "
        "Give the buffer its own memory (clone()).");
  CHECK(outcome_with([](Bag& model) {
          model.register_buffer("inside", at::from_blob(static_cast<float*>(model["a"].data_ptr()) + 1, {1}));
        }) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: buffer 'inside' shares its storage with parameter 'a'. "
        "Give the buffer its own memory (clone()).");
  CHECK(outcome_with([](Bag& model) { model.register_buffer("far", at::ones({3}, at::TensorOptions().device(at::kMeta))); }) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: buffer 'far' is a Strided float32 tensor on meta, only dense tensors on cpu are "
        "supported yet. "
        "Move it to the CPU, or do not register it.");
  CHECK(outcome_with([](Bag& model) {
          const at::Tensor shared = at::ones({3});
          model.register_buffer("one", shared);
          model.register_buffer("two", shared);
        }) == "accepted");
}

struct NoHook : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor&) override {}
};

TEST_CASE("plan: refuses a parameter with a post-accumulate-grad hook, accepts ordinary hooks", "[plan][refusal]") {
  CHECK(outcome_with([](Bag& model) { torch::autograd::impl::set_post_acc_grad_hooks(model["a"], std::make_unique<NoHook>()); }) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'a': it has a post-accumulate-grad hook, whose place is needed to reduce "
        "gradients. "
        "Remove the hook; a hook set by register_hook may stay.");
  CHECK(outcome_with([](Bag& model) { model["a"].register_hook([](at::Tensor) {}); }) == "accepted");
}

TEST_CASE("plan: refuses gradients that are not like their parameter", "[plan][refusal]") {
  const std::string subject = "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'a': its gradient ";
  const std::string remedy = ". Call zero_grad() first.";
  CHECK(outcome_with_gradient([] { return at::ones({2}).to_sparse(); }) ==
        subject + "is a Sparse tensor, which is not supported" + remedy);
  CHECK(outcome_with_gradient([] { return at::ones({2}, at::kDouble); }) ==
        subject + "is float64 [2] on cpu, the parameter float32 [2] on cpu" + remedy);
  CHECK(outcome_with_gradient([] {
          return at::ones({1, 2});
        }) == subject + "is float32 [1, 2] on cpu, the parameter float32 [2] on cpu" + remedy);
  CHECK(outcome_with_gradient([] { return at::ones({1}).expand({2}); }) ==
        subject + "has strides [0], so its elements overlap or leave gaps" + remedy);
  CHECK(outcome_with_gradient([] { return at::ones({2}).set_requires_grad(true) * 2; }) ==
        subject + "is part of a graph (backward with create_graph=true), which cannot be kept" + remedy);
  CHECK(outcome_with_gradient([] { return at::ones({2}); }) == "accepted");
  CHECK(outcome_with([](Bag& model) {
          model.register_parameter("b", at::ones({2, 3}));
          model["b"].mutable_grad() = at::ones({3, 2}).t();
        }) == "accepted");
  CHECK(outcome_with([](Bag& model) {
          model["a"].mutable_grad() = at::ones({2});
          model["a"].set_requires_grad(false);
        }) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'a': it has requires_grad=false and a gradient, by which a step would still "
        "move "
        "it. Call zero_grad() first.");
}

TEST_CASE("plan: refuses state tensors of another shape, by name", "[plan][refusal]") {
  Bag model({{"first", {2}}});
  const auto embed = model.register_module("embed", std::make_shared<Bag>(Bag({{"weight", {16, 4}}})));
  torch::optim::Adam adam({OptimizerParamGroup({model["first"]}), OptimizerParamGroup({(*embed)["weight"]})});
  const auto outcome_with_state = [&](const at::Tensor& exp_avg) {
    auto state = std::make_unique<torch::optim::AdamParamState>();
    state->step(3).exp_avg(exp_avg).exp_avg_sq(at::zeros({16, 4}));
    adam.state()[(*embed)["weight"].unsafeGetTensorImpl()] = std::move(state);
    return outcome(plan_fsdp(model, {&adam}, 1, 2));
  };
  const std::string subject =
      "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'embed.weight' (Adam, optimizers[0], group 1): state 'exp_avg' ";
  const std::string remedy = ". Erase or rebuild that state, then call again.";
  CHECK(outcome_with_state(at::zeros({8, 4})) == subject + "has shape [8, 4], the parameter has [16, 4]" + remedy);
  CHECK(outcome_with_state(at::zeros({64})) == subject + "has shape [64], the parameter has [16, 4]" + remedy);
  CHECK(outcome_with_state(at::zeros({16, 1}).expand({16, 4})) ==
        subject + "has strides [1, 0], so its elements overlap or leave gaps" + remedy);
  CHECK(outcome_with_state(at::zeros({4, 16}).t()) == "accepted");
  CHECK(outcome_with_state(at::zeros({16, 4}).to_sparse()) ==
        subject + "is a Sparse tensor on cpu, only dense tensors on cpu are supported" + remedy);
  CHECK(outcome_with_state(at::zeros({16, 4}, at::TensorOptions().device(at::kMeta))) ==
        subject + "is a Strided tensor on meta, only dense tensors on cpu are supported" + remedy);
  CHECK(outcome_with_state(at::zeros({})) == "accepted");
  CHECK(outcome_with_state(at::zeros({16, 4}, at::kDouble)) == "accepted");
  CHECK(outcome_with_state(at::Tensor()) == "accepted");
}

// Of a model with 'a' and an SGD over 'a' and `foreign`.
std::string outcome_with_foreign(const at::Tensor& foreign) {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"]}), OptimizerParamGroup({model["a"], foreign})}, 0.1);
  return outcome(plan_fsdp(model, {&sgd}, 1, 2));
}

TEST_CASE("plan: refuses tensors of no model as it refuses parameters, by their place", "[plan][refusal]") {
  const std::string subject = "UNIMPLEMENTED: plan_fsdp, rank 1: SGD, optimizers[0], group 1, params()[1]: it ";
  CHECK(outcome_with_foreign(at::ones({4, 3})) == "accepted");
  CHECK(outcome_with_foreign(at::ones({4, 3}).t()) == "accepted");
  CHECK(outcome_with_foreign(at::ones({3}, at::kLong)) ==
        subject +
            "belongs to no given model and has dtype int64, only float32, float64, bfloat16 and float16 are supported there. "
            "Take it out of the optimizer.");
  CHECK(outcome_with_foreign(at::ones({3}, at::TensorOptions().device(at::kMeta))) ==
        subject + "is on device meta, only cpu is supported yet. Move the model to the CPU before building the optimizer.");
  CHECK(outcome_with_foreign(at::ones({1}).expand({3})) ==
        subject + "has shape [3] and strides [0], so its elements overlap or leave gaps. Register t.contiguous() instead.");
  at::Tensor with_gradient = at::ones({3}).set_requires_grad(true);
  with_gradient.mutable_grad() = at::ones({3}).to_sparse();
  CHECK(outcome_with_foreign(with_gradient) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: SGD, optimizers[0], group 1, params()[1]: its gradient is a Sparse tensor, which is not "
        "supported. Call zero_grad() first.");
}

TEST_CASE("plan: refuses a tensor of no model that is a view of a parameter", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd({model["a"], model["a"].detach()}, 0.1);
  CHECK(outcome(plan_fsdp(model, {&sgd}, 1, 2)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: SGD, optimizers[0], group 0, params()[1]: it shares its storage with parameter 'a'. "
        "Give it its own memory (clone()).");
}

TEST_CASE("plan: refuses state of a tensor of no model that is not shaped like it", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  const at::Tensor foreign = at::ones({3});
  torch::optim::Adam adam({model["a"], foreign});
  auto state = std::make_unique<torch::optim::AdamParamState>();
  state->step(3).exp_avg(at::zeros({2})).exp_avg_sq(at::zeros({3}));
  adam.state()[foreign.unsafeGetTensorImpl()] = std::move(state);
  CHECK(outcome(plan_fsdp(model, {&adam}, 1, 2)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: Adam, optimizers[0], group 0, params()[1]: state 'exp_avg' has shape [2], the parameter "
        "has "
        "[3]. Erase or rebuild that state, then call again.");
}

}  // namespace
}  // namespace rebind
