// The gradient facade: reading, writing, clearing and clipping gradients as in the plain program. Cases D5, D6, D7, D8a, D10, D12,
// and what the plain program does that no case names.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using List = std::vector<std::shared_ptr<torch::optim::Optimizer>>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Adds `gradient` to the parameter's gradient through a real backward.
void give(const at::Tensor& parameter, const at::Tensor& gradient) { (parameter * gradient).sum().backward(); }

// The tightest layout: slots of one element, so that a few elements are spread over the ranks.
FsdpOptions tight() {
  FsdpOptions options;
  options.layout_rules = {1, 1};
  return options;
}

Setup with_momentum() {
  return net_with([](Net& net) { return List{std::make_shared<SGD>(net.parameters(), SGDOptions(0.1).momentum(0.9))}; });
}
Setup with_adamw() {
  return net_with([](Net& net) { return List{std::make_shared<AdamW>(net.parameters(), AdamWOptions(1e-2).weight_decay(0.1))}; });
}

}  // namespace

TEST_CASE("D5: clipping uses the global norm", "[cases][clip]") {
  // Shards with norms 3 and 4.
  for (int way : {0, 1, 2}) {
    CAPTURE(way);
    run_ranks(2, [&](int, Group group) {
      Bag model({{"a", {1}}, {"b", {1}}});
      SGD sgd(model.parameters(), 1);
      auto fsdp = prepare(model, {&sgd}, group, tight());
      give(model["a"], at::full({1}, 3.0f));
      give(model["b"], at::full({1}, 4.0f));
      double norm = 0;
      if (way == 0) norm = fsdp->clip_grad_norm(1);
      if (way == 1) norm = torch::nn::utils::clip_grad_norm_(model.parameters(), 1);
      if (way == 2) norm = torch::nn::utils::clip_grad_norm_(sgd.param_groups()[0].params(), 1);  // D12
      EXPECT_EQ(norm, 5.0);
      EXPECT(std::abs(model["a"].grad().item<float>() - 0.6) < 1e-6);
      EXPECT(std::abs(model["b"].grad().item<float>() - 0.8) < 1e-6);
      EXPECT(std::abs(fsdp->full_gradient("b")->item().toDouble() - 0.8) < 1e-6);
    });
  }
}

TEST_CASE("D6: the infinity norm is that of all ranks, empty shards included", "[cases][clip]") {
  for (int way : {0, 1}) {
    run_ranks(3, [&](int rank, Group group) {
      Bag model({{"a", {2}}, {"b", {1}}});
      SGD sgd(model.parameters(), 1);
      FsdpOptions options;
      options.layout_rules = {1, 2};  // a on rank 0, b on rank 1, nothing on rank 2
      options.coalesce = false;
      auto fsdp = prepare(model, {&sgd}, group, options);
      EXPECT_EQ(sgd.param_groups()[0].params()[1].numel(), rank == 1 ? 1 : 0);
      give(model["a"], at::tensor({4.0f, -7.0f}));
      give(model["b"], at::tensor({2.0f}));
      const double norm = way == 0 ? fsdp->clip_grad_norm(100, kInfinity)
                                   : torch::nn::utils::clip_grad_norm_(model.parameters(), 100, kInfinity);
      EXPECT_EQ(norm, 7.0);
      expect_same("a.grad", model["a"].grad().clone(), at::tensor({4.0f, -7.0f}));
    });
  }
}

TEST_CASE("D7: an overflow that one rank sees throws on all ranks and changes nothing", "[cases][clip]") {
  run_ranks(3, [&](int, Group group) {
    Bag model({{"a", {2}}, {"b", {2}}});
    SGD sgd(model.parameters(), 1);
    FsdpOptions options;
    options.layout_rules = {2, 2};  // rank 2 is empty
    auto fsdp = prepare(model, {&sgd}, group, options);
    give(model["a"], at::tensor({1.0f, 2.0f}));
    give(model["b"], at::tensor({std::numeric_limits<float>::infinity(), 2.0f}));
    const std::string text = EXPECT_THROWS(fsdp->clip_grad_norm(1, 2.0, /*error_if_nonfinite=*/true));
    EXPECT(text.find("the norm of the gradients is not finite; no gradient was changed") != std::string::npos);
    EXPECT_THROWS(torch::nn::utils::clip_grad_norm_(model.parameters(), 1, 2.0, true));
    expect_same("a.grad", model["a"].grad().clone(), at::tensor({1.0f, 2.0f}));
  });
}

TEST_CASE("D12: what would be a local answer over the optimizer's own list is an error", "[cases][clip]") {
  run_ranks(2, [&](int, Group group) {
    Bag model({{"a", {4}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group, tight());
    give(model["a"], at::tensor({1.0f, 2.0f, 3.0f, 4.0f}));
    const auto& params = sgd.param_groups()[0].params();
    const std::string text = EXPECT_THROWS(torch::nn::utils::clip_grad_norm_(params, 1, kInfinity));
    EXPECT(text.find("operator aten::abs, rank ") == 0);
    EXPECT(text.find("parameter 'a': an optimizer's list holds this rank's shard; its reduction is not the parameter's. "
                     "Use model->parameters(), or fsdp->clip_grad_norm(max_norm, norm_type).") != std::string::npos);
    EXPECT_THROWS(params[0].grad().sum());
    EXPECT_THROWS(params[0].norm());
    EXPECT_THROWS(params[0].grad().narrow(0, 0, 1).norm());
    EXPECT_EQ(params[0].grad().norm().item<float>(), std::sqrt(30.0f));
  });
}

TEST_CASE("clip: LibTorch's clipping over the model trains as in one process, with one gather a unit", "[clip]") {
  for (int world_size : {1, 2, 3}) {
    Program program{.make = with_adamw, .steps = 5, .prepare_at = 1};
    program.before_step = [](Setup& setup, int) { torch::nn::utils::clip_grad_norm_(setup.model->parameters(), 0.5); };
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
      trained.fsdp->reset_stats();
      auto [input, target] = rows(rank, 9, at::kFloat);
      at::mse_loss(trained.setup.forward(input), target).backward();
      EXPECT_EQ(trained.fsdp->stats().service_gathers, 0);
      const double norm = torch::nn::utils::clip_grad_norm_(trained.setup.model->parameters(), 1e-3);
      EXPECT(norm > 1e-3);  // it did clip
      EXPECT_EQ(trained.fsdp->stats().service_gathers, world_size == 1 ? 0 : 1);
      EXPECT(std::abs(trained.fsdp->clip_grad_norm(100) - 1e-3) < 1e-6);
    });
  }
}

TEST_CASE("clip: clip_grad_value_ reaches the shards", "[clip]") {
  for (int world_size : {1, 2}) {
    Program program{.make = with_momentum, .steps = 4};
    program.before_step = [](Setup& setup, int) { torch::nn::utils::clip_grad_value_(setup.model->parameters(), 0.01); };
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
    });
  }
}

TEST_CASE("clip: Fsdp::clip_grad_norm gives LibTorch's numbers for every p", "[clip]") {
  for (double p : {1.0, 2.0, 3.5, kInfinity}) {
    run_ranks(3, [&](int, Group group) {
      Bag plain({{"a", {3, 7}}, {"b", {1}}, {"c", {5}}}), model({{"a", {3, 7}}, {"b", {1}}, {"c", {5}}});
      SGD sgd(model.parameters(), 1);
      auto fsdp = prepare(model, {&sgd}, group);
      for (const char* name : {"a", "b"}) {
        const at::Tensor gradient = random_tensor(plain[name].sizes(), 5);
        give(plain[name], gradient);
        give(model[name], gradient);
      }
      const double expected = torch::nn::utils::clip_grad_norm_(plain.parameters(), 0.5, p);
      EXPECT(std::abs(fsdp->clip_grad_norm(0.5, p) - expected) < 1e-5 * expected);
      for (const char* name : {"a", "b"}) EXPECT(at::allclose(model[name].grad().clone(), plain[name].grad(), 1e-5, 1e-7));
      EXPECT(!model["c"].grad().defined());
      EXPECT_EQ(fsdp->stats().all_reduces, 1);
    });
  }
}

TEST_CASE("D8: several backwards before a step add up", "[cases]") {
  Program program{.make = with_momentum, .steps = 6};
  program.zero_grad = [](Setup& setup, int step) {
    if (step % 3 == 2) setup.optimizers[0]->zero_grad();
  };
  for (int world_size : {1, 2, 3}) {
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
    });
  }
}

TEST_CASE("D10: zero_grad of optimizer or model, to none or to zero, in any order", "[cases]") {
  using Clear = std::function<void(Setup&, int)>;
  const Clear clears[] = {
      [](Setup& setup, int) { setup.optimizers[0]->zero_grad(true); },
      [](Setup& setup, int) { setup.optimizers[0]->zero_grad(false); },
      [](Setup& setup, int) { setup.model->zero_grad(true); },
      [](Setup& setup, int) { setup.model->zero_grad(false); },
      [](Setup& setup, int step) { step % 2 == 0 ? setup.model->zero_grad(step % 4 == 0) : setup.optimizers[0]->zero_grad(step % 4 == 1); },
      [](Setup& setup, int step) {
        setup.model->zero_grad(step % 2 == 0);
        setup.optimizers[0]->zero_grad(step % 2 == 1);
      },
  };
  for (auto make : {with_momentum, with_adamw}) {
    for (size_t i = 0; i < std::size(clears); ++i) {
      for (int world_size : {1, 2}) {
        CAPTURE(i, world_size);
        const Program program{.make = make, .steps = 5, .prepare_at = 1, .zero_grad = clears[i]};
        const Snapshot expected = reference_w(program, world_size);
        run_ranks(world_size, [&](int rank, Group group) {
          Trained trained = train_sharded(program, rank, group);
          expect_same(snapshot(trained.setup, *trained.fsdp), expected);
        });
      }
    }
  }
}

TEST_CASE("gradient: cleared on one side, it is gone on the other", "[gradient]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int, Group group) {
      Bag model({{"a", {5}}, {"b", {1}}});
      SGD sgd(model.parameters(), 1);
      auto fsdp = prepare(model, {&sgd}, group, one_tensor_each());
      const auto& params = sgd.param_groups()[0].params();
      for (bool by_model : {false, true}) {
        give(model["a"], at::ones({5}));
        EXPECT(model["a"].grad().defined());
        EXPECT(params[0].grad().defined());
        EXPECT(!model["b"].grad().defined());
        EXPECT(!params[1].grad().defined());
        by_model ? model.zero_grad() : sgd.zero_grad();
        EXPECT(!model["a"].grad().defined());
        EXPECT(!params[0].grad().defined());
        EXPECT_EQ(fsdp->full_gradient("a").status().code(), absl::StatusCode::kNotFound);
      }
      give(model["a"], at::ones({5}));
      model["a"].mutable_grad() = at::Tensor();
      EXPECT(!params[0].grad().defined());
      sgd.step();
      expect_same("a", *fsdp->full_parameter("a"), at::ones({5}));
    });
  }
}

TEST_CASE("gradient: read and written through the model's parameter", "[gradient]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](int, Group group) {
      Bag model({{"a", {3, 7}}, {"b", {1}}});
      SGD sgd(model.parameters(), 1);
      auto fsdp = prepare(model, {&sgd}, group);
      const at::Tensor gradient = random_tensor({3, 7}, 4).mul_(8).round_().div_(8);  // sums and thirds of it are exact
      give(model["a"], gradient);
      expect_same("read", model["a"].grad().clone(), gradient);
      EXPECT_EQ(model["a"].grad()[1][2].item<float>(), gradient[1][2].item<float>());
      {
        at::NoGradGuard no_grad;
        model["a"].mutable_grad().add_(at::ones({3, 7}));
        model["a"].mutable_grad()[2].zero_();  // a view
        model["a"].grad().mul_(2);
      }
      at::Tensor expected = gradient + 1;
      expected[2].zero_();
      expected.mul_(2);
      expect_same("written", model["a"].grad().clone(), expected);
      expect_same("on the shards", *fsdp->full_gradient("a"), expected);
      sgd.step();
      expect_same("used", *fsdp->full_parameter("a"), at::ones({3, 7}).sub(expected));
    });
  }
}

TEST_CASE("gradient: an assigned gradient is an error at the next use, not a lost step", "[gradient]") {
  run_ranks(2, [&](int, Group group) {
    Bag model({{"a", {5}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    model["a"].mutable_grad() = at::ones({5});
    sgd.step();
    const std::string text = EXPECT_THROWS(model["a"].sum());
    EXPECT(text.find("parameter 'a': its gradient was assigned from outside; the optimizer, which holds the shard, would not see it. "
                     "Write into the gradient that is there (parameter.grad().copy_())") != std::string::npos);
    model["a"].mutable_grad().reset();
    EXPECT_EQ(model["a"].sum().item<float>(), 5.0f);
  });
}

TEST_CASE("gradient: handles that the program keeps across zero_grad never come back to life", "[gradient]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int, Group group) {
      Bag model({{"a", {5}}});
      SGD sgd(model.parameters(), 1);
      auto fsdp = prepare(model, {&sgd}, group);
      at::Tensor& shard = sgd.param_groups()[0].params()[0];
      give(model["a"], at::ones({5}));
      const at::Tensor kept_shard_gradient = shard.grad();
      sgd.zero_grad();
      give(model["a"], at::full({5}, 2.0f));
      expect_same("after optimizer.zero_grad", *fsdp->full_gradient("a"), at::full({5}, 2.0f));
      EXPECT(at::equal(kept_shard_gradient.clone(), at::ones_like(kept_shard_gradient)));
      const at::Tensor kept = model["a"].grad();
      model.zero_grad();
      give(model["a"], at::full({5}, 3.0f));
      expect_same("after model.zero_grad", *fsdp->full_gradient("a"), at::full({5}, 3.0f));
      EXPECT_THROWS(kept.sum());
      const at::Tensor kept_again = model["a"].grad();
      model.zero_grad();
      EXPECT_THROWS(sgd.step());
      expect_same("a", *fsdp->full_parameter("a"), at::ones({5}));
    });
  }
}

TEST_CASE("gradient: create_graph into .grad is refused by name; autograd::grad is right", "[gradient]") {
  run_ranks(2, [&](int, Group group) {
    Bag model({{"a", {5}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    for (int again : {0, 1}) {
      const at::Tensor loss = (model["a"] * model["a"] * model["a"]).sum();
      const std::string text = EXPECT_THROWS(loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true));
      EXPECT(text.find("parameter 'a': a gradient that has a graph cannot be kept in .grad of a shard. Use torch::autograd::grad") !=
             std::string::npos);
      if (again == 0) give(model["a"], at::ones({5}));
    }
    sgd.zero_grad();
    const at::Tensor loss = (model["a"] * model["a"] * model["a"]).sum();
    const at::Tensor first = torch::autograd::grad({loss}, {model["a"]}, {}, true, true)[0];
    const at::Tensor second = torch::autograd::grad({first.sum()}, {model["a"]})[0];
    expect_same("second derivative", second.detach().clone(), at::full({5}, 6.0f));
    EXPECT(!model["a"].grad().defined());
  });
}

TEST_CASE("gradient: defined at prepare, it is carried and added to", "[gradient]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](int rank, Group group) {
      Bag model({{"a", {3, 7}}, {"b", {2}}});
      SGD sgd(model.parameters(), 1);
      give(model["a"], at::full({3, 7}, 10.0f));
      auto fsdp = prepare(model, {&sgd}, group);
      EXPECT(!model["b"].grad().defined());
      expect_same("carried", model["a"].grad().clone(), at::full({3, 7}, 10.0f));
      give(model["a"], at::full({3, 7}, static_cast<float>(rank)));
      expect_same("added", model["a"].grad().clone(), at::full({3, 7}, 10 + (group->getSize() - 1) / 2.0f));
    });
  }
}

TEST_CASE("gradient: undefined where no rank made one, whole where one rank did", "[gradient]") {
  run_ranks(2, [&](int rank, Group group) {
    Bag model({{"a", {5}}, {"b", {5}}, {"c", {1}}});
    AdamW adam(model.parameters(), AdamWOptions(0.1).weight_decay(0.5));
    auto fsdp = prepare(model, {&adam}, group);
    at::Tensor loss = (model["a"] * 2).sum();
    if (rank == 1) loss = loss + (model["b"] * 4).sum();
    loss.backward();
    EXPECT(!model["c"].grad().defined());
    expect_same("b", model["b"].grad().clone(), at::full({5}, 2.0f));
    adam.step();
    expect_same("c is not decayed", *fsdp->full_parameter("c"), at::ones({1}));
    EXPECT_EQ(adam.state().size(), size_t{2});
  });
}

}  // namespace rebind::test
