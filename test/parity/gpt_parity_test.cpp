// The GPT of tools/train_gpt, trained a while, prepared in place and trained on, against one process: bit for bit with REF-W in
// fp32, within 1e-6 of REF in fp64 (in fp32 the joined batch differs from averaged ranks by more than that under Adam: attention's
// key bias has a gradient of rounding noise, which Adam divides by itself).
#include <ATen/Functions.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>

#include <mutex>

#include "test/support/catch.h"
#include "test/support/training.h"
#include "tools/train_gpt/gpt.h"

namespace rebind::test {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using train_gpt::Gpt;

constexpr int kSteps = 8, kPrepareAt = 3;

// What the user's program has built: a GPT, AdamW with a group that decays and one that does not, a StepLR.
struct Training {
  explicit Training(at::ScalarType dtype) : model(make_model(dtype)), optimizer(groups(), AdamWOptions(1e-2)), schedule(optimizer, 2, 0.5) {}

  static Gpt make_model(at::ScalarType dtype) {
    static std::mutex one_at_a_time;  // the default generator is one for all threads
    std::lock_guard lock(one_at_a_time);
    torch::manual_seed(0);
    Gpt model(train_gpt::GptOptions{.vocabulary = 61, .layers = 2, .dim = 64, .context = 16});
    model->to(dtype);
    return model;
  }

  std::vector<torch::optim::OptimizerParamGroup> groups() {
    std::vector<at::Tensor> matrices, vectors;
    for (const at::Tensor& parameter : model->parameters()) (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
    std::vector<torch::optim::OptimizerParamGroup> result;
    result.emplace_back(matrices, std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0.1)));
    result.emplace_back(vectors, std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0)));
    return result;
  }

  void backward(const at::Tensor& ids) {
    train_gpt::loss_of(model->forward(ids.narrow(1, 0, 16)), ids.narrow(1, 1, 16)).backward();
  }

  void step() {
    norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), 1));
    optimizer.step();
    optimizer.zero_grad();
    schedule.step();
  }

  // One backward a rank, added in rank order, divided by W: what the sharded program does.
  void step_by_ranks(int world_size, int step_number) {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < world_size; ++rank) {
      backward(ids(rank, step_number));
      const auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (rank == 0) sums.push_back(parameters[i].grad().clone());
        if (rank > 0) sums[i].add_(parameters[i].grad());
        parameters[i].mutable_grad().reset();
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) model->parameters()[i].mutable_grad() = sums[i].div_(world_size);
    step();
  }

  Setup setup() { return {model.ptr(), {std::shared_ptr<torch::optim::Optimizer>(&optimizer, [](auto*) {})}, nullptr}; }

  static at::Tensor ids(int rank, int step_number) {
    return random_tensor({2, 17}, 500 + 10 * step_number + rank).mul_(20).abs_().to(at::kLong).remainder_(61);
  }

  Gpt model;
  AdamW optimizer;
  torch::optim::StepLR schedule;
  std::vector<double> norms;
};

void check_sharded(int world_size, at::ScalarType dtype, const FsdpOptions& options,
                   const std::function<void(const Snapshot&, const std::vector<double>&)>& check) {
  run_ranks(world_size, [&](int rank, Group group) {
    Training training(dtype);
    for (int step = 0; step < kPrepareAt; ++step) training.step_by_ranks(world_size, step);
    auto fsdp = prepare_fsdp(training.model, training.optimizer, group, options);
    EXPECT_OK(fsdp);
    poison_padding(**fsdp, *training.model);
    const int64_t units = static_cast<int64_t>((*fsdp)->plan().units.size());
    EXPECT_EQ(units, 3);
    for (int step = kPrepareAt; step < kSteps; ++step) {
      (*fsdp)->reset_stats();
      training.backward(Training::ids(rank, step));
      // Forward: the rest (embeddings), both blocks, the rest again (norm, head). Backward: the rest is there, and the last block,
      // for there is room for two; the first block.
      EXPECT_EQ((*fsdp)->stats().all_gathers, world_size == 1 ? 0 : 5);
      EXPECT_EQ((*fsdp)->stats().reduce_scatters, world_size == 1 ? 0 : 3);
      EXPECT_EQ((*fsdp)->stats().live_bytes, 0);
      training.step();
    }
    Setup setup = training.setup();
    expect_sharded(setup, **fsdp);
    check(snapshot(setup, **fsdp), training.norms);
    EXPECT(static_cast<AdamWOptions&>(training.optimizer.param_groups()[0].options()).lr() == 1e-2 / 8);  // StepLR's first step() only counts
  });
}

}  // namespace

TEST_CASE("parity: a GPT prepared in mid-training goes on bit for bit as in one process", "[parity]") {
  for (int world_size : {1, 2, 3}) {
    Training plain(at::kFloat);
    for (int step = 0; step < kSteps; ++step) plain.step_by_ranks(world_size, step);
    Setup setup = plain.setup();
    const Snapshot expected = snapshot(setup);
    for (bool automatic : {true, false}) {
      CAPTURE(world_size, automatic);
      FsdpOptions options;
      if (!automatic) options.unit_policy = UnitPolicy::by_type<train_gpt::BlockImpl>();
      check_sharded(world_size, at::kFloat, options, [&](const Snapshot& got, const std::vector<double>& norms) {
        expect_same(got, expected);
        EXPECT_EQ(norms, plain.norms);
        EXPECT(*std::max_element(norms.begin(), norms.end()) > 1);  // clipping did clip
      });
    }
  }
}

TEST_CASE("parity: in fp64 it stays within 1e-6 of one process on the joined batch", "[parity]") {
  for (int world_size : {2, 3}) {
    Training plain(at::kDouble);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<at::Tensor> rows;
      for (int rank = 0; rank < world_size; ++rank) rows.push_back(Training::ids(rank, step));
      plain.backward(at::cat(rows));
      plain.step();
    }
    Setup setup = plain.setup();
    const Snapshot expected = snapshot(setup);
    check_sharded(world_size, at::kDouble, {}, [&](const Snapshot& got, const std::vector<double>&) { expect_close(got, expected, 1e-6); });
  }
}

}  // namespace rebind::test
