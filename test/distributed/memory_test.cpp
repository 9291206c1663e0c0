// What prepare_fsdp holds while it works and leaves behind (F2), and what training holds, by the allocator and by the forecast.
#include <ATen/Functions.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cstdlib>
#include <vector>

#include "lib/optim/adapters.h"
#include "test/support/allocations.h"
#include "test/support/catch.h"
#include "test/support/ranks.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

// 64 equal layers of 48 * 48 + 48 = 2352 parameters, which 2 and 3 ranks divide without padding, and Adam's two moments of each.
constexpr int64_t kLayers = 64, kLayer = 2352 * 4, kFull = kLayers * kLayer, kState = 2 * kFull;

TEST_CASE("F2: the peak of prepare is full + state + (full + state) / W + 2 layers, and after it (full + state) / W is left",
          "[cases][transaction]") {
  for (int world_size : {1, 2, 3}) {
    for (const bool sync : {true, false}) {
      run_ranks(world_size, [&](int, Group group) {
        Allocations counted;
        const CountHere here(counted);
        torch::nn::Sequential model;
        for (int i = 0; i < kLayers; ++i) model->push_back(torch::nn::Linear(48, 48));
        randomize(*model, 3);
        torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
        at::mse_loss(model->forward(random_tensor({2, 48}, 8)), random_tensor({2, 48}, 9)).backward();
        adam.step();
        adam.zero_grad();
        EXPECT_EQ(counted.live(), kFull + kState);

        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> old;
        const auto remember = [&](const at::Tensor& tensor) { old.push_back(tensor.storage().getWeakStorageImpl()); };
        for (const at::Tensor& parameter : model->parameters()) remember(parameter);
        for (const auto& [key, state] : adam.state()) {
          for (const auto& [name, tensor] : optim::adapter_of(adam)->take_apart(*state).tensors) remember(tensor);
        }
        EXPECT_EQ(old.size(), size_t{kLayers * 2 * 3});

        FsdpOptions options;
        options.unit_policy = UnitPolicy::by_type<torch::nn::LinearImpl>();
        options.sync_from_rank0 = sync;
        counted.reset_peak();
        auto fsdp = prepare_fsdp(model, adam, group, options);
        EXPECT_OK(fsdp);
        const int64_t shards = (kFull + kState) / world_size;
        EXPECT(counted.peak() >= kFull + kState + shards);
        EXPECT(counted.peak() <= kFull + kState + shards + 2 * kLayer);
        EXPECT(counted.peak() <= (*fsdp)->plan().memory.prepare_peak_bytes);
        EXPECT_EQ(counted.live(), shards);
        for (const auto& storage : old) EXPECT(storage.expired());
      });
    }
  }
}

// Eight layers of 256 KiB, so that activations, of 1 KiB each, are little.
constexpr int64_t kWide = 256, kWideLayers = 8, kWideLayer = kWide * kWide * 4;

void expect_within_a_percent(int64_t seen, int64_t expected) { EXPECT(std::abs(seen - expected) * 100 <= expected); }

TEST_CASE("training holds what the plan's forecast says, within 1 %, by the allocator's own count", "[transaction][schedule]") {
  for (int world_size : {1, 2, 3}) {
    for (int prefetch : {0, 1, 2}) {
      run_ranks(world_size, [&](int rank, Group group) {
        Allocations counted;
        const CountHere here(counted);
        torch::nn::Sequential model;
        for (int i = 0; i < kWideLayers; ++i)
          model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
        torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
        FsdpOptions options;
        options.unit_policy = UnitPolicy::by_type<torch::nn::LinearImpl>();
        options.prefetch_units = prefetch;
        const auto input = [&](int step) { return random_tensor({1, kWide}, static_cast<uint64_t>(10 * rank + step)); };
        const auto forward = [&](int step) { return model->forward(input(step)).square().mean(); };
        int64_t before = counted.live();
        counted.reset_peak();
        forward(0);
        const int64_t activations = counted.peak() - before;
        auto fsdp = prepare(*model, {&adam}, group, options);
        const MemoryForecast forecast = fsdp->plan().memory;
        const int64_t padded = fsdp->plan().units[0].buffers[0].shard_numel * world_size * 4;
        EXPECT_EQ(forecast.peak_gathered_bytes, world_size == 1 ? 0 : (1 + prefetch) * padded);
        EXPECT_EQ(counted.live(), forecast.parameter_bytes);

        before = counted.live();
        counted.reset_peak();
        forward(0);
        expect_within_a_percent(counted.peak() - before - activations, forecast.peak_gathered_bytes);
        for (int step = 0; step < 3; ++step) {
          fsdp->reset_stats();
          forward(step).backward();
          EXPECT_EQ(fsdp->stats().peak_live_bytes, forecast.peak_gathered_bytes);
          adam.step();
          adam.zero_grad();
          // Kept for the next step: the gradients' memory, the arena of gathered units and that of two reductions in flight.
          expect_within_a_percent(counted.live(), forecast.parameter_bytes + forecast.gradient_bytes + forecast.state_bytes +
                                                      forecast.peak_gathered_bytes + (world_size == 1 ? 0 : 2 * padded));
        }
      });
    }
  }
}

}  // namespace
}  // namespace rebind::test
