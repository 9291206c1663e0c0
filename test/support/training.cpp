#include "test/support/training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <limits>

#include "lib/optim/adapters.h"
#include "lib/runtime/slice_state.h"

namespace rebind::test {

Net::Net(at::ScalarType dtype) {
  first = register_module("first", torch::nn::Linear(5, 7));
  second = register_module("second", torch::nn::Linear(7, 3));
  scale = register_parameter("scale", at::ones({1}));
  unused = register_parameter("unused", at::ones({3}));
  to(dtype);
  scale = named_parameters(false)["scale"];
  unused = named_parameters(false)["unused"];
}

at::Tensor Net::forward(const at::Tensor& input) { return second(at::tanh(first(input))) * scale; }

at::Tensor random_tensor(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::empty(sizes, at::TensorOptions().dtype(at::kDouble)).normal_(0, 1, generator).to(dtype);
}

void randomize(torch::nn::Module& model, uint64_t seed) {
  at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) {
    const at::Tensor values = random_tensor(parameter.sizes(), seed++, at::kDouble);
    parameter.copy_(parameter.is_floating_point() ? values.to(parameter.scalar_type()).mul_(0.5) : values.mul_(40).abs_());
  }
}

Optimizers Setup::pointers() const {
  Optimizers result;
  for (const auto& optimizer : optimizers) result.push_back(optimizer.get());
  return result;
}

Setup net_with(const std::function<std::vector<std::shared_ptr<torch::optim::Optimizer>>(Net&)>& optimizers, at::ScalarType dtype) {
  auto net = std::make_shared<Net>(dtype);
  randomize(*net, 1);
  return {net, optimizers(*net), [net](const at::Tensor& input) { return net->forward(input); }};
}

std::pair<at::Tensor, at::Tensor> rows(int rank, int step, at::ScalarType dtype) {
  const auto seed = static_cast<uint64_t>(1000 + 100 * step + rank);
  return {random_tensor({2, 5}, seed, dtype), random_tensor({2, 3}, seed + 50, dtype) * (step % 2 == 0 ? 2 : -2)};
}

namespace {

at::ScalarType dtype_of(const Setup& setup) { return setup.model->parameters().front().scalar_type(); }

void backward_on(Setup& setup, const at::Tensor& input, const at::Tensor& target) {
  at::mse_loss(setup.forward(input), target).backward();
}

void end_step(const Program& program, Setup& setup, int step) {
  if (program.before_step) program.before_step(setup, step);
  for (auto& optimizer : setup.optimizers) optimizer->step();
  if (program.zero_grad) {
    program.zero_grad(setup, step);
  } else {
    for (auto& optimizer : setup.optimizers) optimizer->zero_grad();
  }
}

// Gradients are added in this dtype.
at::ScalarType sum_dtype(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype; }

// One backward a rank from what .grad held, added in rank order, divided by W; None stays None.
void reference_w_step(const Program& program, Setup& setup, int world_size, int step) {
  std::vector<at::Tensor> parameters = setup.model->parameters();
  parameters.insert(parameters.end(), setup.free.begin(), setup.free.end());
  std::vector<at::Tensor> before, sum(parameters.size());
  for (const at::Tensor& parameter : parameters) before.push_back(parameter.grad());
  for (int r = 0; r < world_size; ++r) {
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    auto [input, target] = rows(r, step, dtype_of(setup));
    backward_on(setup, input, target);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      const at::Tensor term = gradient.to(sum_dtype(gradient.scalar_type()));
      sum[i] = sum[i].defined() ? sum[i] + term : term.clone();
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor mean = sum[i].defined() ? sum[i].div(world_size).to(parameters[i].scalar_type()) : sum[i];
    if (before[i].defined()) mean = mean.defined() ? before[i] + mean : before[i];
    parameters[i].mutable_grad() = mean;
  }
  end_step(program, setup, step);
}

std::string text_of(const at::Tensor& tensor) {
  std::string text = std::string(c10::toString(tensor.scalar_type())) + " " + shape_text(tensor.sizes().vec());
  return text;
}

// The elements of each rank's part of the model and where padding is: by the plan.
std::vector<bool> covered(const runtime::Unit& unit) {
  std::vector<bool> result(unit.shard_numel, false);
  for (const runtime::Parameter* parameter : unit.parameters) {
    for (int64_t i = 0; i < parameter->shard_interval.numel(); ++i) result[parameter->shard_offset + i] = true;
  }
  return result;
}

std::shared_ptr<runtime::Sharding> sharding_of(torch::nn::Module& model) {
  auto sharding = runtime::Sharding::of(model.parameters().front());
  EXPECT(sharding != nullptr);
  return sharding;
}

}  // namespace

void poison_padding(Fsdp&, torch::nn::Module& model) {
  at::NoGradGuard no_grad;
  for (const auto& unit : sharding_of(model)->units) {
    const std::vector<bool> used = covered(*unit);
    for (int64_t i = 0; i < unit->shard_numel; ++i) {
      if (used[i]) continue;
      // Integers have no NaN: 113 is as wrong, and fits into each of them.
      unit->flat_shard[i].fill_(unit->flat_shard.is_floating_point() ? std::numeric_limits<double>::quiet_NaN() : 113);
    }
  }
}

Snapshot snapshot(Setup& setup) {
  Snapshot result;
  std::map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : setup.model->named_parameters()) {
    result[item.key()] = item.value().detach().clone();
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  for (size_t i = 0; i < setup.free.size(); ++i) {
    const std::string name = "free." + std::to_string(i);
    result[name] = setup.free[i].detach().clone();
    names.emplace(setup.free[i].unsafeGetTensorImpl(), name);
  }
  for (size_t k = 0; k < setup.optimizers.size(); ++k) {
    const optim::Adapter* adapter = optim::adapter_of(*setup.optimizers[k]);
    for (const auto& [key, state] : setup.optimizers[k]->state()) {
      const std::string prefix = std::to_string(k) + ":" + names.at(static_cast<const c10::TensorImpl*>(key)) + ".";
      const optim::StateParts parts = adapter->take_apart(*state);
      for (const auto& [part, tensor] : parts.tensors) result[prefix + part] = tensor.clone();
      for (const auto& [part, value] : parts.scalars) result[prefix + part] = at::scalar_tensor(value, at::kLong);
    }
  }
  return result;
}

Snapshot snapshot(Setup& setup, Fsdp& fsdp) {
  Snapshot result;
  auto sharding = sharding_of(*setup.model);
  for (size_t i = 0; i < setup.free.size(); ++i) {
    const std::string name = "free." + std::to_string(i);
    result[name] = setup.free[i].detach().clone();
    for (size_t k = 0; k < setup.optimizers.size(); ++k) {
      const auto found = setup.optimizers[k]->state().find(setup.free[i].unsafeGetTensorImpl());
      if (found == setup.optimizers[k]->state().end()) continue;
      const optim::StateParts parts = optim::adapter_of(*setup.optimizers[k])->take_apart(*found->second);
      const std::string prefix = std::to_string(k) + ":" + name + ".";
      for (const auto& [part, tensor] : parts.tensors) result[prefix + part] = tensor.clone();
      for (const auto& [part, value] : parts.scalars) result[prefix + part] = at::scalar_tensor(value, at::kLong);
    }
  }
  for (const auto& item : setup.model->named_parameters()) {
    const std::string& name = item.key();
    auto values = fsdp.full_parameter(name);
    EXPECT_OK(values);
    result[name] = *values;
    if (name != sharding->find(name)->name) continue;  // a tie's state stands once, under its first name
    for (size_t k = 0; k < setup.optimizers.size(); ++k) {
      const auto& optimizer = *setup.optimizers[k];
      const std::optional<optim::StateParts> state = runtime::state_of(optimizer, *sharding->find(name));
      if (!state) continue;
      const optim::StateParts& parts = *state;
      for (const auto& [part, tensor] : parts.tensors) {
        auto whole = fsdp.full_state(optimizer, name, part);
        EXPECT_OK(whole);
        result[std::to_string(k) + ":" + name + "." + part] = *whole;
      }
      for (const auto& [part, value] : parts.scalars) {
        auto whole = fsdp.full_state(optimizer, name, part);
        EXPECT_OK(whole);
        result[std::to_string(k) + ":" + name + "." + part] = *whole;
      }
    }
  }
  return result;
}

Snapshot reference(const Program& program, int world_size) {
  Setup setup = program.make();
  for (int step = 0; step < program.steps; ++step) {
    std::vector<at::Tensor> inputs, targets;
    for (int r = 0; r < world_size; ++r) {
      auto [input, target] = rows(r, step, dtype_of(setup));
      inputs.push_back(input);
      targets.push_back(target);
    }
    backward_on(setup, at::cat(inputs), at::cat(targets));
    end_step(program, setup, step);
  }
  return snapshot(setup);
}

Snapshot reference_w(const Program& program, int world_size) {
  Setup setup = program.make();
  for (int step = 0; step < program.steps; ++step) reference_w_step(program, setup, world_size, step);
  return snapshot(setup);
}

Trained train_sharded(const Program& program, int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  Trained trained{program.make(), nullptr};
  for (int step = 0; step < program.steps; ++step) {
    if (step == program.prepare_at) {
      auto fsdp = prepare_fsdp(*trained.setup.model, trained.setup.pointers(), group, program.options);
      EXPECT_OK(fsdp);
      trained.fsdp = *std::move(fsdp);
      poison_padding(*trained.fsdp, *trained.setup.model);
    }
    if (step < program.prepare_at) {
      reference_w_step(program, trained.setup, group->getSize(), step);
      continue;
    }
    auto [input, target] = rows(rank, step, dtype_of(trained.setup));
    backward_on(trained.setup, input, target);
    EXPECT_EQ(trained.fsdp->stats().live_bytes, 0);
    end_step(program, trained.setup, step);
    // A program that reads parameters after its step leaves the unit it read last.
    if (!program.zero_grad) EXPECT_EQ(trained.fsdp->stats().live_bytes, 0);
  }
  return trained;
}

void expect_same(const std::string& what, const at::Tensor& got, const at::Tensor& expected) {
  if (got.scalar_type() != expected.scalar_type() || got.sizes() != expected.sizes() || got.strides() != expected.strides()) {
    fail(__FILE__, __LINE__, what + ": got " + text_of(got) + ", expected " + text_of(expected));
  }
  if (at::equal(got, expected)) return;
  const at::Tensor a = got.reshape({-1}).to(at::kDouble), b = expected.reshape({-1}).to(at::kDouble);
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double x = a[i].item<double>(), y = b[i].item<double>();
    if (x != y) fail(__FILE__, __LINE__, what + "[" + std::to_string(i) + "]: got " + shown(x) + ", expected " + shown(y));
  }
}

void expect_same(const Snapshot& got, const Snapshot& expected) {
  for (const auto& [key, tensor] : expected) {
    EXPECT_EQ(key, got.contains(key) ? key : "missing");
    expect_same(key, got.at(key), tensor);
  }
  for (const auto& [key, tensor] : got) EXPECT_EQ(key, expected.contains(key) ? key : "unexpected");
}

void expect_close(const Snapshot& got, const Snapshot& expected, double tolerance) {
  for (const auto& [key, tensor] : expected) {
    EXPECT_EQ(key, got.contains(key) ? key : "missing");
    const double difference =
        tensor.numel() == 0 ? 0 : (got.at(key).to(at::kDouble) - tensor.to(at::kDouble)).abs().max().item<double>();
    if (!(difference <= tolerance)) fail(__FILE__, __LINE__, key + ": differs by " + shown(difference));
  }
  EXPECT_EQ(got.size(), expected.size());
}

void expect_sharded(const Setup& setup, Fsdp& fsdp) {
  const FsdpPlan& plan = fsdp.plan();
  int64_t total = 0, padding = 0;
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      total += buffer.numel;
      padding += buffer.padded_numel - buffer.numel;
    }
  }
  int64_t most = total / plan.world_size + padding + 1;
  for (const at::Tensor& tensor : setup.free) most += tensor.numel();
  for (const auto& optimizer : setup.optimizers) {
    std::map<std::string, int64_t> held;  // by state tensor
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) held["params"] += parameter.numel();
    }
    for (const auto& [key, state] : optimizer->state()) {
      for (const auto& [part, tensor] : optim::adapter_of(*optimizer)->take_apart(*state).tensors) held[part] += tensor.numel();
    }
    for (const auto& [what, numel] : held) {
      if (numel > most) fail(__FILE__, __LINE__, what + ": " + std::to_string(numel) + " elements of " + std::to_string(total));
    }
  }
  EXPECT_EQ(fsdp.stats().live_bytes, 0);
}

}  // namespace rebind::test
