// What is planned for each kind of parameter, and for tensors that belong to no model.
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "lib/plan/census.h"
#include "lib/plan/refuse.h"
#include "lib/plan/text.h"
#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using test::Bag;
using test::buffers_text;
using test::census_text;
using test::joined;
using test::render;
using test::shards_text;
using torch::optim::OptimizerParamGroup;

// "float32: a c of 16 | int64 frozen: b of 16"
std::string kinds_text(const FsdpPlan& plan) {
  std::vector<std::string> texts;
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      std::string text = dtype_text(buffer.dtype) + (buffer.requires_grad ? ":" : " frozen:");
      for (const int p : buffer.parameters) text += " " + plan.parameters[static_cast<size_t>(p)].names.front();
      texts.push_back(text + " of " + std::to_string(buffer.padded_numel));
    }
  }
  return joined(texts, " | ");
}

std::string groups_and_notes(const absl::StatusOr<FsdpPlan>& plan) {
  return render(plan, [](const FsdpPlan& p) { return joined(p.groups, "\n") + "\n" + joined(p.notes, "\n"); });
}

TEST_CASE("plan: a unit has a buffer for each dtype, and one for what is frozen of it", "[plan][kinds]") {
  Bag model({{"w", {4}}});
  model.register_parameter("frozen", at::ones({5}), /*requires_grad=*/false);
  model.register_parameter("half", at::ones({3}, at::kBFloat16));
  model.register_parameter("double", at::ones({2}, at::kDouble));
  model.register_parameter("bytes", at::ones({9}, at::kByte), false);
  model.register_parameter("flags", at::ones({1}, at::kBool), false);
  model.register_parameter("index", at::ones({17}, at::kLong), false);
  model.register_parameter("bias", at::ones({4}));
  CHECK(render(plan_fsdp(model, {}, 0, 2), kinds_text) ==
        "float32: w bias of 16 | float32 frozen: frozen of 16 | bfloat16: half of 16 | float64: double of 16 | uint8 frozen: bytes "
        "of "
        "16 | bool frozen: flags of 16 | int64 frozen: index of 32");
  CHECK(render(plan_fsdp(model, {}, 1, 2), shards_text) ==
        "w -  frozen -  half -  double -  bytes [8,9)  flags -  index [16,17)  bias [0,4)");
}

TEST_CASE("plan: a parameter keeps its strides and is cut in its memory order", "[plan][kinds]") {
  Bag model;
  model.register_parameter("image", at::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
  model.register_parameter("turned", at::ones({2, 3}).t());
  const auto plan = plan_fsdp(model, {}, 0, 2);
  REQUIRE(plan.ok());
  CHECK(plan->parameters[0].sizes == std::vector<int64_t>{2, 3, 2, 2});
  CHECK(plan->parameters[0].strides == std::vector<int64_t>{12, 1, 6, 3});
  CHECK(plan->parameters[1].sizes == std::vector<int64_t>{3, 2});
  CHECK(plan->parameters[1].strides == std::vector<int64_t>{1, 3});
  CHECK(shards_text(*plan) == "image [0,16)  turned -");
  CHECK(buffers_text(*plan) == "<root>: image@0 turned@24 of 32");
}

TEST_CASE("plan: parameters of one element without dimensions, and of none", "[plan][kinds]") {
  Bag model({{"scalar", {}}, {"none", {0}}, {"flat", {3, 0}}, {"w", {2}}});
  CHECK(render(plan_fsdp(model, {}, 0, 3), shards_text) == "scalar [0,1)  none -  flat -  w -");
  CHECK(render(plan_fsdp(model, {}, 1, 3), shards_text) == "scalar -  none -  flat -  w [0,2)");
  Bag only_none({{"none", {0}}});
  CHECK(render(plan_fsdp(only_none, {}, 1, 2), buffers_text) == "<root>: none@0 of 0");
}

TEST_CASE("plan: two parameters without elements are two entries", "[plan][kinds][A6]") {
  Bag model;
  model.register_parameter("first", at::zeros({0}));
  model.register_parameter("second", at::zeros({0}));
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 2), census_text) == "first 0.0[0]  second 0.0[1]");
}

TEST_CASE("plan: more ranks than elements leave ranks without any", "[plan][kinds]") {
  Bag model({{"w", {10}}, {"b", {1}}});
  CHECK(render(plan_fsdp(model, {}, 0, 4), shards_text) == "w [0,8)  b -");
  CHECK(render(plan_fsdp(model, {}, 1, 4), shards_text) == "w [8,10)  b -");
  CHECK(render(plan_fsdp(model, {}, 2, 4), shards_text) == "w -  b [0,1)");
  CHECK(render(plan_fsdp(model, {}, 3, 4), shards_text) == "w -  b -");
  CHECK(render(plan_fsdp(model, {}, 999, 1000), shards_text) == "w -  b -");
}

TEST_CASE("census: a tensor of no model is foreign, once, with all places that hold it", "[plan][census][foreign]") {
  Bag model({{"a", {2}}});
  const at::Tensor x = at::ones({4, 3}), y = at::ones({5});
  torch::optim::SGD sgd({OptimizerParamGroup({y, model["a"]}), OptimizerParamGroup({x, y})}, 0.1);
  torch::optim::Adam adam({model["a"], x});
  const auto census = take_census({{"model", &model}}, {&sgd, &adam}, {});
  REQUIRE(census.ok());
  REQUIRE(census->foreign.size() == 2);
  CHECK(census->foreign[0].tensor.is_same(y));
  CHECK(test::holders_text(census->foreign[0].holders) == "0.0[0] 0.1[1]");
  CHECK(census->foreign[1].tensor.is_same(x));
  CHECK(test::holders_text(census->foreign[1].holders) == "0.1[0] 1.0[1]");
  CHECK(test::holders_text(census->parameters[0].holders) == "0.0[1] 1.0[0]");
}

TEST_CASE("plan: groups count tensors of no model apart, and a note says what becomes of them", "[plan][foreign]") {
  Bag model({{"a", {2}}});
  const at::Tensor x = at::ones({4, 3}), y = at::ones({5});
  torch::optim::SGD sgd({OptimizerParamGroup({x, model["a"], y}), OptimizerParamGroup({x, x})}, 0.1);
  CHECK(
      groups_and_notes(plan_fsdp(model, {&sgd}, 0, 2)) ==
      "optimizers[0] SGD, group 0: 3 tensors, 19 elements -> 1 shard, 2 elements, and 2 whole tensors, 17 elements; "
      "lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0\n"
      "optimizers[0] SGD, group 1: 2 tensors, 24 elements -> 0 shards, 0 elements, and 1 whole tensor, 12 elements; "
      "lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0\n"
      "optimizers[0], group 1 lists its params()[0], which belongs to no given model, twice: it will be stepped once\n"
      "of no given model, whole on every rank, gradients averaged: 'optimizers[0], group 0, params()[0]', 'optimizers[0], group 0, "
      "params()[2]'\n"
      "neighbours of equal state are one optimizer tensor");
}

TEST_CASE("census: a tensor of no model in two groups with different options is refused", "[plan][census][foreign]") {
  Bag model({{"a", {2}}});
  const at::Tensor x = at::ones({3});
  torch::optim::SGD sgd({OptimizerParamGroup({model["a"], x}), OptimizerParamGroup({x})}, 0.1);
  static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[1].options()).momentum(0.5);
  CHECK(render(plan_fsdp(model, {&sgd}, 1, 2), shards_text) ==
        "INVALID_ARGUMENT: plan_fsdp, rank 1: SGD, optimizers[0], group 1, params()[0]: groups 0 and 1 both hold it with different "
        "options: lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0 and lr=0.1 momentum=0.5 dampening=0 weight_decay=0 "
        "nesterov=0. Keep it in one group.");
}

TEST_CASE("agreement: tensors of no model are compared with their places and state", "[plan][agreement][foreign]") {
  Bag model({{"a", {2}}});
  const at::Tensor x = at::ones({4, 3}).set_requires_grad(true);
  torch::optim::Adam adam({model["a"], x});
  x.mutable_grad() = at::ones({4, 3});
  adam.step();
  const auto census = take_census({{"model", &model}}, {&adam}, {});
  REQUIRE(census.ok());
  const auto plan = make_plan(*census, 0, 2, {}, {});
  REQUIRE(plan.ok());
  std::vector<std::string> lines;
  for (const std::string& line : agreement_lines(*census, *plan, {})) {
    if (line.find("of no model") != std::string::npos) lines.push_back(line);
  }
  CHECK(joined(lines, "\n") ==
        "tensor 0 of no model: float32 [4, 3], strides [3, 1], requires_grad true, gradient defined\n"
        "tensor 0 of no model: in optimizers[0], group 0, params()[1], state exp_avg float32 [4, 3], exp_avg_sq float32 [4, 3], "
        "step 1");
}

TEST_CASE("plan: a frozen parameter in an optimizer gets a note", "[plan][kinds]") {
  Bag model({{"a", {2}}});
  model.register_parameter("frozen", at::ones({3}), false);
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 1), [](const FsdpPlan& p) { return joined(p.notes, "\n"); }) ==
        "frozen, never stepped, state kept as it is: 'frozen'\n"
        "neighbours of equal state are one optimizer tensor");
}

}  // namespace
}  // namespace rebind::plan
