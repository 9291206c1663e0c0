#include "lib/plan/census.h"

#include <memory>
#include <string>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using test::Bag;
using test::census_text;
using test::joined;
using test::render;
using torch::optim::OptimizerParamGroup;

std::string notes(const absl::StatusOr<FsdpPlan>& plan) {
  return render(plan, [](const FsdpPlan& p) { return joined(p.notes, "\n"); });
}

std::string outcome(const absl::StatusOr<FsdpPlan>& plan) {
  return render(plan, [](const FsdpPlan&) { return std::string("accepted"); });
}

// a.weight and b.weight are one tensor.
struct Tied : Bag {
  Tied() {
    a = register_module("a", std::make_shared<Bag>(Bag({{"weight", {2, 2}}, {"bias", {2}}})));
    b = register_module("b", std::make_shared<Bag>());
    b->register_parameter("weight", (*a)["weight"]);
  }
  std::shared_ptr<Bag> a, b;
};

TEST_CASE("census: parameters stand in the order and under the names of named_parameters", "[plan][census]") {
  torch::nn::Sequential inner(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  struct Outer : torch::nn::Module {
  } model;
  model.register_module("first", torch::nn::Linear(2, 3).ptr());
  model.register_module("inner", inner.ptr());
  model.register_parameter("own", at::ones({1}));  // named_parameters lists a module's own parameters before its children's

  const auto plan = plan_fsdp(model, {}, 0, 1);
  REQUIRE(plan.ok());
  CHECK(census_text(*plan) ==
        "own -  first.weight -  first.bias -  inner.0.weight -  inner.0.bias -  inner.1.weight -  inner.1.bias -");
  std::vector<std::string> keys;
  for (const auto& item : model.named_parameters()) keys.push_back(item.key());
  CHECK(joined(keys, " ") == "own first.weight first.bias inner.0.weight inner.0.bias inner.1.weight inner.1.bias");
}

TEST_CASE("census: an undefined parameter is left out", "[plan][census]") {
  Bag model({{"weight", {3}}});
  model.register_parameter("bias", at::Tensor(), /*requires_grad=*/false);
  CHECK(render(plan_fsdp(model, {}, 0, 1), census_text) == "weight -");
}

TEST_CASE("census: a tensor under two names is one parameter with both", "[plan][census]") {
  Tied model;
  torch::optim::SGD sgd({model.a->parameters()}, 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 1), census_text) == "a.weight=b.weight 0.0[0]  a.bias 0.0[1]");
}

TEST_CASE("census: a module registered in two places is one set of parameters", "[plan][census]") {
  Bag model;
  auto layer = std::make_shared<Bag>(Bag({{"weight", {2}}, {"bias", {2}}}));
  model.register_module("left", layer);
  model.register_module("right", layer);
  CHECK(render(plan_fsdp(model, {}, 0, 1), census_text) == "left.weight=right.weight -  left.bias=right.bias -");
}

TEST_CASE("census: a tensor that a group lists twice is held once, with a note", "[plan][census]") {
  Tied model;
  torch::optim::SGD sgd(model.parameters(), 1.0);  // parameters() lists the tied tensor under both of its names
  REQUIRE(sgd.param_groups()[0].params().size() == 3);
  const auto plan = plan_fsdp(model, {&sgd}, 0, 1);
  CHECK(render(plan, census_text) == "a.weight=b.weight 0.0[0]  a.bias 0.0[1]");
  CHECK(notes(plan) ==
        "optimizers[0], group 0 lists 'a.weight' twice: it will be stepped once\n"
        "neighbours of equal state are one optimizer tensor");
}

TEST_CASE("census: a tensor that a group lists three times is held once, with a note", "[plan][census]") {
  Bag model({{"x", {2}}});
  torch::optim::SGD sgd({model["x"], model["x"], model["x"]}, 1.0);
  FsdpOptions options;
  options.coalesce = false;
  CHECK(notes(plan_fsdp(model, {&sgd}, 0, 1, options)) == "optimizers[0], group 0 lists 'x' 3 times: it will be stepped once");
}

TEST_CASE("census: a parameter may be in no optimizer", "[plan][census]") {
  Bag model({{"a", {2}}, {"b", {2}}, {"c", {2}}, {"d", {2}}, {"e", {2}}});
  torch::optim::SGD sgd({model["b"]}, 0.1);
  const auto plan = plan_fsdp(model, {&sgd}, 0, 1);
  CHECK(render(plan, census_text) == "a -  b 0.0[0]  c -  d -  e -");
  CHECK(notes(plan) ==
        "in no optimizer, sharded but never stepped: 'a', 'c', 'd' and 1 more\n"
        "neighbours of equal state are one optimizer tensor");
}

TEST_CASE("census: a parameter in two optimizers lists both", "[plan][census]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  torch::optim::Adam adam({model["b"]});
  CHECK(render(plan_fsdp(model, {&sgd, &adam}, 0, 1), census_text) == "a 0.0[0]  b 0.0[1] 1.0[0]");
}

TEST_CASE("census: a parameter in two groups with equal options lists both", "[plan][census]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"]}), OptimizerParamGroup({model["b"], model["a"]})}, 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 1), census_text) == "a 0.0[0] 0.1[1]  b 0.1[0]");
}

TEST_CASE("census: a parameter in two groups with different options is refused", "[plan][census]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"]}), OptimizerParamGroup({model["b"], model["a"]})}, 0.1);
  static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[1].options()).momentum(0.5);
  CHECK(outcome(plan_fsdp(model, {&sgd}, 1, 2)) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 1: parameter 'a' (SGD, optimizers[0]): groups 0 and 1 both hold it with different "
        "options: "
        "lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0 and lr=0.1 momentum=0.5 dampening=0 weight_decay=0 nesterov=0. "
        "Keep it in one group.");
}

TEST_CASE("census: empty groups are kept in the plan", "[plan][census]") {
  Bag model({{"a", {2}}});
  torch::optim::SGD sgd({OptimizerParamGroup(std::vector<at::Tensor>{}), OptimizerParamGroup({model["a"]})}, 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 1), [](const FsdpPlan& p) { return joined(p.groups, "\n"); }) ==
        "optimizers[0] SGD, group 0: 0 tensors, 0 elements -> 0 shards, 0 elements; "
        "lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0\n"
        "optimizers[0] SGD, group 1: 1 tensor, 2 elements -> 1 shard, 2 elements; "
        "lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0");
}

TEST_CASE("census: with several models a name begins with its model's", "[plan][census]") {
  Bag generator({{"weight", {2}}}), critic({{"weight", {2}}, {"bias", {2}}});
  critic.register_parameter("shared", generator["weight"]);
  torch::optim::SGD sgd(critic.parameters(), 0.1);
  CHECK(render(plan_fsdp({{"generator", &generator}, {"critic", &critic}}, {&sgd}, 0, 1), census_text) ==
        "generator.weight=critic.shared 0.0[2]  critic.weight 0.0[0]  critic.bias 0.0[1]");
}

TEST_CASE("census: the step count is that of the first holder's state", "[plan][census]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  torch::optim::Adam adam(model.parameters());
  torch::optim::SGD sgd(model.parameters(), 0.1);
  model["a"].mutable_grad() = at::ones({2});
  for (int i = 0; i < 7; ++i) adam.step();
  const auto adam_first = take_census({{"model", &model}}, {&adam, &sgd}, {});
  REQUIRE(adam_first.ok());
  CHECK(adam_first->parameters[0].step == 7);
  CHECK(adam_first->parameters[1].step == 0);
  const auto sgd_first = take_census({{"model", &model}}, {&sgd, &adam}, {});
  REQUIRE(sgd_first.ok());
  CHECK(sgd_first->parameters[0].step == 0);
}

TEST_CASE("census: state of a tensor in no group is left alone, with a note", "[plan][census]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  torch::optim::Adam adam(model.parameters());
  for (at::Tensor& tensor : adam.param_groups()[0].params()) tensor.mutable_grad() = at::ones({2});
  adam.step();
  adam.param_groups()[0].params().pop_back();
  CHECK(notes(plan_fsdp(model, {&adam}, 0, 1)) ==
        "optimizers[0] has state for 1 tensor in none of its groups: it stays as it is\n"
        "in no optimizer, sharded but never stepped: 'b'\n"
        "neighbours of equal state are one optimizer tensor");
  CHECK(adam.state().size() == 2);
}

TEST_CASE("census: buffers are met by name, once per registration", "[plan][census]") {
  Bag generator({{"weight", {2}}}), critic({{"weight", {2}}});
  generator.register_module("norm", torch::nn::BatchNorm1d(3).ptr());
  critic.register_buffer("mask", at::ones({1}, at::kBool));
  critic.register_buffer("unset", at::Tensor());
  const auto census = take_census({{"g", &generator}, {"c", &critic}}, {}, {});
  REQUIRE(census.ok());
  std::vector<std::string> names;
  for_each_buffer(*census, [&](const std::string& name, const at::Tensor&) { names.push_back(name); });
  CHECK(joined(names, " ") == "g.norm.running_mean g.norm.running_var g.norm.num_batches_tracked c.mask");
}

TEST_CASE("census: a plan changes nothing and holds no tensor", "[plan][census]") {
  Bag model({{"a", {2}}});
  torch::optim::Adam adam(model.parameters());
  model["a"].mutable_grad() = at::ones({2});
  adam.step();
  const auto version = model["a"]._version();
  const auto uses = model["a"].use_count();
  const void* data = model["a"].const_data_ptr();
  const auto plan = plan_fsdp(model, {&adam}, 0, 2);
  REQUIRE(plan.ok());
  CHECK(model["a"]._version() == version);
  CHECK(model["a"].use_count() == uses);
  CHECK(model["a"].const_data_ptr() == data);
  CHECK(adam.param_groups()[0].params()[0].is_same(model["a"]));
  CHECK(adam.state().size() == 1);
}

}  // namespace
}  // namespace rebind::plan
