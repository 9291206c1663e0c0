// The failures A1, A2, A9, A10, A11, A14, A15, B2, B3, D1, D2 of other systems, each with the value that is right.
#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;

// Gives every parameter of `model` the gradient `value` through a real backward.
void backward_with_gradient(torch::nn::Module& model, double value) {
  at::Tensor loss;
  for (const at::Tensor& parameter : model.parameters()) {
    const at::Tensor term = (parameter * value).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
}

at::Tensor whole(Fsdp& fsdp, const std::string& name) {
  auto tensor = fsdp.full_parameter(name);
  EXPECT_OK(tensor);
  return *tensor;
}

}  // namespace

TEST_CASE("A1: an optimizer built before prepare moves every parameter, and zero_grad clears what backward wrote", "[cases]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int rank, Group group) {
      torch::nn::Linear model(5, 3);
      randomize(*model, 7);
      const at::Tensor weight = model->weight.detach().clone(), bias = model->bias.detach().clone();
      SGD sgd(model->parameters(), /*lr=*/0.1);
      auto fsdp = prepare_fsdp(model, sgd, group);
      EXPECT_OK(fsdp);
      const at::Tensor input = random_tensor({2, 5}, 20 + rank);
      model->forward(input).sum().backward();
      EXPECT(model->weight.grad().defined());
      at::Tensor mean = at::zeros({3, 5});
      for (int r = 0; r < group->getSize(); ++r) mean += at::ones({3, 2}).mm(random_tensor({2, 5}, 20 + r));
      mean.div_(group->getSize());
      expect_same("weight.grad", model->weight.grad().clone(), mean);
      sgd.step();
      sgd.zero_grad();
      EXPECT(!model->weight.grad().defined());
      EXPECT(!sgd.param_groups()[0].params()[0].grad().defined());
      expect_same("weight", whole(**fsdp, "weight"), weight.add(mean, -0.1));
      expect_same("bias", whole(**fsdp, "bias"), bias.add(at::full({3}, 2.0), -0.1));
    });
  }
}

TEST_CASE("A2: two groups keep their options field by field, and their vectors", "[cases]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      torch::nn::Linear model(5, 3);
      const AdamWOptions decay = AdamWOptions(1e-2).betas({0.8, 0.9}).eps(1e-6).weight_decay(0.1).amsgrad(true);
      const AdamWOptions plain = AdamWOptions(1e-3).weight_decay(0);
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>{model->weight}, std::make_unique<AdamWOptions>(decay));
      groups.emplace_back(std::vector<at::Tensor>{model->bias}, std::make_unique<AdamWOptions>(plain));
      AdamW adam(groups);
      auto* options0 = &adam.param_groups()[0].options();
      auto* params1 = &adam.param_groups()[1].params();
      auto fsdp = prepare(*model, {&adam}, group);
      EXPECT_EQ(adam.param_groups().size(), size_t{2});
      EXPECT(&adam.param_groups()[0].options() == options0);
      EXPECT(&adam.param_groups()[1].params() == params1);
      EXPECT(static_cast<const AdamWOptions&>(adam.param_groups()[0].options()) == decay);
      EXPECT(static_cast<const AdamWOptions&>(adam.param_groups()[1].options()) == plain);
      EXPECT_EQ(adam.param_groups()[0].params().size(), size_t{1});
      EXPECT_EQ(params1->size(), size_t{1});
      EXPECT(!params1->front().is_same(model->bias));
      EXPECT_EQ(params1->front().dim(), 1);
    });
  }
}

TEST_CASE("A9: a tied weight listed twice in a group is stepped once", "[cases]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      struct Tied : torch::nn::Module {
        Tied() {
          weight = register_parameter("weight", at::ones({5}));
          register_parameter("again", weight);
        }
        at::Tensor weight;
      } model;
      SGD sgd(model.parameters(), /*lr=*/1);
      EXPECT_EQ(sgd.param_groups()[0].params().size(), size_t{2});
      auto fsdp = prepare(model, {&sgd}, group);
      EXPECT_EQ(sgd.param_groups()[0].params().size(), size_t{1});
      EXPECT(!fsdp->plan().notes.empty());
      EXPECT(model.named_parameters()["weight"].is_same(model.named_parameters()["again"]));
      (model.weight * 1.0).sum().backward();
      sgd.step();
      expect_same("weight", whole(*fsdp, "again"), at::zeros({5}));
      EXPECT_OK(fsdp->restore());
      EXPECT_EQ(sgd.param_groups()[0].params().size(), size_t{2});
      EXPECT(sgd.param_groups()[0].params()[1].is_same(model.weight));
    });
  }
}

TEST_CASE("A10: options changed in place after construction are those after prepare", "[cases]") {
  run_ranks(2, [](int, Group group) {
    torch::nn::Linear model(5, 3);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(model->parameters(), std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0.0)));
    AdamW adam(groups, AdamWOptions(1e-3).weight_decay(0.3));
    static_cast<AdamWOptions&>(adam.param_groups()[0].options()).lr(0.0625);
    auto fsdp = prepare(*model, {&adam}, group);
    const auto& options = static_cast<const AdamWOptions&>(adam.param_groups()[0].options());
    EXPECT_EQ(options.lr(), 0.0625);
    EXPECT_EQ(options.weight_decay(), 0.0);
    EXPECT_EQ(static_cast<const AdamWOptions&>(adam.defaults()).weight_decay(), 0.3);
  });
}

TEST_CASE("A11: a scheduler built before prepare, and stepped before and after, sets the rate that is used", "[cases]") {
  // Rates 0.1, 0.1 (the first step() of a StepLR only counts), 0.05, 0.025.
  const auto train = [](Group group) {
    torch::nn::Linear model(5, 3);
    randomize(*model, 7);
    SGD sgd(model->parameters(), /*lr=*/0.1);
    torch::optim::StepLR schedule(sgd, /*step_size=*/1, /*gamma=*/0.5);
    std::unique_ptr<Fsdp> fsdp;
    std::vector<double> rates;
    for (int step = 0; step < 4; ++step) {
      if (step == 1 && group != nullptr) fsdp = prepare(*model, {&sgd}, group);
      sgd.zero_grad();
      backward_with_gradient(*model, 0.3);
      sgd.step();
      rates.push_back(sgd.param_groups()[0].options().get_lr());
      schedule.step();
    }
    EXPECT(rates == std::vector<double>({0.1, 0.1, 0.05, 0.025}));
    return fsdp == nullptr ? model->weight.detach().clone() : whole(*fsdp, "weight");
  };
  const at::Tensor expected = train(nullptr);
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](int, Group group) { expect_same("weight", train(group), expected); });
  }
}

TEST_CASE("A14: ranks that start from different weights and moments become rank 0", "[cases]") {
  for (int world_size : {2, 3}) {
    Snapshot rank0;
    const auto make = [](int rank) {
      auto net = std::make_shared<Net>();
      randomize(*net, 100 * (rank + 1));
      auto adam = std::make_shared<Adam>(net->parameters(), AdamOptions(1e-2));
      Setup setup{net, {adam}, [net](const at::Tensor& input) { return net->forward(input); }};
      for (int step = 0; step < 2; ++step) {
        auto [input, target] = rows(rank, step, at::kFloat);
        at::mse_loss(setup.forward(input), target).backward();
        adam->step();
        adam->zero_grad();
      }
      return setup;
    };
    Setup first = make(0);
    const Snapshot expected = snapshot(first);
    run_ranks(world_size, [&](int rank, Group group) {
      Setup setup = make(rank);
      auto fsdp = prepare(*setup.model, setup.pointers(), group);
      expect_same(snapshot(setup, *fsdp), expected);
    });
    const auto errors = run_ranks_errors(world_size, [&](int rank, Group group) {
      Setup setup = make(rank);
      const Snapshot before = snapshot(setup);
      FsdpOptions options;
      options.sync_from_rank0 = false;
      auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group, options);
      EXPECT(!fsdp.ok());
      expect_same(snapshot(setup), before);
      throw std::runtime_error(std::string(fsdp.status().message()));
    });
    for (const std::string& error : errors) {
      CHECK_THAT(error, Catch::Contains("prepare_fsdp: parameter 'scale': rank 1 has other values than rank 0, and sync_from_rank0 is off. "
                                        "Start all ranks from the same values, or set options.sync_from_rank0."));
    }
  }
}

TEST_CASE("A15: models or options that differ are one error everywhere, and change nothing", "[cases]") {
  struct Difference {
    const char* name;
    std::function<void(int rank, Setup&)> make;
    const char* text;
  };
  const auto one_step = [](Setup& setup) {
    auto [input, target] = rows(0, 0, at::kFloat);
    at::mse_loss(setup.forward(input), target).backward();
    setup.optimizers[0]->step();
    setup.optimizers[0]->zero_grad();
  };
  const Difference differences[] = {
      {"another lr", [](int rank, Setup& setup) { if (rank == 1) setup.optimizers[0]->param_groups()[0].options().set_lr(0.5); }, "lr=0.5"},
      {"an extra bias", [](int rank, Setup& setup) { if (rank == 1) setup.model->register_parameter("extra", at::ones({2})); }, "extra"},
      {"a step on rank 0 only", [&](int rank, Setup& setup) { if (rank == 0) one_step(setup); }, "exp_avg"},
  };
  for (const Difference& difference : differences) {
    CAPTURE(difference.name);
    const auto errors = run_ranks_errors(2, [&](int rank, Group group) {
      Setup setup = net_with([](Net& net) {
        return std::vector<std::shared_ptr<torch::optim::Optimizer>>{std::make_shared<Adam>(net.parameters(), AdamOptions(1e-2))};
      });
      difference.make(rank, setup);
      const Snapshot before = snapshot(setup);
      const auto begin = std::chrono::steady_clock::now();
      auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
      EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
      EXPECT(!fsdp.ok());
      expect_same(snapshot(setup), before);
      one_step(setup);  // trains on unsharded
      throw std::runtime_error(std::string(fsdp.status().message()));
    });
    CHECK_THAT(errors[0], Catch::Contains("the ranks differ: rank 1 has "));
    CHECK_THAT(errors[0], Catch::Contains(difference.text));
    CHECK(errors[0].substr(errors[0].find("prepare_fsdp")) == errors[1].substr(errors[1].find("prepare_fsdp")));
  }
}

TEST_CASE("A15: a refusal on one rank is everyone's, and names that rank", "[cases]") {
  const auto errors = run_ranks_errors(3, [&](int rank, Group group) {
    torch::nn::Linear model(5, 3);
    if (rank == 2) model->bias.set_data(at::ones({1}).expand({3}));
    SGD sgd(model->parameters(), 0.1);
    auto fsdp = prepare_fsdp(model, sgd, group);
    EXPECT(!fsdp.ok());
    EXPECT(sgd.param_groups()[0].params()[0].is_same(model->weight));
    throw std::runtime_error(fsdp.status().ToString());
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Contains("UNIMPLEMENTED: prepare_fsdp, rank 2: parameter 'bias'"));
  }
}

TEST_CASE("A15: a rank that never calls is named by the others at the deadline", "[cases]") {
  const auto errors = run_ranks_errors(3, [&](int rank, Group group) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      return;
    }
    torch::nn::Linear model(5, 3);
    SGD sgd(model->parameters(), 0.1);
    FsdpOptions options;
    options.collective_timeout = std::chrono::milliseconds(400);
    auto fsdp = prepare_fsdp(model, sgd, group, options);
    EXPECT(!fsdp.ok());
    EXPECT(sgd.param_groups()[0].params()[0].is_same(model->weight));
    throw std::runtime_error(fsdp.status().ToString());
  });
  for (int rank : {0, 2}) {
    CHECK_THAT(errors[rank], Catch::Contains("DEADLINE_EXCEEDED: prepare_fsdp, rank 0: rank 1 did not make the call within 400 ms"));
  }
}

TEST_CASE("B2: prepare before the first step makes no state and moves nothing", "[cases]") {
  run_ranks(2, [](int, Group group) {
    torch::nn::Linear model(5, 3);
    randomize(*model, 3);
    const at::Tensor weight = model->weight.detach().clone();
    Adam adam(model->parameters(), AdamOptions(1e-3).weight_decay(0.1));
    auto fsdp = prepare(*model, {&adam}, group, one_tensor_each());
    EXPECT(adam.state().empty());
    expect_same("weight", whole(*fsdp, "weight"), weight);
    backward_with_gradient(*model, 1);
    adam.step();
    auto step = fsdp->full_state(adam, "bias", "step");
    EXPECT_OK(step);
    EXPECT_EQ(step->item<int64_t>(), 1);
    EXPECT_EQ(adam.state().size(), size_t{2});
  });
}

TEST_CASE("B3: the step counter stays an int64 on all ranks, on empty shards too", "[cases]") {
  run_ranks(3, [](int, Group group) {
    Bag model({{"a", {10}}, {"b", {1}}});
    Adam adam(model.parameters(), AdamOptions(1e-3));
    for (int step = 0; step < 7; ++step) {
      adam.zero_grad();
      backward_with_gradient(model, step % 2 == 0 ? 1 : -1);
      adam.step();
    }
    auto fsdp = prepare(model, {&adam}, group, one_tensor_each());
    int empty = 0;
    for (const at::Tensor& shard : adam.param_groups()[0].params()) {
      empty += shard.numel() == 0;
      EXPECT_EQ(static_cast<torch::optim::AdamParamState&>(*adam.state().at(shard.unsafeGetTensorImpl())).step(), int64_t{7});
    }
    // Flat: a at 0, b at 16; shards of 8: a [0,8) | a [8,10) | b.
    EXPECT_EQ(empty, 1);
    EXPECT_EQ(fsdp->full_state(adam, "b", "step")->item<int64_t>(), 7);
  });
}

TEST_CASE("D1: the gradient is the mean over the ranks", "[cases]") {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (int world_size : {2, 3}) {
      const double mean = world_size == 2 ? 1.5 : 2.0;
      run_ranks(world_size, [&](int rank, Group group) {
        Bag model({{"a", {3, 7}}, {"b", {1}}}, dtype);
        SGD sgd(model.parameters(), /*lr=*/1);
        auto fsdp = prepare(model, {&sgd}, group);
        backward_with_gradient(model, rank + 1);
        for (const char* name : {"a", "b"}) {
          auto gradient = fsdp->full_gradient(name);
          EXPECT_OK(gradient);
          expect_same(name, *gradient, at::full(model[name].sizes(), mean, dtype));
          expect_same(name, model[name].grad().clone(), at::full(model[name].sizes(), mean, dtype));
        }
        EXPECT_EQ(fsdp->stats().reduce_scatters, 1);
      });
    }
  }
}

TEST_CASE("D1: gradient_divide_factor replaces the world size", "[cases]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int rank, Group group) {
      Bag model({{"a", {3}}});
      SGD sgd(model.parameters(), /*lr=*/1);
      FsdpOptions options;
      options.gradient_divide_factor = 0.5;
      auto fsdp = prepare(model, {&sgd}, group, options);
      backward_with_gradient(model, rank + 1);
      expect_same("a", *fsdp->full_gradient("a"), at::full({3}, world_size == 1 ? 2.0 : 6.0));
    });
  }
}

TEST_CASE("D2: at world size 1 a parameter of one element in an inner module gets its gradient", "[cases]") {
  run_ranks(1, [](int, Group group) {
    torch::nn::Module model;
    auto inner = std::make_shared<Bag>();
    inner->register_parameter("w", at::ones({1}));
    model.register_module("inner", inner);
    SGD sgd(model.parameters(), /*lr=*/1);
    auto fsdp = prepare(model, {&sgd}, group);
    ((*inner)["w"] * 7).sum().backward();
    EXPECT_EQ((*inner)["w"].grad().item<float>(), 7.0f);
    sgd.step();
    EXPECT_EQ((*inner)["w"].item<float>(), -6.0f);
    EXPECT_EQ(fsdp->stats().all_gathers, 0);
    EXPECT_EQ(fsdp->stats().reduce_scatters, 0);
  });
}

TEST_CASE("counts: one gather and one reduce-scatter a unit and step, and the bytes of them", "[cases]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = net_with([](Net& net) {
      return std::vector<std::shared_ptr<torch::optim::Optimizer>>{std::make_shared<SGD>(net.parameters(), 0.1)};
    });
    FsdpOptions options;
    options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return name == "first" || name == "second"; });
    auto fsdp = prepare(*setup.model, setup.pointers(), group, options);
    for (int step = 0; step < 3; ++step) {
      fsdp->reset_stats();
      auto [input, target] = rows(rank, step, at::kFloat);
      at::mse_loss(setup.forward(input), target).backward();
      // Units: first (35 + 7, padded to 48), second (21 + 3, padded to 32), the rest (scale, unused: 16).
      // Forward gathers first, second, rest, which takes the place of first. Backward uses the rest and second, which are still
      // there, and not first: its input needs no gradient.
      EXPECT_EQ(fsdp->stats().all_gathers, 3);
      EXPECT_EQ(fsdp->stats().reduce_scatters, 3);
      EXPECT_EQ(fsdp->stats().gathered_bytes, (48 + 32 + 16) * 4);
      EXPECT_EQ(fsdp->stats().reduced_bytes, (48 + 32 + 16) * 4);
      EXPECT_EQ(fsdp->stats().peak_live_bytes, (48 + 32) * 4);
      EXPECT_EQ(fsdp->stats().live_bytes, 0);
      setup.optimizers[0]->step();
      setup.optimizers[0]->zero_grad();
    }
    EXPECT_EQ(fsdp->plan().memory.peak_gathered_bytes, (48 + 32) * 4);
  });
}

}  // namespace rebind::test
