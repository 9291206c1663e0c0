// Sharded training gives what one process gives, bit for bit, before the first step and in mid-training.
#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using List = std::vector<std::shared_ptr<torch::optim::Optimizer>>;

Setup with_sgd() {
  return net_with([](Net& net) { return List{std::make_shared<torch::optim::SGD>(net.parameters(), 0.1)}; });
}
Setup with_momentum() {
  return net_with([](Net& net) {
    return List{std::make_shared<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true))};
  });
}
Setup with_adam() {
  return net_with([](Net& net) {
    return List{std::make_shared<torch::optim::Adam>(net.parameters(), torch::optim::AdamOptions(1e-2).amsgrad(true))};
  });
}
// Two optimizers, the first with two groups of other options.
Setup with_adamw() {
  return net_with([](Net& net) {
    using torch::optim::AdamWOptions;
    using torch::optim::OptimizerParamGroup;
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{net.first->weight, net.unused},
                        std::make_unique<AdamWOptions>(AdamWOptions(1e-2).betas({0.8, 0.9}).eps(1e-6).weight_decay(0.1).amsgrad(true)));
    groups.emplace_back(std::vector<at::Tensor>{net.first->bias, net.scale}, std::make_unique<AdamWOptions>(AdamWOptions(1e-3).weight_decay(0)));
    return List{std::make_shared<torch::optim::AdamW>(groups, AdamWOptions(1e-3)),
                std::make_shared<torch::optim::SGD>(net.second->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5))};
  });
}

UnitPolicy by_layer() {
  return UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return name == "first" || name == "second"; });
}

struct Case {
  const char* name;
  Setup (*make)();
};
const Case kCases[] = {{"SGD", with_sgd}, {"SGD with momentum", with_momentum}, {"Adam", with_adam}, {"AdamW and SGD", with_adamw}};

}  // namespace

TEST_CASE("train: sharded equals one process bit for bit", "[train][parity]") {
  for (const Case& test : kCases) {
    for (int world_size : {1, 2, 3}) {
      for (int prepare_at : {0, 3}) {
        for (bool layers : {false, true}) {
          CAPTURE(test.name, world_size, prepare_at, layers);
          Program program{.make = test.make, .steps = 6, .prepare_at = prepare_at};
          program.options.unit_policy = layers ? by_layer() : UnitPolicy::whole_model();
          const Snapshot expected = reference_w(program, world_size);
          run_ranks(world_size, [&](int rank, Group group) {
            Trained trained = train_sharded(program, rank, group);
            expect_same(snapshot(trained.setup, *trained.fsdp), expected);
            expect_sharded(trained.setup, *trained.fsdp);
          });
        }
      }
    }
  }
}

TEST_CASE("train: sharded stays within 1e-6 of one process on the joined batch", "[train][parity]") {
  for (const Case& test : kCases) {
    for (int world_size : {2, 3}) {
      CAPTURE(test.name, world_size);
      const Program program{.make = test.make, .steps = 6, .prepare_at = 2};
      const Snapshot expected = reference(program, world_size);
      run_ranks(world_size, [&](int rank, Group group) {
        Trained trained = train_sharded(program, rank, group);
        expect_close(snapshot(trained.setup, *trained.fsdp), expected, 1e-6);
      });
    }
  }
}

TEST_CASE("train: memory freed after every operator changes nothing", "[train][parity]") {
  runtime::set_strict_for_tests(true);
  const Program program{.make = with_adamw, .steps = 4, .prepare_at = 1};
  const Snapshot expected = reference_w(program, 2);
  run_ranks(2, [&](int rank, Group group) {
    Trained trained = train_sharded(program, rank, group);
    expect_same(snapshot(trained.setup, *trained.fsdp), expected);
  });
  runtime::set_strict_for_tests(false);
}

}  // namespace rebind::test
