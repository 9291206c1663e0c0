// Tensors of an optimizer that no model lists (case A7): in their place, whole and equal on every rank, trained as in one process.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/sharded_bag.h"

namespace rebind::test {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A Net and two free tensors: one in the middle of its group, one in a group of its own.
template <class Optimizer, class Options>
Program program_with(const Options& options, at::ScalarType dtype, int prepare_at) {
  Program program;
  program.make = [=] {
    auto net = std::make_shared<Net>(dtype);
    randomize(*net, 1);
    const at::Tensor gain = (random_tensor({3}, 77, dtype) * 0.5).set_requires_grad(true);
    const at::Tensor bend = (random_tensor({3, 5}, 78, dtype) * 0.5).t().detach().set_requires_grad(true);
    std::vector<at::Tensor> first = net->parameters();
    first.insert(first.begin() + 2, gain);
    auto optimizer = std::make_shared<Optimizer>(
        std::vector<OptimizerParamGroup>{OptimizerParamGroup(first), OptimizerParamGroup({bend})}, options);
    return Setup{net, {optimizer}, [=](const at::Tensor& x) { return net->forward(x) * gain + x.matmul(bend); }, {gain, bend}};
  };
  program.prepare_at = prepare_at;
  return program;
}

TEST_CASE("replicas: an optimizer over model parameters and free tensors trains as one process (A7)", "[replicas]") {
  const auto check = [](const Program& program, bool exact) {
    for (int world_size : {1, 2, 3}) {
      const Snapshot expected = exact ? reference_w(program, world_size) : reference(program, world_size);
      run_ranks(world_size, [&](int rank, const Group& group) {
        Trained trained = train_sharded(program, rank, group);
        expect_sharded(trained.setup, *trained.fsdp);
        const Snapshot got = snapshot(trained.setup, *trained.fsdp);
        exact ? expect_same(got, expected) : expect_close(got, expected, 1e-6);
        // Two tensors, averaged in each of the steps.
        const int64_t steps = program.steps - program.prepare_at;
        EXPECT_EQ(trained.fsdp->stats().all_reduces, world_size == 1 ? 0 : 2 * steps);
      });
    }
  };
  for (int prepare_at : {0, 3}) {
    check(program_with<SGD>(SGDOptions(0.1).momentum(0.9), at::kFloat, prepare_at), true);
    check(program_with<SGD>(SGDOptions(0.1), at::kDouble, prepare_at), false);
    check(program_with<AdamW>(AdamWOptions(1e-2).weight_decay(0.5).amsgrad(true), at::kFloat, prepare_at), true);
  }
}

// A model with 'a' [4] of ones and a free tensor of ones in its SGD(lr 1), where the model's comes first or not.
struct Free {
  explicit Free(std::vector<int64_t> sizes = {2}, bool free_first = false)
      : model({{"a", {4}}}), x(at::ones(sizes).set_requires_grad(true)) {
    sgd = std::make_unique<SGD>(free_first ? std::vector<at::Tensor>{x, model["a"]} : std::vector<at::Tensor>{model["a"], x}, 1);
  }
  void prepare_on(const Group& group, const FsdpOptions& options = {}) { fsdp = prepare(model, {sgd.get()}, group, options); }

  Bag model;
  at::Tensor x;
  std::unique_ptr<SGD> sgd;
  std::unique_ptr<Fsdp> fsdp;
};

at::Tensor twos(float value) { return at::full({2}, value); }

TEST_CASE("replicas: a free tensor keeps its place, before and after restore, and its gradient is local again", "[replicas]") {
  run_ranks(2, [](int rank, const Group& group) {
    for (bool free_first : {false, true}) {
      Free f({2}, free_first);
      for (int times = 0; times < 2; ++times) {
        f.prepare_on(group);
        const std::vector<at::Tensor>& params = f.sgd->param_groups()[0].params();
        EXPECT_EQ(params.size(), 2U);
        EXPECT(params[free_first ? 0 : 1].is_same(f.x));
        give(f.x, twos(rank + 1.0f));
        expect_same("averaged", f.x.grad(), twos(1.5));
        EXPECT_OK(f.fsdp->restore());
        EXPECT(params[free_first ? 0 : 1].is_same(f.x) && params[free_first ? 1 : 0].is_same(f.model["a"]));
        EXPECT(torch::autograd::impl::post_acc_grad_hooks(f.x) == nullptr);
        give(f.x, twos(rank + 1.0f));
        expect_same("local", f.x.grad(), twos(1.5f + rank + 1.0f));
        f.sgd->zero_grad();
      }
    }
  });
}

TEST_CASE("replicas: gradients add up in place, and autograd::grad leaves them alone", "[replicas]") {
  run_ranks(2, [](int rank, const Group& group) {
    Free f;
    f.prepare_on(group);
    give(f.x, twos(rank + 1.0f));
    const at::Tensor held = f.x.grad();
    const at::Tensor loss = (f.x * twos(8)).sum();
    expect_same("asked for", torch::autograd::grad({loss}, {f.x})[0], twos(8));
    expect_same("left alone", held, twos(1.5));
    give(f.x, twos(10.0f * rank));
    EXPECT(f.x.grad().is_same(held));
    expect_same("added", held, twos(6.5));
    f.sgd->step();
    expect_same("stepped", f.x.detach(), twos(-5.5));
    f.sgd->zero_grad(/*set_to_none=*/false);
    give(f.x, twos(rank + 1.0f));
    expect_same("after zeros", held, twos(1.5));
    f.sgd->zero_grad();
    EXPECT(!f.x.grad().defined());
    // A user's hook runs after the older sum was set aside, and what it returns is what counts.
    f.x.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    give(f.x, twos(rank + 1.0f));
    expect_same("through a hook", f.x.grad(), twos(4.5));
    EXPECT(contains(EXPECT_THROWS((f.x * f.x).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true)),
                    "optimizers[0], group 0, params()[1]: a gradient that has a graph cannot be averaged over the ranks"));
  });
}

TEST_CASE("replicas: a gradient on one rank only is averaged, on none stays none", "[replicas]") {
  run_ranks(3, [](int rank, const Group& group) {
    Free f;
    f.prepare_on(group);
    give(f.model["a"], at::ones({4}));
    EXPECT(!f.x.grad().defined());
    at::Tensor loss = (f.model["a"] * 1).sum();
    if (rank == 1) loss = loss + (f.x * twos(6)).sum();
    loss.backward();
    expect_same("a third", f.x.grad(), twos(2));
  });
}

TEST_CASE("replicas: half precision is summed in fp32", "[replicas]") {
  run_ranks(3, [](int rank, const Group& group) {
    Bag model({{"a", {4}}});
    const at::Tensor x = at::ones({1}, at::kBFloat16).set_requires_grad(true);
    SGD sgd({model["a"], x}, 1);
    auto fsdp = prepare(model, {&sgd}, group);
    // 256 + 1 + 1 = 258 is 256 in bfloat16 if rounded on the way.
    give(x, at::full({1}, rank == 0 ? 256 : 1, at::kBFloat16));
    expect_same("mean", x.grad(), at::full({1}, 86, at::kBFloat16));
  });
}

TEST_CASE("replicas: gradient_divide_factor holds for them, at world size 1 too", "[replicas]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int rank, const Group& group) {
      Free f;
      FsdpOptions options;
      options.gradient_divide_factor = 4;
      f.prepare_on(group, options);
      give(f.x, twos(rank + 2.0f));
      expect_same("divided", f.x.grad(), twos(world_size == 1 ? 0.5 : 1.25));
    });
  }
}

TEST_CASE("replicas: after an interrupted backward their gradient throws until it is cleared, and the next one is right", "[replicas]") {
  run_ranks(2, [](int rank, const Group& group) {
    for (bool free_first : {false, true}) {
      Free f({2}, free_first);
      f.prepare_on(group);
      give(f.x, twos(100));  // an older sum
      give_and_break(f.x, twos(rank + 1.0f), f.model["a"]);
      const std::string name = free_first ? "params()[0]" : "params()[1]";
      const std::string expected = "rank " + std::to_string(rank) + ": the gradient of optimizers[0], group 0, " + name +
                                   " is not averaged over the ranks: backward was interrupted. Call zero_grad() before going on.";
      EXPECT(contains(EXPECT_THROWS(f.sgd->step()), expected));
      EXPECT(contains(EXPECT_THROWS(f.x.grad().norm()), expected));
      EXPECT(contains(EXPECT_THROWS(f.x.grad().data_ptr()), expected));
      EXPECT(contains(EXPECT_THROWS(give(f.x, twos(1))), expected));
      expect_same("not moved", f.x.detach(), twos(1));
      f.sgd->zero_grad();
      EXPECT(!f.x.grad().defined());
      give(f.x, twos(rank + 1.0f));
      expect_same("averaged", f.x.grad(), twos(1.5));
      f.sgd->step();
      expect_same("stepped", f.x.detach(), twos(-0.5));
    }
  });
}

TEST_CASE("replicas: an exception before the free tensor's turn leaves its older gradient", "[replicas]") {
  run_ranks(2, [](int rank, const Group& group) {
    Free f;
    f.prepare_on(group);
    give(f.x, twos(rank + 1.0f));
    give_and_break(f.model["a"], at::ones({4}), f.x);
    expect_same("as before", f.x.grad(), twos(1.5));
    f.x.register_hook([](const at::Tensor&) { throw std::runtime_error("an accident in a hook"); });
    EXPECT(contains(EXPECT_THROWS(give(f.x, twos(1))), "an accident in a hook"));
    expect_same("put back", f.x.grad(), twos(1.5));
  });
}

TEST_CASE("replicas: one that is frozen at prepare and thawed later is averaged", "[replicas]") {
  run_ranks(2, [](int rank, const Group& group) {
    Free f;
    f.x.set_requires_grad(false);
    f.prepare_on(group);
    give(f.model["a"], at::ones({4}));
    f.x.set_requires_grad(true);
    for (float sum : {1.5f, 3.0f}) {
      give(f.x, twos(rank + 1.0f));
      expect_same("averaged", f.x.grad(), twos(sum));
    }
  });
}

TEST_CASE("replicas: rank 0's values, gradient and state go to all ranks (A14)", "[replicas]") {
  run_ranks(3, [](int rank, const Group& group) {
    Bag model({{"a", {4}}});
    const at::Tensor x = at::full({2}, rank + 1.0f).set_requires_grad(true);
    SGD sgd({model["a"], x}, SGDOptions(1).momentum(0.5));
    give(x, twos(rank + 1.0f));
    sgd.step();
    auto fsdp = prepare(model, {&sgd}, group);
    expect_same("value", x.detach(), twos(0));
    expect_same("gradient", x.grad(), twos(1));
    const auto& state = dynamic_cast<const torch::optim::SGDParamState&>(*sgd.state().at(x.unsafeGetTensorImpl()));
    expect_same("momentum", state.momentum_buffer(), twos(1));
    FsdpOptions compare;
    compare.sync_from_rank0 = false;
    EXPECT_OK(fsdp->restore());
    if (rank == 2) x.detach().fill_(9);
    const auto refused = prepare_fsdp(model, {&sgd}, group, compare);
    EXPECT(contains(refused.status().ToString(), "optimizers[0], group 0, params()[1]: rank 2 has other values than rank 0"));
    // Nothing of the attempt is left: its gradients are local.
    sgd.zero_grad();
    give(x, twos(rank + 1.0f));
    expect_same("local", x.grad(), twos(rank + 1.0f));
  });
}

TEST_CASE("replicas: Fsdp::clip_grad_norm counts a free tensor once", "[replicas]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, const Group& group) {
      Free f({1});
      f.prepare_on(group);
      ((f.x * 4).sum() + (f.model["a"] * at::full({4}, 1.5f)).sum()).backward();
      EXPECT_EQ(f.fsdp->clip_grad_norm(2.5), 5.0);
      EXPECT((f.x.grad() - 2.0f).abs().item<float>() < 1e-6);
      EXPECT_EQ(f.fsdp->clip_grad_norm(1e9, std::numeric_limits<double>::infinity()), f.x.grad().item<float>());
    });
  }
}

TEST_CASE("replicas: they outlive the model, and the model outlives them", "[replicas]") {
  run_ranks(2, [](int rank, const Group& group) {
    auto model = std::make_unique<Bag>(Bag({{"a", {4}}}));
    const at::Tensor x = at::ones({2}).set_requires_grad(true);
    {
      SGD sgd({(*model)["a"], x}, 1);
      auto fsdp = prepare(*model, {&sgd}, group);
    }
    give((*model)["a"], at::ones({4}));
    model.reset();
    give(x, twos(rank + 1.0f));
    expect_same("local", x.grad(), twos(rank + 1.0f));
  });
}

}  // namespace
}  // namespace rebind::test
