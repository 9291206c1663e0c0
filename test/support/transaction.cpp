#include "test/support/transaction.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "lib/optim/adapters.h"
#include "test/support/ranks.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;

struct Model : torch::nn::Module {
  Model(const torch::nn::Linear& body, int rank) {
    register_module("body", body);
    register_parameter("unused", random_tensor({2}, 5));
    register_buffer("seen", random_tensor({3}, 6 + rank));
  }
};

std::string bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "-";
  const at::Tensor plain = tensor.detach().contiguous();
  std::string text;
  for (size_t i = 0; i < plain.nbytes(); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(plain.const_data_ptr())[i]);
    text += digits;
  }
  return text;
}

std::string object(const at::Tensor& tensor) {
  if (!tensor.defined()) return "-";
  std::ostringstream text;
  text << tensor.unsafeGetTensorImpl() << " in " << tensor.storage().unsafeGetStorageImpl() << " at " << tensor.const_data_ptr()
       << " v" << tensor._version() << (tensor.requires_grad() ? " grad" : "");
  return text.str();
}

}  // namespace

Subject::Subject(int rank) : body(5, 3), model(std::make_shared<Model>(body, rank)) {
  randomize(*body, 3);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{body->weight}, std::make_unique<AdamOptions>(1e-2));
  groups.emplace_back(std::vector<at::Tensor>{body->bias, model->named_parameters()["unused"]},
                      std::make_unique<AdamOptions>(AdamOptions(1e-3).weight_decay(0.1)));
  adam = std::make_unique<Adam>(std::move(groups), AdamOptions(1e-2));
  train(1);
  (body->weight * 3).sum().backward();
}

void Subject::train(int steps) {
  for (int i = 0; i < steps; ++i) {
    const auto [input, target] = rows(0, trained++, at::kFloat);
    at::mse_loss(body->forward(input), target).backward();
    adam->step();
    adam->zero_grad();
  }
}

std::string values_of(Subject& subject) {
  std::string text;
  for (const auto& item : subject.model->named_parameters()) {
    text += item.key() + " " + bytes_of(item.value()) + " gradient " + bytes_of(item.value().grad()) + "\n";
  }
  for (const auto& item : subject.model->named_buffers()) text += item.key() + " " + bytes_of(item.value()) + "\n";
  const optim::Adapter& adapter = *optim::adapter_of(*subject.adam);
  for (const auto& group : subject.adam->param_groups()) {
    text += "group " + adapter.options_text(group.options()) + "\n";
    for (const at::Tensor& tensor : group.params()) {
      const auto state = subject.adam->state().find(tensor.unsafeGetTensorImpl());
      if (state == subject.adam->state().end()) continue;
      const optim::StateParts parts = adapter.take_apart(*state->second);
      for (const auto& [key, value] : parts.tensors) text += "  " + key + " " + bytes_of(value) + "\n";
      for (const auto& [key, value] : parts.scalars) text += "  " + key + " " + std::to_string(value) + "\n";
    }
  }
  return text;
}

std::string objects_of(Subject& subject) {
  std::ostringstream text;
  for (const auto& item : subject.model->named_parameters()) {
    text << item.key() << " " << object(item.value()) << " gradient " << object(item.value().grad()) << " hook "
         << (torch::autograd::impl::post_acc_grad_hooks(item.value()) != nullptr) << "\n";
  }
  for (const auto& item : subject.model->named_buffers()) text << item.key() << " " << object(item.value()) << "\n";
  const optim::Adapter& adapter = *optim::adapter_of(*subject.adam);
  for (auto& group : subject.adam->param_groups()) {
    text << "group " << &group.params() << " options " << &group.options() << "\n";
    for (const at::Tensor& tensor : group.params()) {
      text << "  " << object(tensor) << "\n";
      const auto state = subject.adam->state().find(tensor.unsafeGetTensorImpl());
      if (state == subject.adam->state().end()) continue;
      text << "  state " << state->second.get() << "\n";
      for (const auto& [key, value] : adapter.take_apart(*state->second).tensors)
        text << "  " << key << " " << object(value) << "\n";
    }
  }
  text << subject.adam->state().size() << " states\n";
  return text.str();
}

Attempt try_prepare(int world_size, const AttemptOptions& options) {
  Attempt attempt;
  attempt.statuses.resize(world_size);
  std::mutex mutex;
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  const auto body = [&](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    if (options.store) {
      auto own = make_process_group(options.store(rank, shared), rank, world_size, {.timeout = std::chrono::seconds(20)});
      EXPECT_OK(own);
      group = *own;
    }
    Subject subject(rank), twin(rank);
    const std::string values = values_of(subject), objects = objects_of(subject);
    FsdpOptions fsdp_options;
    fsdp_options.collective_timeout = options.timeout;
    const Optimizers optimizers{subject.adam.get()};
    const auto begin = std::chrono::steady_clock::now();
    if (options.arm) options.arm(rank);
    auto fsdp = prepare_fsdp(*subject.model, optimizers, group, fsdp_options);
    if (options.disarm) options.disarm(rank);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    {
      const std::lock_guard lock(mutex);
      attempt.seconds = std::max(attempt.seconds, seconds);
      attempt.statuses[rank] = fsdp.status();
    }
    if (fsdp.ok()) return;
    EXPECT_EQ(objects_of(subject), objects);
    EXPECT_EQ(values_of(subject), values);
    subject.train(2);
    twin.train(2);
    EXPECT_EQ(values_of(subject), values_of(twin));
  };
  const std::vector<std::string> errors = run_ranks_errors(world_size, body);
  for (int rank = 0; rank < world_size; ++rank) {
    if (!errors[rank].empty()) attempt.problem += "rank " + std::to_string(rank) + ": " + errors[rank] + "\n";
  }
  return attempt;
}

bool all_ok(const Attempt& attempt) {
  return std::all_of(attempt.statuses.begin(), attempt.statuses.end(), [](const absl::Status& status) { return status.ok(); });
}

bool all_failed_alike(const Attempt& attempt) {
  return std::all_of(attempt.statuses.begin(), attempt.statuses.end(),
                     [&](const absl::Status& status) { return !status.ok() && status == attempt.statuses[0]; });
}

std::string shown(const Attempt& attempt) {
  std::string text = attempt.problem;
  for (const absl::Status& status : attempt.statuses) text += status.ToString() + "\n";
  return text + std::to_string(attempt.seconds) + " s";
}

}  // namespace rebind::test
