// Raw access, full_parameters, replaced hooks and shapes, ranks that diverge: each a named error or right.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/short_forms.h"
#include "test/support/training.h"

namespace rebind::test {

using torch::optim::SGD;

TEST_CASE("tripwire: raw access names the parameter and the way out; in full_parameters it is allowed", "[tripwire]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = net_with_momentum();
    auto& net = dynamic_cast<Net&>(*setup.model);
    auto fsdp = prepare(net, setup.pointers(), group);
    const std::string expected = "rank " + std::to_string(rank) + ": parameter 'first.weight' is sharded and its memory is not here";
    EXPECT(contains(EXPECT_THROWS(net.first->weight.data_ptr<float>()), expected));
    net.first->weight.sum();  // gathered now, and still closed
    EXPECT(contains(EXPECT_THROWS(net.first->weight.data_ptr()), expected));
    EXPECT(contains(EXPECT_THROWS(net.first->weight.storage().data()), expected));
    const auto save = [&] {
      torch::serialize::OutputArchive archive;
      net.save(archive);
      std::ostringstream file;
      archive.save_to(file);
      return file.str().size();
    };
    EXPECT(contains(EXPECT_THROWS(save()), "is sharded and its memory is not here"));
    auto whole = fsdp->full_parameters();
    EXPECT(save() > 0);
    EXPECT(net.first->weight.data_ptr<float>() != nullptr);
    EXPECT(contains(EXPECT_THROWS(fsdp->full_parameters()), "a scope is open already"));
    EXPECT_EQ(fsdp->restore().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THROWS(loss_on(setup, rank, 0).backward());
    EXPECT_OK(whole.close());
    EXPECT_THROWS(net.first->weight.data_ptr<float>());
    loss_on(setup, rank, 0).backward();
    setup.optimizers[0]->step();
  });
}

TEST_CASE("full_parameters: writes are dropped without write_back, and refused in another shape", "[tripwire]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {5}}, {"b", {1}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    {
      at::NoGradGuard no_grad;
      auto whole = fsdp->full_parameters();
      model["a"].fill_(3);
    }
    expect_same("a", *fsdp->full_parameter("a"), at::ones({5}));
    {
      at::NoGradGuard no_grad;
      auto whole = fsdp->full_parameters(true);
      model["a"].fill_(3);
      model["b"].set_data(at::zeros({2}));
      const absl::Status status = whole.close();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT(contains(std::string(status.message()), "parameter 'b': was replaced by a Float tensor of shape [2] inside the scope; nothing was written back"));
    }
    expect_same("a", *fsdp->full_parameter("a"), at::ones({5}));
    EXPECT_EQ(model["b"].numel(), 1);
    {
      at::NoGradGuard no_grad;
      auto whole = fsdp->full_parameters(true);
      model["a"].fill_(3);
    }
    expect_same("a", model["a"].detach().clone(), at::full({5}, 3.0f));
  });
}

TEST_CASE("tripwire: shape changed in place is refused", "[tripwire]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {5, 2}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    at::NoGradGuard no_grad;
    EXPECT(contains(EXPECT_THROWS(model["a"].t_()), "parameter 'a': it would replace the memory or the shape of a sharded tensor"));
    EXPECT(contains(EXPECT_THROWS(model["a"].set_(at::ones({3}))), "parameter 'a'"));
    EXPECT_EQ(model["a"].sum().item<float>(), 10.0f);
  });
}

TEST_CASE("tripwire: a hook that takes the place of ours is noticed at the next use", "[tripwire]") {
  struct Nothing final : torch::autograd::PostAccumulateGradHook {
    void operator()(const at::Tensor&) override {}
  };
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {5}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    torch::autograd::impl::set_post_acc_grad_hooks(model["a"], std::make_unique<Nothing>());
    EXPECT(contains(EXPECT_THROWS(model["a"].sum()), "parameter 'a': the post-accumulate hook that takes its gradient was replaced"));
  });
}

TEST_CASE("divergence: ranks that use units in another order get a named error, never each other's values", "[tripwire]") {
  const auto errors = run_ranks_errors(2, [](int rank, Group group) {
    Bag model({{"a", {8}}, {"b", {8}}});
    SGD sgd(model.parameters(), 1);
    struct Two : torch::nn::Module {} two;
    auto left = std::make_shared<Bag>(), right = std::make_shared<Bag>();
    left->register_parameter("w", at::ones({8}));
    right->register_parameter("w", at::full({8}, 2.0f));
    two.register_module("left", left);
    two.register_module("right", right);
    FsdpOptions options;
    options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
    auto fsdp = prepare(two, {}, group, options);
    at::NoGradGuard no_grad;
    (*(rank == 0 ? left : right))["w"].sum();
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Contains("left") && Catch::Contains("right"));
  }
}

}  // namespace rebind::test
