// The GPT of peers/gpt_peer.py in C++: the same model, seeds, random batches and printed line, plain or sharded by rebind.
//
//   gpt_train plain  L D V T B N                    layers, width, vocabulary, context, rows a rank, steps
//   torchrun --no-python --nproc-per-node=W gpt_train rebind L D V T B N
//
// "above": the peak of resident memory less what was resident before the model was built.
// The loss is rank 0's own of the last step, as in the peer; `bench/compare` holds them against each other.
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <c10/util/Exception.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "rebind/rebind.h"
#include "tools/train_gpt/gpt.h"

namespace {

using Clock = std::chrono::steady_clock;

double ms_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <class T>
T value_or_throw(absl::StatusOr<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().ToString());
  return *std::move(result);
}

// A line of /proc/self/status, in MB: VmRSS is resident now, VmHWM the most there ever was.
double resident_mb(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::atof(line.c_str() + field.size() + 1) / 1024;
  }
  throw std::runtime_error("/proc/self/status has no " + field);
}

int64_t argument(int argc, char** argv, int index) {
  const int64_t value = index < argc ? std::atoll(argv[index]) : 0;
  if (value < 1) throw std::invalid_argument("usage: gpt_train plain|rebind L D V T B N   (positive numbers)");
  return value;
}

void run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const train_gpt::GptOptions options{.vocabulary = argument(argc, argv, 4),
                                      .layers = argument(argc, argv, 2),
                                      .dim = argument(argc, argv, 3),
                                      .context = argument(argc, argv, 5)};
  const int64_t rows = argument(argc, argv, 6), steps = argument(argc, argv, 7);
  if (mode != "plain" && mode != "rebind") throw std::invalid_argument("the mode is '" + mode + "', expected plain or rebind");

  const auto group =
      mode == "plain" ? value_or_throw(rebind::make_process_group(nullptr, 0, 1)) : value_or_throw(rebind::init_process_group());
  const int rank = group->getRank(), world_size = group->getSize();
  at::set_num_threads(std::max(1, 2 / world_size));

  const double base_mb = resident_mb("VmRSS");
  torch::manual_seed(0);
  train_gpt::Gpt model(options);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto begin_prepare = Clock::now();
  std::unique_ptr<rebind::Fsdp> fsdp;
  if (mode == "rebind") {
    rebind::FsdpOptions fsdp_options;
    fsdp_options.unit_policy = rebind::UnitPolicy::by_type<train_gpt::BlockImpl>();
    fsdp = value_or_throw(rebind::prepare_fsdp(model, optimizer, group, fsdp_options));
  }
  const double prepare_ms = ms_between(begin_prepare, Clock::now());

  torch::manual_seed(100 + rank);
  std::vector<double> step_ms;
  double forward_ms = 0, backward_ms = 0, optimizer_ms = 0, last_loss = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor ids = at::randint(options.vocabulary, {rows, options.context}, at::kLong);
    const auto t0 = Clock::now();
    const at::Tensor loss = train_gpt::loss_of(model->forward(ids), ids);
    const auto t1 = Clock::now();
    loss.backward();
    const auto t2 = Clock::now();
    optimizer.step();
    optimizer.zero_grad();
    const auto t3 = Clock::now();
    last_loss = loss.item<double>();
    if (step < 2) continue;  // warming up
    step_ms.push_back(ms_between(t0, t3));
    forward_ms += ms_between(t0, t1);
    backward_ms += ms_between(t1, t2);
    optimizer_ms += ms_between(t2, t3);
  }
  if (rank != 0) return;
  const double counted = static_cast<double>(std::max<size_t>(step_ms.size(), 1));
  std::printf(
      "cpp-%s W=%d params=%.1fM step median %.1f ms (fwd %.1f bwd %.1f opt %.1f) prepare %.0f ms maxrss %.0f MB above %.0f MB loss "
      "%.6f\n",
      mode.c_str(), world_size, static_cast<double>(train_gpt::parameter_count(options)) / 1e6, median(step_ms),
      forward_ms / counted, backward_ms / counted, optimizer_ms / counted, prepare_ms, resident_mb("VmHWM"),
      resident_mb("VmHWM") - base_mb, last_loss);
  if (fsdp == nullptr) return;
  const rebind::RuntimeStats stats = fsdp->stats();
  std::printf("gathered %.2f MB a step; gathered at once at most %.2f MB, forecast %.2f MB\n",
              static_cast<double>(stats.gathered_bytes) / static_cast<double>(steps) / 1e6,
              static_cast<double>(stats.peak_live_bytes) / 1e6, static_cast<double>(fsdp->plan().memory.peak_gathered_bytes) / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
    return 0;
  } catch (const c10::Error& e) {
    std::fprintf(stderr, "gpt_train: %s\n", e.what_without_backtrace());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpt_train: %s\n", e.what());
  }
  return 1;
}
