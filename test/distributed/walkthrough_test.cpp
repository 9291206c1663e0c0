// CONTRIBUTING.md follows Linear(7, 3) on two ranks through one training step. These are its numbers.
#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/training.h"

namespace rebind::test {

TEST_CASE("walkthrough: Linear(7, 3) on two ranks, stop by stop", "[walkthrough]") {
  run_ranks(2, [](int rank, Group group) {
    torch::nn::Linear model(7, 3);
    {
      at::NoGradGuard no_grad;
      model->weight.copy_(at::arange(21).view({3, 7}));
      model->bias.fill_(100);
    }
    torch::optim::SGD sgd(model->parameters(), /*lr=*/1);
    auto prepared = prepare_fsdp(model, sgd, group, one_tensor_each());
    EXPECT_OK(prepared);
    Fsdp& fsdp = **prepared;
    const auto sharding = runtime::Sharding::of(model->weight);

    // Stop 1, prepare: the flat shard of each rank, the window without memory, the shards in the optimizer.
    const runtime::Unit& unit = *sharding->units[0];
    const at::Tensor zeros5 = at::zeros({5});
    const at::Tensor shard0 = at::arange(16).to(at::kFloat);
    const at::Tensor shard1 = at::cat({at::arange(16, 21).to(at::kFloat), at::zeros({3}), at::full({3}, 100.0f), zeros5});
    expect_same("flat shard", unit.flat_shard, rank == 0 ? shard0 : shard1);
    const auto& params = sgd.param_groups()[0].params();
    EXPECT_EQ(params[0].numel(), rank == 0 ? 16 : 5);
    EXPECT_EQ(params[1].numel(), rank == 0 ? 0 : 3);
    EXPECT(runtime::KeyedStorage::of(model->weight)->hidden());

    // Stop 2, forward: one gather of 32 floats, kept for backward since it is the last unit.
    const at::Tensor input = at::full({1, 7}, static_cast<float>(rank + 1));
    const at::Tensor output = model->forward(input);
    expect_same("output", output.detach(), (at::tensor({21.0f, 70.0f, 119.0f}) * (rank + 1) + 100).view({1, 3}));
    EXPECT_EQ(fsdp.stats().all_gathers, 1);
    EXPECT_EQ(fsdp.stats().gathered_bytes, 128);
    EXPECT_EQ(fsdp.stats().live_bytes, 128);
    EXPECT(runtime::KeyedStorage::of(model->weight)->hidden());

    // Stop 3, backward: whole gradients 1 and 2, reduced to 1.5; for the bias 1 and 1.
    output.sum().backward();
    EXPECT_EQ(fsdp.stats().reduce_scatters, 1);
    EXPECT_EQ(fsdp.stats().reduced_bytes, 128);
    EXPECT_EQ(fsdp.stats().live_bytes, 0);
    EXPECT(at::equal(params[0].grad().clone(), at::full({params[0].numel()}, 1.5f)));
    EXPECT(at::equal(params[1].grad().clone(), at::full({params[1].numel()}, 1.0f)));

    // Stop 4, the facade: reading the window's gradient gathers it.
    EXPECT_EQ(fsdp.stats().service_gathers, 0);
    expect_same("weight.grad", model->weight.grad().clone(), at::full({3, 7}, 1.5f));
    EXPECT_EQ(fsdp.stats().service_gathers, 1);

    // Stop 5, the step, on shards; stop 6, zero_grad.
    sgd.step();
    EXPECT_EQ(fsdp.stats().live_bytes, 0);
    expect_same("flat shard", unit.flat_shard,
                rank == 0 ? shard0 - 1.5 : at::cat({at::arange(16, 21).to(at::kFloat) - 1.5, at::zeros({3}), at::full({3}, 99.0f), zeros5}));
    sgd.zero_grad();
    EXPECT(!model->weight.grad().defined());
    EXPECT(sharding->parameters[0]->singles.front()->gradient == nullptr);

    // The next forward reads the new values.
    EXPECT_EQ(model->forward(input).sum().item<float>(), static_cast<float>((rank + 1) * (210 - 21 * 1.5) + 3 * 99));
    EXPECT_EQ(fsdp.stats().all_gathers, 2);
  });
}

}  // namespace rebind::test
