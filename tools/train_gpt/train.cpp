#include "tools/train_gpt/train.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "rebind/rebind.h"
#include "tools/train_gpt/gpt.h"

namespace train_gpt {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Clock = std::chrono::steady_clock;

// Matrices decay, biases and norms do not.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(Gpt& model, const Options& options) {
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& parameter : model->parameters()) (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
  const auto with_decay = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(options.lr).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), with_decay(options.weight_decay));
  groups.emplace_back(std::move(vectors), with_decay(0));
  return groups;
}

// The batches that this process runs in `step`, one backward each.
std::vector<Batch> batches(const Text& text, const Options& options, const Group& group, int64_t step, bool sharded) {
  const auto of_rank = [&](int rank) { return text.batch(options.seed, step, rank, options.batch, options.gpt.context); };
  if (sharded) return {of_rank(group->getRank())};
  const int ranks = options.emulate_ranks > 0 ? options.emulate_ranks : group->getSize();
  std::vector<Batch> all;
  all.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) all.push_back(of_rank(rank));
  if (options.by_rank) return all;
  return {joined(all)};
}

double mean_over_ranks(double value, const Group& group) {
  std::vector<at::Tensor> sum{at::full({1}, value, at::kDouble)};
  group->allreduce(sum)->wait();
  return sum[0].item<double>() / group->getSize();
}

int64_t resident_bytes() {
  long long total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Speed since the last line, memory now.
class Progress {
 public:
  Progress(int64_t steps, int64_t every, int64_t tokens_a_step) : steps_(steps), every_(every), tokens_a_step_(tokens_a_step) {}

  void step_done(int64_t step, double loss, const rebind::Fsdp* fsdp) {
    if (step % every_ != 0 && step != steps_) return;
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_time_).count();
    const double speed = static_cast<double>((step - last_step_) * tokens_a_step_) / seconds;
    std::string memory = "plain";
    if (fsdp != nullptr) {
      const rebind::RuntimeStats stats = fsdp->stats();
      memory = absl::StrFormat("gathered %.1f MiB, peak %.1f MiB", mib(stats.live_bytes), mib(stats.peak_live_bytes));
    }
    absl::PrintF("step %5d/%d  loss %.4f  %6.0f tokens/s  %s  resident %.0f MiB\n", step, steps_, loss, speed, memory,
                 mib(resident_bytes()));
    std::fflush(stdout);
    last_step_ = step;
    last_time_ = now;
  }

 private:
  const int64_t steps_, every_, tokens_a_step_;
  int64_t last_step_ = 0;
  Clock::time_point last_time_ = Clock::now();
};

// Characters that the model thinks likely, after a line break. Every rank writes the same ones: sharded, a forward is collective.
std::string sample(Gpt& model, const Text& text, const Options& options) {
  const at::NoGradGuard no_grad;
  torch::manual_seed(options.seed);
  at::Tensor ids = at::zeros({1, 1}, at::kLong);
  for (int64_t i = 0; i < options.sample; ++i) {
    const at::Tensor seen =
        ids.narrow(1, std::max<int64_t>(0, ids.size(1) - options.gpt.context), std::min(ids.size(1), options.gpt.context));
    const at::Tensor next = model->forward(seen).select(1, -1).div(0.8).softmax(-1).multinomial(1);
    ids = at::cat({ids, next}, 1);
  }
  return text.decode(ids.narrow(1, 1, options.sample));
}

}  // namespace

absl::Status train(const Options& options, const Text& text, const Group& group) {
  const bool first = group->getRank() == 0;
  const int ranks = options.emulate_ranks > 0 ? options.emulate_ranks : group->getSize();
  std::ofstream losses;
  if (first && !options.losses_file.empty()) {
    losses.open(options.losses_file);
    if (!losses) return absl::InvalidArgumentError(absl::StrCat("cannot write the losses to '", options.losses_file, "'"));
  }

  GptOptions gpt = options.gpt;
  gpt.vocabulary = text.vocabulary();
  torch::manual_seed(options.seed);
  Gpt model(gpt);
  torch::optim::AdamW optimizer(parameter_groups(model, options), torch::optim::AdamWOptions(options.lr));
  torch::optim::StepLR schedule(optimizer, static_cast<unsigned>(options.lr_step), options.lr_decay);
  if (first) {
    absl::PrintF("%d characters, %d distinct; %d parameters; %d rank%s, %d rows of %d characters each\n", text.size(),
                 gpt.vocabulary, parameter_count(gpt), ranks, ranks == 1 ? "" : "s", options.batch, gpt.context);
  }

  std::unique_ptr<rebind::Fsdp> fsdp;
  Progress progress(options.steps, options.log_every, ranks * options.batch * gpt.context);
  for (int64_t step = 0; step < options.steps; ++step) {
    if (step == options.prepare_at) {
      rebind::FsdpOptions fsdp_options;
      fsdp_options.unit_policy = rebind::UnitPolicy::by_type<BlockImpl>();
      fsdp_options.collective_timeout = options.timeout;
      auto prepared = rebind::prepare_fsdp(*model, {&optimizer}, group, fsdp_options);
      if (!prepared.ok()) return prepared.status();
      fsdp = *std::move(prepared);
      if (first) absl::PrintF("step %5d: sharded over %d rank%s\n", step, group->getSize(), group->getSize() == 1 ? "" : "s");
      if (first && options.print_plan) absl::PrintF("%s\n", fsdp->plan().to_string());
    }

    const std::vector<Batch> parts = batches(text, options, group, step, fsdp != nullptr);
    double loss = 0;
    for (const Batch& batch : parts) {
      const at::Tensor part_loss = loss_of(model->forward(batch.ids), batch.targets);
      part_loss.backward();
      loss += part_loss.item<double>() / static_cast<double>(parts.size());
    }
    if (parts.size() > 1) {
      for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad().div_(static_cast<double>(parts.size()));
    }
    torch::nn::utils::clip_grad_norm_(model->parameters(), /*max_norm=*/1.0);
    optimizer.step();
    optimizer.zero_grad();
    schedule.step();

    if (fsdp != nullptr) loss = mean_over_ranks(loss, group);
    if (!first) continue;
    if (losses.is_open()) losses << absl::StrFormat("%.8f", loss) << std::endl;  // may be watched
    progress.step_done(step + 1, loss, fsdp.get());
  }

  if (options.sample > 0) {
    const std::string written = sample(model, text, options);
    if (first) absl::PrintF("\n%s\n", written);
  }
  if (losses.is_open() && !losses.flush())
    return absl::UnknownError(absl::StrCat("could not write all losses to '", options.losses_file, "'"));
  return absl::OkStatus();
}

}  // namespace train_gpt
