// The failures A13, B1, B4, D3, E7 of other systems: optimizers' state that is there, partly there or made in the constructor, and
// what all ranks share after prepare.
#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/short_forms.h"

namespace rebind::test {
namespace {

using torch::optim::Adagrad;
using torch::optim::AdagradOptions;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::LBFGS;
using torch::optim::SGD;

// One step of LBFGS towards `target`.
void step_towards(LBFGS& lbfgs, Bag& model, double target) {
  lbfgs.step([&] {
    lbfgs.zero_grad();
    at::Tensor loss = (model["w"] - target).pow(2).sum();
    loss.backward();
    return loss;
  });
}

// `b` is used from step 3 on.
struct LateNet : torch::nn::Module {
  LateNet() {
    a = register_module("a", torch::nn::Linear(5, 3));
    b = register_module("b", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& input) { return step < 3 ? a(input) : a(input) + at::tanh(b(input)); }
  torch::nn::Linear a{nullptr}, b{nullptr};
  int step = 0;
};

template <class Optimizer, class Options>
std::function<Setup()> late(const Options& options) {
  return [options]() -> Setup {
    auto model = std::make_shared<LateNet>();
    randomize(*model, 1);
    return {model, {std::make_shared<Optimizer>(model->parameters(), options)}, [model](const at::Tensor& input) {
              return model->forward(input);
            }};
  };
}

void count_step(Setup& setup, int step) { static_cast<LateNet&>(*setup.model).step = step + 1; }

int64_t step_of(Fsdp& fsdp, const torch::optim::Optimizer& optimizer, const std::string& name) {
  auto step = fsdp.full_state(optimizer, name, "step");
  EXPECT_OK(step);
  return step->item<int64_t>();
}

}  // namespace

TEST_CASE("A13: LBFGS is refused on all ranks, fresh and after a step, and trains on", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    for (bool stepped : {false, true}) {
      CAPTURE(world_size, stepped);
      run_ranks(world_size, [&](int, Group group) {
        Bag model({{"w", {3}}}), twin({{"w", {3}}});
        LBFGS lbfgs(model.parameters()), twins(twin.parameters());
        if (stepped) step_towards(lbfgs, model, 4);
        if (stepped) step_towards(twins, twin, 4);
        const auto fsdp = prepare_fsdp(model, {&lbfgs}, group);
        EXPECT_EQ(
            fsdp.status().ToString(),
            "UNIMPLEMENTED: prepare_fsdp, rank 0: torch::optim::LBFGS, optimizers[0]: LBFGS looks across all parameters at once, "
            "so it cannot run on shards. Use SGD, Adam, AdamW, Adagrad or RMSprop, or train without sharding.");
        EXPECT_EQ(lbfgs.state().size(), stepped ? 1u : 0u);
        EXPECT(lbfgs.param_groups()[0].params()[0].is_same(model["w"]));
        step_towards(lbfgs, model, 7);
        step_towards(twins, twin, 7);
        EXPECT(!at::equal(model["w"], at::ones({3})));
        expect_same("w", model["w"], twin["w"]);
      });
    }
  }
}

TEST_CASE("B1: Adagrad's accumulator, made in its constructor, is used by the first step after prepare", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    for (bool coalesce : {false, true}) {
      CAPTURE(world_size, coalesce);
      run_ranks(world_size, [&](int, Group group) {
        Bag model({{"a", {5}}, {"b", {3}}, {"unused", {1}}});
        Adagrad adagrad(model.parameters(), AdagradOptions(1).initial_accumulator_value(1));
        FsdpOptions options;
        options.coalesce = coalesce;
        auto fsdp = prepare(model, {&adagrad}, group, options);
        const auto check_size = [&] {
          // A tensor of no elements may stand for a parameter that is another rank's, or for one that is joined with others now.
          for (const at::Tensor& tensor : adagrad.param_groups()[0].params()) {
            if (tensor.numel() > 0) EXPECT_EQ(adagrad.state().count(tensor.unsafeGetTensorImpl()), 1u);
          }
          if (!coalesce) EXPECT_EQ(adagrad.state().size(), 3u);
        };
        check_size();
        (model["a"].sum() + model["b"].sum()).backward();
        adagrad.step();
        check_size();
        const float moved = 1 - 0.70710678f;  // 1 - 1 / sqrt(1 + 1)
        EXPECT(at::allclose(*fsdp->full_parameter("a"), at::full({5}, moved), 0, 1e-7));
        EXPECT(at::allclose(*fsdp->full_parameter("b"), at::full({3}, moved), 0, 1e-7));
        EXPECT(at::equal(*fsdp->full_parameter("unused"), at::ones({1})));
        EXPECT(at::equal(*fsdp->full_state(adagrad, "a", "sum"), at::full({5}, 2.0f)));
        EXPECT(at::equal(*fsdp->full_state(adagrad, "unused", "sum"), at::ones({1})));
        EXPECT_EQ(step_of(*fsdp, adagrad, "a"), 1);
        EXPECT_EQ(step_of(*fsdp, adagrad, "unused"), 0);
        EXPECT_OK(fsdp->restore());
        EXPECT_EQ(adagrad.state().size(), 3u);
        EXPECT_EQ(adagrad.state().count(model["unused"].unsafeGetTensorImpl()), 1u);
      });
    }
  }
}

TEST_CASE("B4: a parameter without state at prepare starts at step 1, beside one that goes on", "[cases][kinds]") {
  const std::function<Setup()> makes[] = {
      late<Adam>(AdamOptions(1e-2).amsgrad(true)), late<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).momentum(0.9)),
      late<Adagrad>(AdagradOptions(0.1).lr_decay(0.1)), late<SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5))};
  for (int world_size : {1, 2, 3}) {
    for (size_t kind = 0; kind < std::size(makes); ++kind) {
      CAPTURE(world_size, kind);
      Program program{.make = makes[kind], .steps = 6, .prepare_at = 3, .before_step = count_step};
      const Snapshot expected = reference_w(program, world_size);
      run_ranks(world_size, [&](int rank, Group group) {
        Trained trained = train_sharded(program, rank, group);
        expect_same(snapshot(trained.setup, *trained.fsdp), expected);
        expect_sharded(trained.setup, *trained.fsdp);
        const auto& optimizer = *trained.setup.optimizers[0];
        if (kind != 0) return;
        EXPECT_EQ(step_of(*trained.fsdp, optimizer, "a.weight"), 6);
        EXPECT_EQ(step_of(*trained.fsdp, optimizer, "b.weight"), 3);
        EXPECT(optimizer.param_groups()[0].params().size() >= 2);
      });
    }
  }
}

TEST_CASE("D3: after training on different rows the ranks read the same parameters", "[cases][kinds]") {
  for (int world_size : {2, 3}) {
    const Program program{.make = net_with_momentum, .steps = 3};
    std::vector<std::vector<at::Tensor>> read(static_cast<size_t>(world_size));
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : trained.setup.model->parameters()) {
        read[static_cast<size_t>(rank)].push_back(parameter.clone());
      }
    });
    Setup start = net_with_momentum();
    for (size_t p = 0; p < read[0].size(); ++p) {
      for (const auto& of_rank : read) CHECK(at::equal(of_rank[p], read[0][p]));
    }
    CHECK_FALSE(at::equal(read[0][2], start.model->parameters()[2]));  // it did train
  }
}

TEST_CASE("E7: buffers become rank 0's in their own dtype", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int rank, Group group) {
      torch::nn::BatchNorm1d model(3);
      model->register_buffer("precise", at::full({2}, 0.1 + rank, at::kDouble));
      model->register_buffer("mask", at::full({2}, rank > 0, at::kBool));
      model->running_mean.fill_(0.25 + rank);
      model->num_batches_tracked.fill_(7 + rank);
      const at::Tensor mean = model->running_mean;
      SGD sgd(model->parameters(), 0.1);
      auto fsdp = prepare(*model, {&sgd}, group);
      EXPECT(model->running_mean.is_same(mean));
      expect_same("running_mean", model->running_mean, at::full({3}, 0.25f));
      expect_same("num_batches_tracked", model->num_batches_tracked, at::scalar_tensor(7, at::kLong));
      expect_same("precise", model->named_buffers()["precise"], at::full({2}, 0.1, at::kDouble));
      expect_same("mask", model->named_buffers()["mask"], at::zeros({2}, at::kBool));
    });
  }
}

}  // namespace rebind::test
