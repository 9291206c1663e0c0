// When units are gathered, kept and freed: exact counts; and that none of it changes a result.
#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <thread>

#include "test/support/catch.h"
#include "test/support/short_forms.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;

// Five equal layers (5 x 5 weight, 5 bias; 40 elements flat at W = 2), each a unit. A step's order may skip and repeat layers.
struct Tower : torch::nn::Module {
  Tower() {
    for (int i = 0; i < 5; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(5, 5)));
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input;
    for (const int i : orders[static_cast<size_t>(step) % orders.size()]) x = layers[static_cast<size_t>(i)]->forward(x).tanh();
    return x.narrow(1, 0, 3);
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<std::vector<int>> orders{{0, 1, 2, 3, 4}};
  int step = 0;
};
constexpr int64_t kUnitBytes = 40 * 4;

FsdpOptions by_layer(int prefetch_units = 1) {
  FsdpOptions options;
  options.unit_policy = UnitPolicy::by_type<torch::nn::LinearImpl>();
  options.prefetch_units = prefetch_units;
  options.layout_rules = {1, 10};  // 30 elements: 20 a rank
  return options;
}

Program tower(const std::vector<std::vector<int>>& orders, const FsdpOptions& options) {
  Program program;
  program.make = [=] {
    auto model = std::make_shared<Tower>();
    randomize(*model, 4);
    model->orders = orders;
    return Setup{model, {std::make_shared<Adam>(model->parameters(), AdamOptions(1e-2))}, [model](const at::Tensor& x) { return model->forward(x); }};
  };
  program.before_step = [](Setup& setup, int step) { dynamic_cast<Tower&>(*setup.model).step = step + 1; };
  program.options = options;
  return program;
}

void expect_parity(const Program& program) {
  for (int world_size : {1, 2, 3}) {
    CAPTURE(world_size);
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
      expect_sharded(trained.setup, *trained.fsdp);
    });
  }
}

struct Counts {
  int64_t gathers, hits, peak;
  bool operator==(const Counts&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Counts& counts) {
  return out << counts.gathers << " gathers, " << counts.hits << " hits, peak " << counts.peak;
}

// Of each of four steps, the same on all ranks of two.
std::vector<Counts> counts_of(const Program& program) {
  std::vector<Counts> counts;
  run_ranks(2, [&](int rank, Group group) {
    Setup setup = program.make();
    auto fsdp = prepare(*setup.model, setup.pointers(), group, program.options);
    for (int step = 0; step < 4; ++step) {
      fsdp->reset_stats();
      loss_on(setup, rank, step).backward();
      const RuntimeStats stats = fsdp->stats();
      EXPECT_EQ(stats.live_bytes, 0);
      EXPECT_EQ(stats.reduce_scatters, 5);
      EXPECT_EQ(stats.gathered_bytes, stats.all_gathers * kUnitBytes);
      EXPECT(stats.peak_live_bytes <= fsdp->plan().memory.peak_gathered_bytes);
      if (rank == 0) counts.push_back({stats.all_gathers, stats.prefetch_hits, stats.peak_live_bytes});
      setup.optimizers[0]->step();
      setup.optimizers[0]->zero_grad();
      EXPECT_EQ(fsdp->stats().live_bytes, 0);
    }
  });
  return counts;
}

}  // namespace

// Uses of an iteration: 0 1 2 3 4 | 4 3 2 1. The first layer's weight is not needed in backward: the input has no gradient.
TEST_CASE("schedule: from the second iteration on every gather but the first is under way before it is needed", "[schedule]") {
  const Counts first{7, 0, 2 * kUnitBytes}, later{7, 6, 2 * kUnitBytes};
  CHECK(counts_of(tower({{0, 1, 2, 3, 4}}, by_layer())) == std::vector{first, later, later, later});
}

TEST_CASE("schedule: without prefetch one unit is gathered at a time, with more units ahead more stay for backward", "[schedule]") {
  const Counts alone{8, 0, kUnitBytes};
  CHECK(counts_of(tower({{0, 1, 2, 3, 4}}, by_layer(0))) == std::vector(4, alone));
  const Counts first{6, 0, 3 * kUnitBytes}, later{6, 5, 3 * kUnitBytes};
  CHECK(counts_of(tower({{0, 1, 2, 3, 4}}, by_layer(2))) == std::vector{first, later, later, later});
}

TEST_CASE("schedule: without reshard_after_forward each unit is gathered once", "[schedule]") {
  FsdpOptions options = by_layer();
  options.reshard_after_forward = false;
  const std::vector<Counts> counts = counts_of(tower({{0, 1, 2, 3, 4}}, options));
  CHECK(counts.front() == Counts{5, 0, 5 * kUnitBytes});
  CHECK(counts.back().gathers == 5);
  CHECK(counts.back().hits == 4);
  CHECK(counts.back().peak <= 5 * kUnitBytes);
}

TEST_CASE("schedule: an order that changes costs gathers, never a result", "[schedule]") {
  for (int prefetch : {0, 1, 3}) {
    CAPTURE(prefetch);
    expect_parity(tower({{0, 1, 2, 3, 4}, {4, 2, 0}, {1, 1, 3, 3, 0, 4, 2}, {2}, {0, 1, 2, 3, 4}}, by_layer(prefetch)));
    expect_parity(tower({{0, 1, 2, 3, 4}, {3, 2, 1, 0, 4}}, by_layer(prefetch)));
  }
  FsdpOptions options = by_layer();
  options.reshard_after_forward = false;
  expect_parity(tower({{0, 1, 2, 3, 4}, {4, 2, 0}}, options));
}

TEST_CASE("schedule: in the strictest mode, in which everything is freed after every operator, results are the same", "[schedule]") {
  struct Strict {
    Strict() { runtime::set_strict_for_tests(true); }
    ~Strict() { runtime::set_strict_for_tests(false); }
  } strict;
  expect_parity(tower({{0, 1, 2, 3, 4}, {4, 2, 0, 2}}, by_layer()));
}

TEST_CASE("schedule: evaluations between, several backwards a step and exceptions in forward leave results as they are", "[schedule]") {
  const auto run = [](int world_size, int rank, const Group& group) {
    Setup setup = tower({{0, 1, 2, 3, 4}}, {}).make();
    auto& model = dynamic_cast<Tower&>(*setup.model);
    std::unique_ptr<Fsdp> fsdp;
    if (group != nullptr) fsdp = prepare(model, setup.pointers(), group, by_layer());
    std::vector<at::Tensor> seen;
    for (int step = 0; step < 5; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        // The sharded program: this rank's rows; the plain one: every rank's, one after another.
        for (int r = group == nullptr ? 0 : rank; r < (group == nullptr ? world_size : rank + 1); ++r) loss_on(setup, r, 2 * step + micro).backward();
      }
      if (group == nullptr) {
        for (at::Tensor& parameter : model.parameters()) parameter.mutable_grad().div_(world_size);
      }
      {
        at::NoGradGuard no_grad;
        seen.push_back(model.forward(random_tensor({2, 5}, 9)));
        seen.push_back(model.layers[2]->forward(random_tensor({2, 5}, 8)));
      }
      setup.optimizers[0]->step();
      model.zero_grad();
      try {
        model.layers[1]->forward(model.layers[0]->forward(random_tensor({2, 5}, 7)));
        model.layers[3]->forward(at::zeros({2, 4}));
      } catch (const c10::Error&) {
      }
      at::NoGradGuard no_grad;
      seen.push_back(model.forward(random_tensor({2, 5}, 9)));
    }
    return seen;
  };
  for (int world_size : {1, 2, 3}) {
    const std::vector<at::Tensor> expected = run(world_size, 0, nullptr);
    run_ranks(world_size, [&](int rank, Group group) {
      const std::vector<at::Tensor> seen = run(world_size, rank, group);
      // Two means are added here, four gradients there.
      for (size_t i = 0; i < seen.size(); ++i) EXPECT(at::allclose(seen[i], expected[i], 1e-4, 1e-6));
    });
  }
}

TEST_CASE("schedule: a second thread of the program is refused by name, also after the first use by another", "[schedule]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = tower({{0, 1, 2, 3, 4}}, {}).make();
    auto fsdp = prepare(*setup.model, setup.pointers(), group, by_layer());
    loss_on(setup, rank, 0).backward();
    std::string text;
    std::thread other([&] { text = EXPECT_THROWS(setup.forward(at::zeros({2, 5}))); });
    other.join();
    EXPECT(contains(text, "rank " + std::to_string(rank) + ": parameter 'layer0."));
    EXPECT(contains(text, "a second thread of the program uses the sharded model"));
    setup.optimizers[0]->step();
    loss_on(setup, rank, 1).backward();
  });
}

TEST_CASE("schedule: ranks that leave the common order get a named error before any gradient reaches an optimizer", "[schedule]") {
  // F13: units of equal size; rank 0 runs a forward more, without a backward.
  const std::vector<std::string> errors = run_ranks_errors(2, [](int rank, Group group) {
    Setup setup = tower({{0, 1, 2, 3, 4}}, {}).make();
    auto fsdp = prepare(*setup.model, setup.pointers(), group, by_layer());
    for (int step = 0; step < 2; ++step) {
      loss_on(setup, rank, step).backward();
      setup.optimizers[0]->step();
      setup.optimizers[0]->zero_grad();
    }
    const at::Tensor before = setup.optimizers[0]->param_groups()[0].params()[0].detach().clone();
    std::string text;
    try {
      if (rank == 0) loss_on(setup, rank, 2);
      loss_on(setup, rank, 2).backward();
      setup.optimizers[0]->step();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    expect_same("shard", setup.optimizers[0]->param_groups()[0].params()[0].detach().clone(), before);
    throw std::runtime_error(text);
  });
  for (const std::string& error : errors) CHECK(contains(error, "the ranks are in different collectives"));
}

}  // namespace rebind::test
