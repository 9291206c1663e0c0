// A plan is a matter of names and sizes: it is quick, and looks at no element.
#include <ctime>
#include <memory>
#include <string>

#include <torch/optim/adamw.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind {
namespace {

using test::Bag;
using test::without_memory;

// 10,000 parameters in 625 blocks of 8 layers, none of which has memory.
struct Large {
  Large() {
    auto blocks = model.register_module("blocks", std::make_shared<Bag>());
    for (int b = 0; b < 625; ++b) {
      auto block = blocks->register_module(std::to_string(b), std::make_shared<Bag>());
      for (int l = 0; l < 8; ++l) {
        auto layer = block->register_module("layer" + std::to_string(l), std::make_shared<Bag>());
        layer->register_parameter("weight", without_memory({1000 + 10 * l, 1000}));
        layer->register_parameter("bias", without_memory({1000 + 10 * l}));
      }
    }
    std::vector<at::Tensor> decay, no_decay;
    for (const auto& item : model.named_parameters()) (item.key().ends_with("bias") ? no_decay : decay).push_back(item.value());
    adamw = std::make_unique<torch::optim::AdamW>(std::vector<torch::optim::OptimizerParamGroup>{decay, no_decay},
                                                  torch::optim::AdamWOptions());
  }
  Bag model;
  std::unique_ptr<torch::optim::AdamW> adamw;
};

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

TEST_CASE("plan: one rank of 1,000 plans 10,000 parameters in a moment, for every policy", "[plan][speed]") {
  Large large;
  const auto plan_with = [&](const UnitPolicy& policy, size_t units) {
    FsdpOptions options;
    options.unit_policy = policy;
    const double start = cpu_seconds();
    const auto plan = plan_fsdp(large.model, {large.adamw.get()}, 999, 1000, options);
    const double seconds = cpu_seconds() - start;
    REQUIRE(plan.ok());
    CHECK(plan->parameters.size() == 10000);
    CHECK(plan->units.size() == units);
    CAPTURE(seconds);
    CHECK(seconds < 5);  // under one in a Release build; this is also run in slow ones
  };
  plan_with(UnitPolicy::automatic(), 625);
  plan_with(UnitPolicy::by_size(1000000), 5000);
  plan_with(UnitPolicy::by_type<Bag>(), 5000);
  plan_with(UnitPolicy::whole_model(), 1);
}

TEST_CASE("plan: the tables and the JSON of 10,000 parameters are made in a moment", "[plan][speed]") {
  Large large;
  const auto plan = plan_fsdp(large.model, {large.adamw.get()}, 999, 1000);
  REQUIRE(plan.ok());
  const double start = cpu_seconds();
  CHECK(plan->to_string().size() > 1000);
  CHECK(plan->to_json().size() > 1000000);
  CHECK(cpu_seconds() - start < 5);
}

TEST_CASE("plan: no element is looked at, not of parameters, gradients, buffers or state", "[plan]") {
  Bag model;
  model.register_parameter("w", without_memory({1000, 1000}));
  model.register_parameter("frozen", without_memory({1000}, at::kLong), /*requires_grad=*/false);
  model.register_buffer("mean", without_memory({1000}));
  model["w"].mutable_grad() = without_memory({1000, 1000});
  torch::optim::AdamW adamw({model["w"], without_memory({7}).set_requires_grad(true)});
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(3).exp_avg(without_memory({1000, 1000})).exp_avg_sq(without_memory({1000, 1000}));
  adamw.state()[model["w"].unsafeGetTensorImpl()] = std::move(state);
  const auto plan = plan_fsdp(model, {&adamw}, 1, 2);
  REQUIRE(plan.ok());
  CHECK(plan->memory.state_bytes == 8 * 499776 + 56);
  CHECK(model["w"].unsafeGetTensorImpl()->unsafe_storage().nbytes() == 0);
}

}  // namespace
}  // namespace rebind
