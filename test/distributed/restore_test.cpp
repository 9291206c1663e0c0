// restore() gives the plain program back bit for bit, and the handle finds and loses the model as it should.
#include <ATen/Functions.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using List = std::vector<std::shared_ptr<torch::optim::Optimizer>>;

Setup with_adamw() {
  return net_with([](Net& net) { return List{std::make_shared<AdamW>(net.parameters(), AdamWOptions(1e-2).amsgrad(true))}; });
}

void one_backward(Setup& setup, int rank, int step) {
  auto [input, target] = rows(rank, step, at::kFloat);
  at::mse_loss(setup.forward(input), target).backward();
}

}  // namespace

TEST_CASE("restore: at once, it is as if prepare had not been", "[restore]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Setup setup = with_adamw();
      for (int step = 0; step < 3; ++step) {
        one_backward(setup, 0, step);
        setup.optimizers[0]->step();
        if (step < 2) setup.optimizers[0]->zero_grad();  // the last gradient stays
      }
      const Snapshot before = snapshot(setup);
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : setup.model->parameters()) gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      const std::vector<at::Tensor> params = setup.optimizers[0]->param_groups()[0].params();

      auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
      EXPECT_OK(fsdp);
      EXPECT_OK((*fsdp)->restore());
      expect_same(snapshot(setup), before);
      for (size_t i = 0; i < params.size(); ++i) {
        EXPECT(setup.optimizers[0]->param_groups()[0].params()[i].is_same(params[i]));
        EXPECT(setup.model->parameters()[i].is_same(params[i]));
        const at::Tensor gradient = params[i].grad();
        EXPECT_EQ(gradient.defined(), gradients[i].defined());
        if (gradient.defined()) expect_same("gradient", gradient, gradients[i]);
        EXPECT(params[i].requires_grad());
        EXPECT(params[i].is_leaf());
        EXPECT(params[i].data_ptr() != nullptr);
      }
      EXPECT(!(*fsdp)->restore().ok());
      EXPECT_EQ(Fsdp::of(*setup.model).status().code(), absl::StatusCode::kNotFound);
    });
  }
}

TEST_CASE("restore: a model trained sharded trains on plain, and can be prepared again", "[restore]") {
  Program program{.make = with_adamw, .steps = 6};
  const Snapshot expected = reference_w(program, 2);
  run_ranks(2, [&](int rank, Group group) {
    Program half = program;
    half.steps = 2;
    Trained trained = train_sharded(half, rank, group);
    EXPECT_OK(trained.fsdp->restore());
    Setup& setup = trained.setup;
    auto again = prepare_fsdp(*setup.model, setup.pointers(), group);
    EXPECT_OK(again);
    for (int step = 2; step < 6; ++step) {
      one_backward(setup, rank, step);
      setup.optimizers[0]->step();
      setup.optimizers[0]->zero_grad();
    }
    expect_same(snapshot(setup, **again), expected);
    EXPECT_OK((*again)->restore());
    expect_same(snapshot(setup), expected);
  });
}

TEST_CASE("restore: the gradient of an interrupted iteration comes back averaged", "[restore]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = net_with([](Net& net) { return List{std::make_shared<SGD>(net.parameters(), 0.1)}; });
    auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
    EXPECT_OK(fsdp);
    (setup.model->named_parameters()["unused"] * (rank == 0 ? 1 : 4)).sum().backward();
    EXPECT_OK((*fsdp)->restore());
    expect_same("gradient", setup.model->named_parameters()["unused"].grad(), at::full({3}, 2.5));
    EXPECT(!setup.model->named_parameters()["scale"].grad().defined());
  });
}

TEST_CASE("restore: an optimizer that is gone is left out", "[restore]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = net_with([](Net& net) {
      return List{std::make_shared<SGD>(net.first->parameters(), 0.1), std::make_shared<SGD>(net.second->parameters(), 0.1)};
    });
    auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
    EXPECT_OK(fsdp);
    one_backward(setup, rank, 0);
    setup.optimizers[0].reset();
    setup.optimizers[1]->step();
    EXPECT_OK((*fsdp)->restore());
    EXPECT(setup.optimizers[1]->param_groups()[0].params()[0].is_same(setup.model->named_parameters()["second.weight"]));
  });
}

TEST_CASE("handle: dropped and found again; gone with the model", "[restore]") {
  std::weak_ptr<runtime::Sharding> life[2];
  run_ranks(2, [&](int rank, Group group) {
    Setup setup = with_adamw();
    EXPECT_OK(prepare_fsdp(*setup.model, setup.pointers(), group, one_tensor_each()));
    life[rank] = runtime::Sharding::of(setup.model->parameters()[0]);
    auto found = Fsdp::of(*setup.model);
    EXPECT_OK(found);
    EXPECT_EQ((*found)->plan().world_size, 2);
    one_backward(setup, rank, 0);
    setup.optimizers[0]->step();
    found->reset();
    EXPECT(!life[rank].expired());
    // The optimizer outlives the model here: its shards stay ordinary memory.
    setup.forward = nullptr;
    setup.model.reset();
    EXPECT(life[rank].expired());
    setup.optimizers[0]->zero_grad();
    setup.optimizers[0]->step();
    EXPECT_EQ(setup.optimizers[0]->param_groups()[0].params().size(), size_t{6});
  });
}

TEST_CASE("handle: bind and unbind are refused by name", "[restore]") {
  run_ranks(1, [](int, Group group) {
    Setup setup = with_adamw();
    auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
    EXPECT_OK(fsdp);
    EXPECT_EQ((*fsdp)->bind(*setup.optimizers[0]).ToString(),
              std::string("UNIMPLEMENTED: bind, rank 0: torch::optim::AdamW: binding an optimizer after prepare_fsdp is not built yet. "
                          "Call restore(), then prepare_fsdp with all optimizers."));
    EXPECT_EQ((*fsdp)->unbind(*setup.optimizers[0]).code(), absl::StatusCode::kUnimplemented);
  });
}

}  // namespace rebind::test
