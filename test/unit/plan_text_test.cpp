#include "lib/plan/text.h"

#include <algorithm>
#include <memory>
#include <string>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <nlohmann/json.hpp>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using nlohmann::json;
using test::Bag;
using torch::optim::OptimizerParamGroup;

TEST_CASE("plan: the tables of a small model", "[plan][text]") {
  torch::nn::Linear model(7, 3);
  torch::optim::SGD sgd({OptimizerParamGroup({model->weight}), OptimizerParamGroup({model->bias})},
                        torch::optim::SGDOptions(1).momentum(0.9));
  const auto plan = plan_fsdp(*model, {&sgd}, /*rank=*/1, /*world_size=*/2);
  REQUIRE(plan.ok());
  CHECK("\n" + plan->to_string() == R"(
rank 1 of 2: 24 elements in 2 parameters, 1 unit

unit    dtype    parameters  elements  with padding  this rank  gathered
<root>  float32           2        24            32         16     128 B

parameter  shape   unit    offset  this rank  held by
weight     [3, 7]  <root>       0  [16, 21)   0.0[0]
bias       [3]     <root>      24  [0, 3)     0.1[0]
(held by: optimizer.group[index])

groups
  optimizers[0] SGD, group 0: 1 tensor, 21 elements -> 1 shard, 5 elements; lr=1 momentum=0.9 dampening=0 weight_decay=0 nesterov=0
  optimizers[0] SGD, group 1: 1 tensor, 3 elements -> 1 shard, 3 elements; lr=1 momentum=0.9 dampening=0 weight_decay=0 nesterov=0

memory of this rank
  parameters             64 B
  gradients              64 B
  optimizer state        32 B
  gathered, at most     128 B
  peak of prepare_fsdp  416 B

notes
  neighbours of equal state are one optimizer tensor
)");
}

TEST_CASE("plan: a table shows all names of a tied parameter, all its holders, and '-' for none", "[plan][text]") {
  Bag model({{"a", {2}}, {"b", {2}}});
  model.register_parameter("c", model["a"]);
  torch::optim::SGD first({model["a"]}, 0.1), second({model["a"]}, 0.1);
  const auto plan = plan_fsdp(model, {&first, &second}, 0, 1);
  REQUIRE(plan.ok());
  CHECK(plan->to_string().find("\na = c      [2]    <root>       0  [0, 2)     0.0[0] 1.0[0]\n"
                               "b          [2]    <root>       8  [0, 2)     -\n") != std::string::npos);
}

TEST_CASE("plan: the tables tell dtypes, what is frozen and other memory orders, where there are any", "[plan][text]") {
  Bag model({{"lora", {2, 4}}});
  model.register_parameter("base", at::ones({4, 4}), /*requires_grad=*/false);
  model.register_parameter("codes", at::ones({10}, at::kByte), false);
  model.register_parameter("kernel", at::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
  model.register_parameter("lone", at::ones({1, 3}).t());  // [3, 1]: the same in every order
  torch::optim::SGD sgd({model["lora"], at::ones({5})}, 0.1);
  const auto plan = plan_fsdp(model, {&sgd}, 0, 2);
  REQUIRE(plan.ok());
  const std::string text = plan->to_string();
  CHECK("\n" + text.substr(0, text.find("\ngroups")) == R"(
rank 0 of 2: 61 elements in 5 parameters, 1 unit

unit    dtype           parameters  elements  with padding  this rank  gathered
<root>  float32                  3        35            48         24     192 B
<root>  float32 frozen           1        16            16          8      64 B
<root>  uint8 frozen             1        10            16          8      16 B

parameter  shape                          dtype           unit    offset  this rank  held by
lora       [2, 4]                         float32         <root>       0  [0, 8)     0.0[0]
base       [4, 4]                         float32 frozen  <root>       0  [0, 8)     -
codes      [10]                           uint8 frozen    <root>       0  [0, 8)     -
kernel     [2, 3, 2, 2] by [12, 1, 6, 3]  float32         <root>       8  [0, 16)    -
lone       [3, 1]                         float32         <root>      32  -          -
(held by: optimizer.group[index]; by: strides, elements are counted in memory order)
)");
  CHECK(test::joined(plan->notes, "\n") ==
        "in no optimizer, sharded but never stepped: 'kernel', 'lone'\n"
        "of no given model, whole on every rank, gradients averaged: 'optimizers[0], group 0, params()[1]'\n"
        "neighbours of equal state are one optimizer tensor");
}

TEST_CASE("plan: a table of 10,000 parameters is shortened", "[plan][text]") {
  Bag model;
  for (int i = 0; i < 10000; ++i) model.register_parameter("p" + std::to_string(i), at::ones({1}));
  const auto plan = plan_fsdp(model, {}, 3, 1000);
  REQUIRE(plan.ok());
  const std::string text = plan->to_string();
  CHECK(std::count(text.begin(), text.end(), '\n') == 50);
  CHECK(text.find("\np23        [1]    <root>     184  -          -\n... 9,968 more ...\np9992      [1]    <root>  79,936  -       "
                  "   -\n") != std::string::npos);
  CHECK(text.find("\np9999 ") != std::string::npos);
  CHECK(text.find("in no optimizer, sharded but never stepped: 'p0', 'p1', 'p2' and 9,997 more") != std::string::npos);
}

TEST_CASE("plan: the JSON holds everything", "[plan][text]") {
  Bag model({{"w", {3, 2}}, {"b", {3}}});
  model.register_parameter("tied", model["w"]);
  torch::optim::SGD sgd({model["w"], model["b"]}, torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto plan = plan_fsdp(model, {&sgd}, 1, 2);
  REQUIRE(plan.ok());
  //   flat  0     6   8   11        16
  //         | w   |gap| b |  tail    |
  //   rank  | 0       | 1            |
  CHECK(json::parse(plan->to_json()) == json::parse(R"({
    "rank": 1, "world_size": 2,
    "units": [{"name": "<root>", "buffers": [{
      "dtype": "float32", "requires_grad": true, "parameters": [0, 1], "numel": 9, "padded_numel": 16, "shard_numel": 8}]}],
    "parameters": [
      {"names": ["w", "tied"], "model": 0, "sizes": [3, 2], "strides": [2, 1], "dtype": "float32", "requires_grad": true,
       "unit": 0, "buffer": 0, "offset": 0, "shard": [0, 0], "holders": [{"optimizer": 0, "group": 0, "index": 0}]},
      {"names": ["b"], "model": 0, "sizes": [3], "strides": [1], "dtype": "float32", "requires_grad": true,
       "unit": 0, "buffer": 0, "offset": 8, "shard": [0, 3], "holders": [{"optimizer": 0, "group": 0, "index": 1}]}],
    "memory": {"parameter_bytes": 32, "gradient_bytes": 32, "state_bytes": 12, "peak_gathered_bytes": 64,
               "prepare_peak_bytes": 196},
    "notes": ["neighbours of equal state are one optimizer tensor"],
    "groups": ["optimizers[0] SGD, group 0: 2 tensors, 9 elements -> 2 shards, 3 elements; )"
                                                    R"(lr=0.1 momentum=0.9 dampening=0 weight_decay=0 nesterov=0"]
  })"));
}

TEST_CASE("plan: names that are not UTF-8 do not break the JSON", "[plan][text]") {
  Bag model({{"w\xff", {1}}});
  const auto plan = plan_fsdp(model, {}, 0, 1);
  REQUIRE(plan.ok());
  CHECK(json::parse(plan->to_json())["parameters"][0]["names"][0] == "w\xef\xbf\xbd");
}

// 1,024 float32 parameters without padding: 4,096 B whole, 1,024 B on each of four ranks.
MemoryForecast forecast(torch::optim::Optimizer* optimizer, Bag& model, int world_size = 4) {
  const auto plan = plan_fsdp(model, optimizer == nullptr ? Optimizers{} : Optimizers{optimizer}, 0, world_size);
  REQUIRE(plan.ok());
  return plan->memory;
}

TEST_CASE("plan: memory follows parameters, gradients and the state to come", "[plan][memory]") {
  Bag model({{"w", {32, 32}}});
  torch::optim::AdamW adamw(model.parameters());
  const MemoryForecast fresh = forecast(&adamw, model);
  CHECK(fresh.parameter_bytes == 1024);
  CHECK(fresh.gradient_bytes == 1024);
  CHECK(fresh.state_bytes == 2048);  // exp_avg, exp_avg_sq
  CHECK(fresh.peak_gathered_bytes == 4096);
  CHECK(fresh.prepare_peak_bytes == 13312);  // 4096 + 4096/4 + 2 * 4096

  torch::optim::AdamW amsgrad(model.parameters(), torch::optim::AdamWOptions().amsgrad(true));
  CHECK(forecast(&amsgrad, model).state_bytes == 3072);
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(forecast(&sgd, model).state_bytes == 0);
  CHECK(forecast(nullptr, model).state_bytes == 0);
  CHECK(forecast(&adamw, model, 1).peak_gathered_bytes == 0);  // at world size 1 nothing is gathered
}

TEST_CASE("plan: memory of prepare counts the state and gradients that exist", "[plan][memory]") {
  Bag model({{"w", {32, 32}}});
  torch::optim::AdamW adamw(model.parameters());
  model["w"].mutable_grad() = at::ones({32, 32});
  adamw.step();
  const MemoryForecast stepped = forecast(&adamw, model);
  CHECK(stepped.state_bytes == 2048);
  // Whole: parameter, gradient and two moments, 4 * 4096; the same divided by 4; two units.
  CHECK(stepped.prepare_peak_bytes == 16384 + 4096 + 8192);
}

TEST_CASE("plan: memory counts state in its own dtype, and once for two groups of one optimizer", "[plan][memory]") {
  Bag model({{"w", {32, 32}}}, at::kBFloat16);
  torch::optim::AdamW adamw({OptimizerParamGroup({model["w"]}), OptimizerParamGroup({model["w"]})});
  CHECK(forecast(&adamw, model).state_bytes == 1024);  // two bfloat16 moments of 256 elements
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(1).exp_avg(at::zeros({32, 32}, at::kFloat)).exp_avg_sq(at::zeros({32, 32}, at::kFloat));
  adamw.state()[model["w"].unsafeGetTensorImpl()] = std::move(state);
  CHECK(forecast(&adamw, model).state_bytes == 2048);  // two float32 moments of 256 elements
}

TEST_CASE("plan: memory does not count 0-dim state as shaped like its parameter", "[plan][memory]") {
  Bag model({{"w", {32, 32}}}, at::kBFloat16);
  torch::optim::AdamW adamw(model.parameters());
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(1).exp_avg(at::zeros({})).exp_avg_sq(at::zeros({32, 32}, at::kFloat));
  adamw.state()[model["w"].unsafeGetTensorImpl()] = std::move(state);
  CHECK(forecast(&adamw, model).state_bytes == 1024 + 512);  // one moment is there, in float32; one is to come, in bfloat16
}

TEST_CASE("plan: memory of gathering is that of the units in flight, the largest, with padding", "[plan][memory]") {
  Bag model({{"w", {3}}});
  model.register_module("large", std::make_shared<Bag>(Bag({{"w", {100}}})));
  model.register_module("middle", std::make_shared<Bag>(Bag({{"w", {50}}})));
  FsdpOptions options;
  options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
  const auto memory = [&](int prefetch_units) {
    options.prefetch_units = prefetch_units;
    const auto plan = plan_fsdp(model, {}, 0, 3, options);
    REQUIRE(plan.ok());
    return plan->memory;
  };
  // Padded: 24, 120 and 72 elements.
  CHECK(memory(1).parameter_bytes == 4 * (8 + 40 + 24));
  CHECK(memory(0).peak_gathered_bytes == 4 * 120);
  CHECK(memory(1).peak_gathered_bytes == 4 * (120 + 72));
  CHECK(memory(2).peak_gathered_bytes == 4 * (120 + 72 + 24));
  CHECK(memory(1000).peak_gathered_bytes == 4 * (120 + 72 + 24));
  CHECK(memory(1).prepare_peak_bytes == 4 * 153 + 4 * (8 + 40 + 24) + 2 * 4 * 120);
}

TEST_CASE("plan: memory of a unit with several dtypes: each buffer is gathered by itself, in its own size", "[plan][memory]") {
  Bag model({{"w", {32, 32}}});
  model.register_parameter("half", at::ones({32, 32}, at::kBFloat16));
  model.register_parameter("bytes", at::ones({32, 32}, at::kByte), /*requires_grad=*/false);
  FsdpOptions options;
  options.prefetch_units = 0;
  const auto plan = plan_fsdp(model, {}, 0, 4, options);
  REQUIRE(plan.ok());
  CHECK(plan->memory.parameter_bytes == 1024 + 512 + 256);
  CHECK(plan->memory.gradient_bytes == 1024 + 512);
  CHECK(plan->memory.peak_gathered_bytes == 4096);
  CHECK(plan->memory.prepare_peak_bytes == 7168 + 1792 + 2 * 7168);
}

TEST_CASE("plan: memory of a frozen parameter has no gradient, and only the state that is there", "[plan][memory]") {
  Bag model({{"w", {32, 32}}});
  torch::optim::AdamW adamw(model.parameters());
  model["w"].set_requires_grad(false);
  CHECK(forecast(&adamw, model).gradient_bytes == 0);
  CHECK(forecast(&adamw, model).state_bytes == 0);
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(1).exp_avg(at::zeros({32, 32})).exp_avg_sq(at::zeros({32, 32}));
  adamw.state()[model["w"].unsafeGetTensorImpl()] = std::move(state);
  CHECK(forecast(&adamw, model).state_bytes == 2048);
}

TEST_CASE("plan: memory of the state of Adagrad and RMSprop", "[plan][memory]") {
  Bag model({{"w", {32, 32}}});
  torch::optim::Adagrad adagrad(model.parameters());
  CHECK(forecast(&adagrad, model).state_bytes == 1024);  // one sum, which is there already
  CHECK(forecast(&adagrad, model).prepare_peak_bytes == 4096 + 4096 + 1024 + 1024 + 8192);
  torch::optim::RMSprop plain(model.parameters());
  CHECK(forecast(&plain, model).state_bytes == 1024);
  torch::optim::RMSprop rmsprop(model.parameters(), torch::optim::RMSpropOptions().momentum(0.9).centered(true));
  CHECK(forecast(&rmsprop, model).state_bytes == 3072);
}

TEST_CASE("plan: memory counts tensors of no model whole", "[plan][memory]") {
  Bag model({{"w", {32, 32}}});
  const at::Tensor foreign = at::ones({100}).set_requires_grad(true);
  torch::optim::AdamW adamw({model["w"], foreign});
  const MemoryForecast memory = forecast(&adamw, model);
  CHECK(memory.parameter_bytes == 1024 + 400);
  CHECK(memory.gradient_bytes == 1024 + 400);
  CHECK(memory.state_bytes == 2048 + 800);
  CHECK(memory.peak_gathered_bytes == 4096);
  CHECK(memory.prepare_peak_bytes == 13312 + 400);
}

TEST_CASE("text: numbers, bytes and lists read well", "[plan][text]") {
  CHECK(count_text(0) == "0");
  CHECK(count_text(999) == "999");
  CHECK(count_text(1000) == "1,000");
  CHECK(count_text(1048576) == "1,048,576");
  CHECK(count_text(-1234567) == "-1,234,567");
  CHECK(count_text(-123) == "-123");
  CHECK(count_text(1, "shard") == "1 shard");
  CHECK(count_text(0, "shard") == "0 shards");
  CHECK(bytes_text(0) == "0 B");
  CHECK(bytes_text(1023) == "1023 B");
  CHECK(bytes_text(1024) == "1.00 KiB");
  CHECK(bytes_text(1536 * 1024) == "1.50 MiB");
  CHECK(bytes_text(int64_t{5} << 50) == "5.00 PiB");
  CHECK(bytes_text(int64_t{5} << 60) == "5120.00 PiB");
  CHECK(interval_text(3, 3) == "-");
  CHECK(interval_text(1000, 2000) == "[1000, 2000)");
  CHECK(some_of({"a"}) == "'a'");
  CHECK(some_of({"a", "b", "c"}) == "'a', 'b', 'c'");
  CHECK(some_of({"a", "b", "c", "d"}) == "'a', 'b', 'c' and 1 more");
}

TEST_CASE("text: dtypes have the names that Python gives them", "[plan][text]") {
  CHECK(dtype_text(at::kFloat) == "float32");
  CHECK(dtype_text(at::kDouble) == "float64");
  CHECK(dtype_text(at::kBFloat16) == "bfloat16");
  CHECK(dtype_text(at::kHalf) == "float16");
  CHECK(dtype_text(at::kLong) == "int64");
  CHECK(dtype_text(at::kInt) == "int32");
  CHECK(dtype_text(at::kShort) == "int16");
  CHECK(dtype_text(at::kChar) == "int8");
  CHECK(dtype_text(at::kByte) == "uint8");
  CHECK(dtype_text(at::kBool) == "bool");
  CHECK(dtype_text(at::kComplexHalf) == "complex32");
  CHECK(dtype_text(at::kComplexFloat) == "complex64");
  CHECK(dtype_text(at::kComplexDouble) == "complex128");
}

}  // namespace
}  // namespace rebind::plan
