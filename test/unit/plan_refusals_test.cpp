// What a plan refuses of models and optimizers, with its whole text. Tensors: plan_refusals_tensors_test.cpp, options:
// plan_refusals_options_test.cpp.
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_outcome.h"

namespace rebind {
namespace {

using test::Bag;
using test::outcome;
using torch::optim::OptimizerParamGroup;

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
  MySgd derived(model.parameters(), 0.1);
  CHECK(outcome(plan_fsdp(model, {&sgd, &lbfgs}, 0, 1)) ==
        "UNIMPLEMENTED: plan_fsdp, rank 0: torch::optim::LBFGS, optimizers[1]: LBFGS looks across all parameters at once, so it "
        "cannot "
        "run on shards. Use SGD, Adam, AdamW, Adagrad or RMSprop, or train without sharding.");
  const std::string remedy =
      ": this type of optimizer is not supported yet. Use torch::optim::SGD, Adam, AdamW, Adagrad or RMSprop itself, not a class "
      "derived from it.";
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

TEST_CASE("plan: refuses an undefined tensor in an optimizer, by position", "[plan][refusal]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"]}), OptimizerParamGroup({model["a"], at::ones({4, 3})})}, 0.1);
  sgd.param_groups()[1].params()[1] = at::Tensor();
  CHECK(outcome(plan_fsdp(model, {&sgd}, 1, 2)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 1: SGD, optimizers[0], group 1, params()[1]: the tensor is undefined. Take it out of "
        "the group.");
}

TEST_CASE("plan: refuses an optimizer of another model; one without tensors is none", "[plan][refusal]") {
  Bag model({{"a", {2}}}), other({{"a", {2}}, {"b", {3}}});
  torch::optim::SGD ours(model.parameters(), 0.1);
  torch::optim::Adam theirs(other.parameters());
  CHECK(outcome(plan_fsdp(model, {&ours, &theirs}, 1, 2)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 1: Adam, optimizers[1]: no tensor in its groups is a parameter of a given model. "
        "Pass the optimizer that was built from this model's parameters, or leave this one out.");
  torch::optim::Adam none(std::vector<at::Tensor>{});
  CHECK(outcome(plan_fsdp(model, {&ours, &none}, 1, 2)) == "accepted");
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

}  // namespace
}  // namespace rebind
