// A user's program against the installed package: two ranks as threads train a small model sharded, and get the losses of one
// process. It would fail if the static library lost the file that registers the touch fallback, for nothing would be gathered.
#include <rebind/rebind.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 2, kSteps = 4;
using Losses = std::vector<double>;

torch::nn::Sequential make_model() {
  torch::nn::Sequential model(torch::nn::Linear(5, 16), torch::nn::Tanh(), torch::nn::Linear(16, 3));
  torch::NoGradGuard no_grad;
  int64_t count = 0;
  for (torch::Tensor& parameter : model->parameters()) {
    const auto values = torch::arange(count, count + parameter.numel(), torch::kFloat);
    parameter.copy_(torch::sin(values).reshape_as(parameter) / 4);
    count += parameter.numel();
  }
  return model;
}

// Rows [begin, end) of the batch of 4.
Losses train(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, int64_t begin, int64_t end) {
  const auto batch = torch::cos(torch::arange(20, torch::kFloat)).reshape({4, 5}).slice(0, begin, end);
  Losses losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = model->forward(batch).pow(2).mean();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int train_rank(c10::intrusive_ptr<c10d::Store> store, int rank, Losses& losses) {
  auto group = rebind::make_process_group(store, rank, kRanks);
  if (!group.ok()) return std::fprintf(stderr, "%s\n", group.status().ToString().c_str()), 1;
  auto model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  auto fsdp = rebind::prepare_fsdp(model, optimizer, *group);
  if (!fsdp.ok()) return std::fprintf(stderr, "%s\n", fsdp.status().ToString().c_str()), 1;
  losses = train(model, optimizer, rank * 2, rank * 2 + 2);
  return (*fsdp)->stats().all_gathers > 0 ? 0 : (std::fprintf(stderr, "nothing was gathered\n"), 1);
}

}  // namespace

int main() {
  auto model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const Losses expected = train(model, optimizer, 0, 4);

  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Losses> losses(kRanks);
  std::vector<int> codes(kRanks, 1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { codes[rank] = train_rank(store, rank, losses[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  if (codes != std::vector<int>(kRanks, 0)) return 1;

  int code = 0;
  for (int step = 0; step < kSteps; ++step) {
    const double loss = (losses[0][step] + losses[1][step]) / 2;
    std::printf("step %d: %.6f, one process %.6f\n", step, loss, expected[step]);
    if (!(std::abs(loss - expected[step]) < 1e-6)) code = 1;
  }
  if (!(expected[kSteps - 1] < expected[0])) code = 1;  // it did train
  return code;
}
