// Joined and single slices (Note: Runs): whatever has a gradient and whatever has none, results are those of one process.
#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
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
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Makers = std::vector<std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>>;

// (input [n, 5]) -> [n, 3], from those of its parameters that `uses` names in the current step.
struct Choosy : torch::nn::Module {
  Choosy() {
    a = register_parameter("a", at::empty({5, 3}));
    b = register_parameter("b", at::empty({1}));
    c = register_parameter("c", at::empty({3}));
    d = register_parameter("d", at::empty({3, 7}));
  }
  at::Tensor forward(const at::Tensor& input) {
    const std::string& now = uses[static_cast<size_t>(step) % uses.size()];
    const auto used = [&](char name) { return now.find(name) != std::string::npos; };
    at::Tensor x = used('a') ? input.matmul(a) : input.narrow(1, 0, 3);
    if (used('b')) x = x * b;
    if (used('c')) x = x + c;
    if (used('d')) x = x.matmul(d.tanh()).narrow(1, 2, 3);
    return x;
  }
  at::Tensor a, b, c, d;
  std::vector<std::string> uses{"abcd"};
  int step = 0;
};

Program choosy(const std::vector<std::string>& uses, size_t maker, int prepare_at) {
  static const Makers makers{
      [](std::vector<at::Tensor> p) { return std::make_shared<SGD>(p, SGDOptions(0.1).momentum(0.9).weight_decay(0.1)); },
      [](std::vector<at::Tensor> p) { return std::make_shared<Adam>(p, AdamOptions(1e-2).amsgrad(true)); },
      [](std::vector<at::Tensor> p) { return std::make_shared<AdamW>(p, AdamWOptions(1e-2).weight_decay(0.5)); },
  };
  Program program;
  program.make = [=] {
    auto model = std::make_shared<Choosy>();
    randomize(*model, 5);
    model->uses = uses;
    return Setup{model, {makers[maker](model->parameters())}, [model](const at::Tensor& x) { return model->forward(x); }};
  };
  program.steps = 8;
  program.prepare_at = prepare_at;
  program.before_step = [](Setup& setup, int step) { dynamic_cast<Choosy&>(*setup.model).step = step + 1; };
  return program;
}

const runtime::Run& first_run(torch::nn::Module& model) {
  return *runtime::Sharding::of(model.parameters().front())->units.front()->runs.front();
}

void expect_parity(const Program& program) {
  for (int world_size : {1, 2, 3}) {
    CAPTURE(world_size);
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
      expect_sharded(trained.setup, *trained.fsdp);
      EXPECT_OK(trained.fsdp->restore());
      expect_same(snapshot(trained.setup), expected);
    });
  }
}

}  // namespace

TEST_CASE("coalesce: a run is one tensor of the optimizer, in the place of its first member, with empty single ones behind it",
          "[coalesce]") {
  run_ranks(2, [](int rank, Group group) {
    // Flat: a at 0, b at 8, c at 16, shards of 16 elements: a, b and their gaps on rank 0, c on rank 1.
    Bag model({{"a", {5}}, {"b", {3}}, {"c", {7}}});
    SGD sgd(std::vector<at::Tensor>{model["b"], model["c"], model["a"]}, 1);
    EXPECT_OK(prepare_fsdp(model, {&sgd}, group));
    const auto& params = sgd.param_groups()[0].params();
    EXPECT_EQ(params.size(), size_t{4});
    EXPECT_EQ(params[0].numel(), rank == 0 ? 16 : 7);
    for (size_t i = 1; i < 4; ++i) EXPECT_EQ(params[i].numel(), 0);

    // Not all have a gradient: each is stepped by itself.
    (model["a"].sum() + 2 * model["c"].sum()).backward();
    std::vector<int64_t> sizes, graded;
    for (const at::Tensor& tensor : params) {
      sizes.push_back(tensor.numel());
      graded.push_back(tensor.grad().defined());
    }
    EXPECT_EQ(sizes, rank == 0 ? std::vector<int64_t>({0, 5, 3, 0}) : std::vector<int64_t>({0, 0, 0, 7}));
    EXPECT_EQ(graded, std::vector<int64_t>({0, 1, 0, 1}));
    sgd.step();
    EXPECT_EQ(model["a"].sum().item<float>(), 0.0f);
    EXPECT_EQ(model["b"].sum().item<float>(), 3.0f);
    EXPECT_EQ(model["c"].sum().item<float>(), -7.0f);
    sgd.zero_grad();

    (model["a"].sum() + model["b"].sum() + model["c"].sum()).backward();
    EXPECT_EQ(params[0].numel(), rank == 0 ? 16 : 7);
    EXPECT(params[0].grad().defined());
    for (size_t i = 1; i < 4; ++i) EXPECT(params[i].numel() == 0 && !params[i].grad().defined());
  });
}

TEST_CASE("coalesce: a run of several pieces, equally many on every rank, and a parameter in two of them", "[coalesce]") {
  for (int world_size : {1, 2, 3}) {
    CAPTURE(world_size);
    const auto make = [] {
      auto model = std::make_shared<Bag>(std::initializer_list<std::pair<const char*, std::vector<int64_t>>>{{"a", {3, 100001}}, {"b", {300007}}});
      randomize(*model, 3);
      return Setup{model, {std::make_shared<Adam>(model->parameters(), AdamOptions(1e-2))}, [model](const at::Tensor& x) {
                     return (x.sum() * (*model)["a"].view({-1}).narrow(0, 0, 300003).mean() + (x * x).sum() * (*model)["b"].mean()).expand({2, 3});
                   }};
    };
    Program program{.make = make, .steps = 3, .prepare_at = 1};
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
      const runtime::Run& run = first_run(*trained.setup.model);
      EXPECT(run.is_joined);
      EXPECT_EQ(run.joined.size(), size_t{world_size == 1 ? 3u : world_size == 2 ? 2u : 1u});
      for (const auto& slice : run.joined) EXPECT(slice->numel() > 0 && slice->numel() <= 256 * 1024);
    });
  }
}

TEST_CASE("coalesce: gradients that come and go from step to step", "[coalesce]") {
  for (size_t maker : {0u, 1u, 2u}) {
    for (int prepare_at : {0, 3}) {
      CAPTURE(maker, prepare_at);
      expect_parity(choosy({"abcd", "ac", "abcd", "bd", "abcd"}, maker, prepare_at));
      expect_parity(choosy({"abcd"}, maker, prepare_at));
      expect_parity(choosy({"bc"}, maker, prepare_at));
    }
  }
}

TEST_CASE("coalesce: a run is joined again when its members' states agree, and stays single when their counters differ", "[coalesce]") {
  for (size_t maker : {0u, 1u}) {
    run_ranks(2, [&](int rank, Group group) {
      Program program = choosy({"abcd", "ac", "abcd"}, maker, 0);
      program.steps = 1;
      EXPECT(first_run(*train_sharded(program, rank, group).setup.model).is_joined);
      program.steps = 2;
      EXPECT(!first_run(*train_sharded(program, rank, group).setup.model).is_joined);
      program.steps = 3;
      EXPECT_EQ(first_run(*train_sharded(program, rank, group).setup.model).is_joined, maker == 0);
    });
  }
}

TEST_CASE("coalesce: gradients that the program clears one by one before the step", "[coalesce]") {
  using Clear = std::function<void(Choosy&)>;
  const Clear clears[] = {
      [](Choosy& model) { model.b.mutable_grad().reset(); },
      [](Choosy& model) { model.a.mutable_grad() = at::Tensor(), model.d.mutable_grad().reset(); },
      [](Choosy& model) {
        for (at::Tensor* parameter : {&model.a, &model.b, &model.c, &model.d}) parameter->mutable_grad().reset();
      },
      [](Choosy& model) { model.c.grad().zero_(); },  // a zero gradient is none of these
  };
  for (size_t maker : {0u, 1u, 2u}) {
    for (size_t clear = 0; clear < std::size(clears); ++clear) {
      CAPTURE(maker, clear);
      Program program = choosy({"abcd"}, maker, 2);
      program.before_step = [&](Setup& setup, int step) {
        if (step % 2 == 1) clears[clear](dynamic_cast<Choosy&>(*setup.model));
      };
      expect_parity(program);
    }
  }
}

TEST_CASE("coalesce: zero_grad of the model, of the optimizer, to none and to zero", "[coalesce]") {
  const std::function<void(Setup&, int)> zeros[] = {
      [](Setup& setup, int) { setup.model->zero_grad(); },
      [](Setup& setup, int) { setup.model->zero_grad(/*set_to_none=*/false); },
      [](Setup& setup, int) { setup.optimizers[0]->zero_grad(/*set_to_none=*/false); },
      [](Setup&, int) {},  // gradients add up
      [](Setup& setup, int step) {
        if (step % 3 == 2) setup.model->zero_grad();
      },
  };
  for (size_t maker : {0u, 1u}) {
    for (size_t zero = 0; zero < std::size(zeros); ++zero) {
      CAPTURE(maker, zero);
      for (const auto& uses : {std::vector<std::string>{"abcd"}, {"ac", "bd", "abcd"}}) {
        Program program = choosy(uses, maker, 1);
        program.zero_grad = zeros[zero];
        expect_parity(program);
      }
    }
  }
}

TEST_CASE("coalesce: clipping and scaling between backward and step", "[coalesce]") {
  for (const auto& uses : {std::vector<std::string>{"abcd"}, {"abcd", "ac"}}) {
    Program program = choosy(uses, 1, 1);
    program.before_step = [](Setup& setup, int step) {
      auto& model = dynamic_cast<Choosy&>(*setup.model);
      model.step = step + 1;
      at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : model.parameters()) {
        if (parameter.grad().defined()) parameter.grad().clamp_(-0.02, 0.02).mul_(3);
      }
    };
    expect_parity(program);
  }
}

TEST_CASE("coalesce: off, params() has one entry a parameter, and results are the same", "[coalesce]") {
  for (size_t maker : {0u, 1u, 2u}) {
    Program program = choosy({"abcd", "ac", "abcd", "bd"}, maker, 1);
    program.options.coalesce = false;
    expect_parity(program);
  }
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {5}}, {"b", {3}}});
    SGD sgd(model.parameters(), 1);
    EXPECT_OK(prepare_fsdp(model, {&sgd}, group, one_tensor_each()));
    EXPECT_EQ(sgd.param_groups()[0].params().size(), size_t{2});
  });
}

TEST_CASE("coalesce: parameters of other groups, steps and kinds of state are runs of their own", "[coalesce]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {5}}, {"b", {3}}, {"c", {7}}, {"d", {2}}, {"e", {2}}});
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{model["a"], model["b"], model["d"]}, std::make_unique<AdamOptions>(1e-2));
    groups.emplace_back(std::vector<at::Tensor>{model["c"]}, std::make_unique<AdamOptions>(1e-3));
    Adam adam(std::move(groups));
    (model["a"].sum() + model["d"].sum()).backward();  // b has no state, e is in no optimizer
    adam.step();
    EXPECT_OK(prepare_fsdp(model, {&adam}, group));
    std::vector<std::vector<std::string>> runs;
    for (const auto& run : runtime::Sharding::of(model["a"])->units.front()->runs) {
      runs.emplace_back();
      for (const runtime::Parameter* member : run->members) runs.back().push_back(member->name);
    }
    EXPECT_EQ(runs, (std::vector<std::vector<std::string>>{{"a", "d"}, {"b"}, {"c"}, {"e"}}));
    EXPECT_EQ(adam.param_groups()[0].params().size(), size_t{4});  // joined, single a, single d; b
    EXPECT_EQ(adam.state().size(), size_t{1});
  });
}

}  // namespace rebind::test
