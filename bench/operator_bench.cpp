// What an operator pays for a sharded parameter: Linear(8, 8) on 8 rows, forward alone and with backward, plain and sharded at
// world size 1, where nothing is communicated. bench/operator runs it.
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <memory>

#include "rebind/rebind.h"

namespace {

struct Layer {
  explicit Layer(bool sharded) : sgd(linear->parameters(), 0.1) {
    at::set_num_threads(1);
    if (sharded) fsdp = rebind::prepare_fsdp(*linear, {&sgd}, rebind::make_process_group(nullptr, 0, 1).value()).value();
  }
  torch::nn::Linear linear{8, 8};
  torch::optim::SGD sgd;
  std::unique_ptr<rebind::Fsdp> fsdp;
  at::Tensor input = at::randn({8, 8});
};

void forward(benchmark::State& state, bool sharded) {
  Layer layer(sharded);
  at::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(layer.linear->forward(layer.input));
}

void step(benchmark::State& state, bool sharded) {
  Layer layer(sharded);
  for (auto _ : state) {
    layer.linear->forward(layer.input).sum().backward();
    layer.sgd.step();
    layer.sgd.zero_grad();
  }
}

BENCHMARK_CAPTURE(forward, plain, false);
BENCHMARK_CAPTURE(forward, sharded, true);
BENCHMARK_CAPTURE(step, plain, false);
BENCHMARK_CAPTURE(step, sharded, true);

}  // namespace

BENCHMARK_MAIN();
