// Everything that a plan refuses, with its whole text.
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind {
namespace {

using test::Bag;
using torch::optim::OptimizerParamGroup;

std::string outcome(const absl::StatusOr<FsdpPlan>& plan) { return plan.ok() ? "accepted" : plan.status().ToString(); }

// Of a model with parameter 'a', float32 [2], and what `change` does to it.
std::string outcome_with(const std::function<void(Bag&)>& change) {
  Bag model({{"a", {2}}});
  change(model);
  return outcome(plan_fsdp(model, {}, 1, 2));
}

// Of a model with one more parameter, 'b'.
std::string outcome_with_b(const at::Tensor& b, bool requires_grad = true) {
  return outcome_with([&](Bag& model) { model.register_parameter("b", b, requires_grad); });
}

std::string outcome_with_gradient(const std::function<at::Tensor()>& gradient) {
  return outcome_with([&](Bag& model) { model["a"].mutable_grad() = gradient(); });
}

std::string outcome_with_options(const std::function<void(FsdpOptions&)>& change) {
  Bag model({{"a", {2}}});
  FsdpOptions options;
  change(options);
  return outcome(plan_fsdp(model, {}, 1, 2, options));
}

// Gives a parameter the key that prepare_fsdp gives, and nothing else of a window.
void mark_as_sharded(at::Tensor& tensor) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(tensor.storage()), tensor.key_set().add(c10::DispatchKey::Fake),
                                                   tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  tensor.set_data(at::Tensor(std::move(impl)));
}

TEST_CASE("plan: refuses ranks out of range", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  const std::string remedy = ". Use a world size of 1 or more, and 0 <= rank < world size.";
  CHECK(outcome(plan_fsdp(model, {}, 2, 2)) == "INVALID_ARGUMENT: plan_fsdp: rank is 2 and world size 2" + remedy);
  CHECK(outcome(plan_fsdp(model, {}, -1, 2)) == "INVALID_ARGUMENT: plan_fsdp: rank is -1 and world size 2" + remedy);
  CHECK(outcome(plan_fsdp(model, {}, 0, 0)) == "INVALID_ARGUMENT: plan_fsdp: rank is 0 and world size 0" + remedy);
}

TEST_CASE("plan: refuses models that are missing, repeated, empty or badly named", "[plan][refusal]") {
  Bag a({{"w", {2}}}), b({{"w", {2}}}), none;
  none.register_parameter("undefined", at::Tensor(), false);
  CHECK(outcome(plan_fsdp(std::vector<NamedModule>{}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: no model was given. Pass at least one module.");
  CHECK(outcome(plan_fsdp({{"g", &a}, {"c", nullptr}}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: models[1] 'c' is null. Pass a module.");
  CHECK(outcome(plan_fsdp({{"g", &a}, {"c", &a}}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: models[1] 'c' is the same module as models[0]. Pass each model once.");
  CHECK(outcome(plan_fsdp(none, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: the model has no parameters. There is nothing to shard: leave it out.");
  CHECK(outcome(plan_fsdp({{"g", &a}, {"c", &none}}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: models[1] 'c' has no parameters. There is nothing to shard: leave it out.");
  const std::string name_remedy =
      "', which is empty, has a dot or was used before. Give each of several models its own name without a dot.";
  CHECK(outcome(plan_fsdp({{"g", &a}, {"g", &b}}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: models[1] has the name 'g" + name_remedy);
  CHECK(outcome(plan_fsdp({{"", &a}, {"g", &b}}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: models[0] has the name '" + name_remedy);
  CHECK(outcome(plan_fsdp({{"g", &a}, {"g.x", &b}}, {}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: models[1] has the name 'g.x" + name_remedy);
}

TEST_CASE("plan: refuses null and repeated optimizers", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(outcome(plan_fsdp(model, {&sgd, nullptr}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: optimizers[1]: the optimizer is null. Pass an optimizer.");
  CHECK(outcome(plan_fsdp(model, {&sgd, &sgd}, 0, 1)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 0: torch::optim::SGD, optimizers[1]: it is the same optimizer as optimizers[0]. "
        "Pass each optimizer once.");
}

struct MySgd : torch::optim::SGD {
  using SGD::SGD;
};

TEST_CASE("plan: refuses optimizers that it does not know, by type and position", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  torch::optim::LBFGS lbfgs(model.parameters());
  torch::optim::Adagrad adagrad(model.parameters());
  MySgd derived(model.parameters(), 0.1);
  CHECK(outcome(plan_fsdp(model, {&sgd, &lbfgs}, 0, 1)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 0: torch::optim::LBFGS, optimizers[1]: LBFGS looks across all parameters at once, so it "
        "cannot "
        "run on shards. Use SGD, Adam or AdamW, or train without sharding.");
  const std::string remedy =
      ": this type of optimizer is not supported yet. Use torch::optim::SGD, Adam or AdamW itself, not a class derived from it.";
  CHECK(outcome(plan_fsdp(model, {&adagrad}, 0, 1)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 0: torch::optim::Adagrad, optimizers[0]" + remedy);
  CHECK(outcome(plan_fsdp(model, {&derived}, 0, 1)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 0: rebind::(anonymous namespace)::MySgd, optimizers[0]" + remedy);
}

TEST_CASE("plan: refuses options and state that are not the optimizer's own type", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  torch::optim::Adam adam({OptimizerParamGroup({model["a"]}, std::make_unique<torch::optim::AdamWOptions>(0.1))});
  CHECK(outcome(plan_fsdp(model, {&adam}, 0, 1)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 0: Adam, optimizers[0], group 0: the group's options are not Adam's own type. "
        "Give the group options of type torch::optim::AdamOptions.");
  torch::optim::SGD sgd(model.parameters(), 0.1);
  sgd.state()[model["a"].unsafeGetTensorImpl()] = std::make_unique<torch::optim::AdamParamState>();
  CHECK(outcome(plan_fsdp(model, {&sgd}, 0, 1)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 0: parameter 'a' (SGD, optimizers[0], group 0): its state is not SGD's own type. "
        "Erase that state, then call again.");
}

TEST_CASE("plan: refuses an optimizer's tensor that is in no model, by position", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"]}), OptimizerParamGroup({model["a"], at::ones({4, 3})})}, 0.1);
  CHECK(outcome(plan_fsdp(model, {&sgd}, 1, 2)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: SGD, optimizers[0], group 1, params()[1]: a tensor of shape [4, 3] is no parameter of a "
        "given "
        "model. Register it in the model, or give it an optimizer of its own.");
  sgd.param_groups()[1].params()[1] = at::Tensor();
  CHECK(outcome(plan_fsdp(model, {&sgd}, 1, 2)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 1: SGD, optimizers[0], group 1, params()[1]: the tensor is undefined. Take it out of "
        "the group.");
}

TEST_CASE("plan: refuses what is sharded already, naming the first parameter", "[plan][refusal]") {
  Bag model({{"a", {2}}, {"b", {2}}, {"c", {2}}});
  torch::optim::SGD sgd({model["c"]}, 0.1);
  mark_as_sharded(model["b"]);
  mark_as_sharded(model["c"]);
  CHECK(outcome(plan_fsdp(model, {&sgd}, 0, 2)) ==
        "FAILED_PRECONDITION: plan_fsdp, rank 0: parameter 'b': it is sharded already. "
        "Use Fsdp::of(model) to get its handle, or restore() before preparing it again.");
  Bag other({{"x", {2}}});
  CHECK(outcome(plan_fsdp(other, {&sgd}, 0, 2)) ==
        "FAILED_PRECONDITION: plan_fsdp, rank 0: SGD, optimizers[0], group 0, params()[0]: the tensor is sharded already and "
        "belongs to "
        "another model. Call restore() on the sharding it belongs to first.");
}

TEST_CASE("plan: refuses frozen parameters", "[plan][refusal]") {
  CHECK(outcome_with_b(at::ones({3}), /*requires_grad=*/false) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has requires_grad=false, frozen parameters are not supported yet. "
        "Register it as a buffer, or set requires_grad to true.");
}

TEST_CASE("plan: refuses dtypes other than the four floating ones", "[plan][refusal]") {
  const auto refused = [](const std::string& dtype) {
    return "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has dtype " + dtype +
           ", only float32, float64, bfloat16 and float16 are supported yet. Register it as a buffer, or convert it.";
  };
  CHECK(outcome_with_b(at::ones({3}, at::kLong), false) == refused("int64"));
  CHECK(outcome_with_b(at::ones({3}, at::kByte), false) == refused("uint8"));
  CHECK(outcome_with_b(at::ones({3}, at::kBool), false) == refused("bool"));
  CHECK(outcome_with_b(at::ones({3}, at::kComplexFloat)) == refused("complex64"));
  CHECK(outcome_with_b(at::ones({3}).to(at::kFloat8_e4m3fn)) == refused("Float8_e4m3fn"));
}

TEST_CASE("plan: refuses two dtypes in one model, and accepts each floating one alone", "[plan][refusal]") {
  CHECK(outcome_with_b(at::ones({3}, at::kDouble)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has dtype float64 and 'a' has float32, different dtypes in one model "
        "are not "
        "supported yet. Convert the model to one dtype before building the optimizer.");
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    Bag model({{"a", {2}}, {"b", {3}}}, dtype);
    CHECK(outcome(plan_fsdp(model, {}, 1, 2)) == "accepted");
  }
  Bag first({{"a", {2}}}), second({{"a", {2}}}, at::kDouble);
  CHECK(outcome(plan_fsdp({{"first", &first}, {"second", &second}}, {}, 1, 2)) == "accepted");
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

TEST_CASE("plan: refuses parameters that are not contiguous in logical order", "[plan][refusal]") {
  const std::string remedy =
      ", only contiguous tensors are supported yet. Register t.contiguous() instead (channels_last and transposed weights are such "
      "tensors).";
  CHECK(outcome_with_b(at::ones({2, 3}).t()) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has shape [3, 2] and strides [1, 3]" + remedy);
  CHECK(outcome_with_b(at::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has shape [2, 3, 4, 4] and strides [48, 1, 12, 3]" + remedy);
  CHECK(outcome_with_b(at::ones({1}).expand({3})) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it has shape [3] and strides [0]" + remedy);
  CHECK(outcome_with_b(at::ones({3})._neg_view()) ==
        "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': it is a negated view, which is not supported. "
        "Register t.resolve_neg() instead.");
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
  CHECK(with_pair(base.slice(0, 0, 0), base.slice(0, 0, 3)) == refused);
  std::array<float, 8> memory{};
  CHECK(with_pair(at::from_blob(memory.data(), {5}), at::from_blob(memory.data() + 4, {4})) == refused);
  CHECK(with_pair(at::from_blob(memory.data(), {4}), at::from_blob(memory.data() + 4, {4})) == "accepted");
  CHECK(with_pair(at::zeros({0}), at::zeros({0})) == "accepted");
  const at::Tensor none = at::zeros({0});
  CHECK(with_pair(none.detach(), none.detach()) == refused);
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
        subject + "has strides [0] and is not contiguous" + remedy);
  CHECK(outcome_with_gradient([] { return at::ones({2}).set_requires_grad(true) * 2; }) ==
        subject + "is part of a graph (backward with create_graph=true), which cannot be kept" + remedy);
  CHECK(outcome_with_gradient([] { return at::ones({2}); }) == "accepted");
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
  CHECK(outcome_with_state(at::zeros({4, 16}).t()) == subject + "has strides [1, 16] and is not contiguous" + remedy);
  CHECK(outcome_with_state(at::zeros({16, 4}).to_sparse()) ==
        subject + "is a Sparse tensor on cpu, only dense tensors on cpu are supported" + remedy);
  CHECK(outcome_with_state(at::zeros({16, 4}, at::TensorOptions().device(at::kMeta))) ==
        subject + "is a Strided tensor on meta, only dense tensors on cpu are supported" + remedy);
  CHECK(outcome_with_state(at::zeros({})) == "accepted");
  CHECK(outcome_with_state(at::zeros({16, 4}, at::kDouble)) == "accepted");
  CHECK(outcome_with_state(at::Tensor()) == "accepted");
}

TEST_CASE("plan: refuses options that are not supported yet, by name and value", "[plan][refusal]") {
  const std::string subject = "UNIMPLEMENTED: plan_fsdp, rank 1: options.";
  const std::string strategy_remedy = ", which is not supported yet. Use ShardingStrategy::kFullShard.";
  CHECK(outcome_with_options([](FsdpOptions& o) { o.strategy = ShardingStrategy::kShardGradOp; }) ==
        subject + "strategy is kShardGradOp" + strategy_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.strategy = ShardingStrategy::kShardOptimizer; }) ==
        subject + "strategy is kShardOptimizer" + strategy_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.strategy = ShardingStrategy::kNoShard; }) ==
        subject + "strategy is kNoShard" + strategy_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.unit_policy = UnitPolicy::by_size(100); }) ==
        subject + "unit_policy is by_size, which is not supported yet. Use automatic, by_module, by_type or whole_model.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.mixed_precision.param_dtype = at::kBFloat16; }) ==
        subject + "mixed_precision.param_dtype is bfloat16, but mixed precision is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.mixed_precision.reduce_dtype = at::kFloat; }) ==
        subject + "mixed_precision.reduce_dtype is float32, but mixed precision is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.replicate_group = c10::make_intrusive<c10d::ProcessGroup>(0, 1); }) ==
        subject + "replicate_group is set, but hybrid sharding is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.reshard_after_forward = false; }) ==
        subject + "reshard_after_forward is false, which is not supported yet. Leave it true.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.max_live_bytes = 4096; }) ==
        subject + "max_live_bytes is 4096, but a cap is not supported yet. Leave it unset: one unit is gathered at a time.");
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.ignored_parameters = {"a", "b."};
        }) == subject + "ignored_parameters names 'a', 'b.', but ignored parameters are not supported yet. Leave it empty.");
}

TEST_CASE("plan: refuses option values that make no sense", "[plan][refusal]") {
  const std::string subject = "INVALID_ARGUMENT: plan_fsdp, rank 1: options.";
  const std::string factor_remedy = ". Use a finite number other than 0, or leave it unset for the mean over the ranks.";
  CHECK(outcome_with_options([](FsdpOptions& o) { o.gradient_divide_factor = 0.0; }) ==
        subject + "gradient_divide_factor is 0" + factor_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.gradient_divide_factor = std::numeric_limits<double>::infinity(); }) ==
        subject + "gradient_divide_factor is inf" + factor_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.gradient_divide_factor = std::numeric_limits<double>::quiet_NaN(); }) ==
        subject + "gradient_divide_factor is nan" + factor_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.collective_timeout = std::chrono::milliseconds(0); }) ==
        subject + "collective_timeout is 0 ms. Use a positive time.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.prefetch_units = -1; }) == subject + "prefetch_units is -1. Use 0 or more.");
  const std::string rules_remedy = ". Both must be positive and quantum a multiple of slot; leave both 0 to have them chosen.";
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {3, 8};
        }) == subject + "layout_rules has slot 3 and quantum 8" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {0, 8};
        }) == subject + "layout_rules has slot 0 and quantum 8" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {8, 0};
        }) == subject + "layout_rules has slot 8 and quantum 0" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {-8, -8};
        }) == subject + "layout_rules has slot -8 and quantum -8" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.unit_policy = UnitPolicy::by_module(nullptr); }) ==
        subject + "unit_policy is by_module without a predicate. Give by_module a function.");
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.unit_policy =
              UnitPolicy::by_module([](const std::string&, const torch::nn::Module&) -> bool { throw std::runtime_error("no"); });
        }) == subject + "unit_policy's predicate threw: no. Give by_module a function that does not throw.");
}

TEST_CASE("plan: accepts every option that is supported or has no effect yet", "[plan][refusal]") {
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.sync_from_rank0 = false;
          o.gradient_divide_factor = -2.5;
          o.collective_timeout = std::chrono::milliseconds(1);
          o.prefetch_units = 3;
          o.coalesce = false;
          o.check_order = true;
          o.layout_rules = {4, 12};
          o.unit_policy = UnitPolicy::by_type<Bag>();
        }) == "accepted");
}

}  // namespace
}  // namespace rebind
