// F2: what prepare_fsdp holds while it works, and what it leaves behind.
#include <ATen/Functions.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

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

}  // namespace
}  // namespace rebind::test
