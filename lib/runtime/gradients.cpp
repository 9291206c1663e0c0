// From autograd's whole local gradient on a window to this rank's part of the mean on the shard.
#include <ATen/Functions.h>
#include <absl/cleanup/cleanup.h>
#include <absl/strings/str_cat.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>

#include "lib/runtime/hook.h"
#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

constexpr int kWordBits = 64;
int words_for(size_t bits) { return static_cast<int>((bits + kWordBits - 1) / kWordBits); }
void set_bit(std::vector<uint64_t>& words, size_t bit) { words[bit / kWordBits] |= uint64_t{1} << (bit % kWordBits); }
bool any_rank_has(const std::vector<std::vector<uint64_t>>& words, size_t bit) {
  for (const auto& of_rank : words) {
    if ((of_rank[bit / kWordBits] >> (bit % kWordBits)) & 1) return true;
  }
  return false;
}

// This rank's pending gradients as one flat buffer of `dtype`; zeros where there is none, in gaps and in the tail.
void pack(Unit& unit, at::ScalarType dtype, char* memory) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor flat = at::from_blob(memory, {unit.padded_numel}, at::TensorOptions().dtype(dtype));
  int64_t end = 0;  // of what is written
  const auto zero_until = [&](int64_t begin) {
    if (begin > end) std::memset(memory + end * item_bytes, 0, (begin - end) * item_bytes);
  };
  for (Parameter* parameter : unit.parameters) {
    if (!parameter->pending.defined() || parameter->numel == 0) continue;
    zero_until(parameter->offset);
    flat.as_strided(parameter->sizes, parameter->strides, parameter->offset).copy_(parameter->pending);
    parameter->pending.reset();
    end = parameter->offset + parameter->numel;
  }
  zero_until(unit.padded_numel);
}

}  // namespace

const GradientHook* GradientHook::of(const at::Tensor& tensor) {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor);
  return dynamic_cast<const GradientHook*>(hook.get());
}

GradientHook::~GradientHook() { sharding_->hook_lost(*parameter_); }

void GradientHook::operator()(const at::Tensor& window) { sharding_->hook_fired(*parameter_, window); }

void Sharding::hook_fired(Parameter& parameter, const at::Tensor& window) {
  std::lock_guard lock(mutex);
  if (restored) return;
  if (c10::GradMode::is_enabled()) {
    if (parameter.facade == nullptr) window.mutable_grad().reset();
    throw_error(where("backward(create_graph=true)", &parameter), "a gradient that has a graph cannot be kept in .grad of a shard",
                "Use torch::autograd::grad for gradients of gradients");
  }
  try {
    check_window(parameter);
  } catch (...) {
    if (parameter.facade == nullptr) window.mutable_grad().reset();  // it belongs to the data that was just undone
    throw;
  }
  if (whole_open) {
    window.mutable_grad().reset();
    throw_error(where("backward", &parameter), "a backward inside full_parameters() would train on copies",
                "Close the scope before training");
  }
  begin_task();
  if (at::Tensor gradient = window.grad(); gradient.defined() && !is_facade_of(parameter, gradient)) {
    // Fresh: .grad was undefined when backward began. A sum that the shard may still have was dropped on the window's side.
    window.mutable_grad().reset();
    forget_gradient(parameter);
    take_gradient(parameter, std::move(gradient));
  }
  if (!parameter.arrived) {
    parameter.arrived = true;
    if (++parameter.unit->arrived == static_cast<int>(parameter.unit->parameters.size())) reduce(*parameter.unit);
  }
}

void Sharding::hook_lost(Parameter& parameter) noexcept {
  std::lock_guard lock(mutex);
  // With the model itself its hooks go too.
  if (!closing_ && !restored && parameter.lock_window().defined()) unhooked_ = &parameter;
}

void Sharding::take_gradient(Parameter& parameter, at::Tensor gradient) {
  if (gradient.layout() != at::kStrided) {
    throw_error(where("backward", &parameter), "its gradient is sparse, which cannot be sharded",
                "Use the dense gradient (an embedding's sparse option off)");
  }
  // A view of another parameter is there only while an operator runs on it.
  if (KeyedStorage::of(gradient) != nullptr) gradient = gradient.clone();
  // Added out of place: the tensor may be shared with another parameter or held by a user's hook.
  parameter.pending = parameter.pending.defined() ? parameter.pending + gradient : std::move(gradient);
  parameter.waiting = true;
  if (at::Tensor window = parameter.lock_window(); window.defined()) put_handles(parameter, window);
}

namespace {

// Lives as long as the backward's graph task. An exception ends that without a callback, but not without this.
struct BackwardEnd {
  explicit BackwardEnd(std::weak_ptr<Sharding> sharding_of_task) : sharding(std::move(sharding_of_task)) {}
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  ~BackwardEnd() {
    if (const std::shared_ptr<Sharding> alive = sharding.lock()) alive->backward_ended();
  }
  std::weak_ptr<Sharding> sharding;
};

}  // namespace

void Sharding::begin_task() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task_) return;
  // Another backward than the one whose arrivals were counted: that one was interrupted, or this one runs inside it.
  graph_task_ = task;
  for (auto& unit : units) {
    finish_reduction(*unit);
    unit->arrived = 0;
    for (Parameter* other : unit->parameters) other->arrived = false;
  }
  auto end = std::make_shared<BackwardEnd>(weak_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this(), end] { self->finish_backward(); });
}

void Sharding::backward_ended() noexcept {
  std::lock_guard lock(mutex);
  for (auto& replica : replicas) interrupt(*replica);
  // After an exception some members of a run have a gradient and some may not: nobody knows before they are reduced, and then an
  // optimizer may be walking over the slices. Now none is.
  for (auto& unit : units) {
    for (auto& run : unit->runs) {
      if (run->is_joined && run->joined.front()->gradient != nullptr && !run->joined.front()->values.defined()) make_single(*run);
    }
  }
}

void Sharding::finish_backward() {
  std::lock_guard lock(mutex);
  if (restored) return;
  graph_task_ = -1;
  finishing_ = true;
  absl::Cleanup done = [this] { finishing_ = false; };
  std::vector<uint64_t> words(words_for(units.size() + replicas.size()));
  for (auto& unit : units) {
    if (unit->has_pending()) set_bit(words, unit->index);
  }
  for (size_t i = 0; i < replicas.size(); ++i) {
    if (replicas[i]->pending.defined()) set_bit(words, units.size() + i);
  }
  std::vector<std::vector<uint64_t>> all{words};
  if (world_size() > 1) {
    // Also the proof, before any gradient reaches an optimizer, that all ranks have been through the same collectives.
    auto exchanged = communicator->exchange(
        {.kind = comm::Kind::kExchange, .unit = 0, .epoch = epoch_, .name = "the end of backward"}, words);
    if (!exchanged.ok()) throw c10::Error(std::string(exchanged.status().message()), nullptr);
    all = *std::move(exchanged);
  }
  for (auto& unit : units) {
    if (any_rank_has(all, unit->index)) reduce(*unit);
  }
  for (size_t i = 0; i < replicas.size(); ++i) {
    if (any_rank_has(all, units.size() + i)) average(*replicas[i], static_cast<int>(i));
  }
  for (auto& unit : units) {
    finish_reduction(*unit);
    unit->arrived = 0;
    for (Parameter* parameter : unit->parameters) parameter->arrived = false;
  }
  ++epoch_;
  schedule_.close();
  drop_unpinned();
}

void Sharding::reduce_alone(Unit& unit) {
  std::vector<bool> present(unit.parameters.size());
  for (const Parameter* parameter : unit.parameters) present[parameter->slot_in_unit] = parameter->pending.defined();
  if (coalesce_) {
    const at::Tensor mean = memory_for_gradient(unit, unit.dtype);
    pack(unit, unit.dtype, static_cast<char*>(mean.data_ptr()));
    if (divide_factor != 1) mean.div_(divide_factor);
    return place(unit, mean, present);
  }
  // A slice is a parameter, and its gradient may stay where autograd put it.
  for (Parameter* parameter : unit.parameters) {
    if (!parameter->pending.defined()) continue;
    at::Tensor values = parameter->in_memory_order(std::exchange(parameter->pending, at::Tensor()));
    if (divide_factor != 1) values = values.div(divide_factor);
    Slice& slice = *parameter->singles.front();
    slice.values.defined() ? static_cast<void>(slice.values.add_(values)) : set_gradient(slice, values);
    parameter->reduced = true;
  }
  place(unit, {}, std::vector<bool>(present.size()));
}

at::Tensor Sharding::memory_for_gradient(Unit& unit, at::ScalarType dtype) {
  at::Tensor& memory = unit.gradient_memory;
  if (!memory.defined() || memory.storage().use_count() > 1) memory = at::empty({unit.shard_numel}, at::TensorOptions().dtype(dtype));
  return memory.view({-1});
}

void Sharding::place(Unit& unit, const at::Tensor& mean, const std::vector<bool>& present) {
  std::vector<bool> placed(present.size());
  for (Parameter* parameter : unit.parameters) {
    const bool cleared = std::exchange(parameter->cleared, false);
    if (!parameter->pending.defined()) parameter->waiting = false;
    if (!present[parameter->slot_in_unit] || cleared) continue;
    at::Tensor window = parameter->lock_window();
    if (!window.defined()) continue;  // the model is gone; nobody can step it
    placed[parameter->slot_in_unit] = true;
    ClosingScope on_purpose(*this);
    if (parameter->facade == nullptr) window.mutable_grad() = make_facade(*parameter);
  }
  if (mean.defined()) distribute(unit, mean, [&](const Parameter& parameter) { return placed[parameter.slot_in_unit]; });
}

void Sharding::reduce(Unit& unit) {
  at::NoGradGuard no_grad;
  if (world_size() == 1) return reduce_alone(unit);
  finish_reduction(unit);
  std::vector<uint64_t> words(words_for(unit.parameters.size()));
  for (const Parameter* parameter : unit.parameters) {
    if (parameter->pending.defined()) set_bit(words, parameter->slot_in_unit);
  }
  const at::ScalarType dtype = reduce_dtype(unit.dtype);
  const int64_t bytes = unit.padded_numel * static_cast<int64_t>(c10::elementSize(dtype));
  Arena::Block flat = reducing.allocate(bytes);
  while (!flat && !reductions_.empty()) {
    finish_reduction(*reductions_.front());
    flat = reducing.allocate(bytes);
  }
  if (!flat) flat = Arena::outside(bytes);
  pack(unit, dtype, flat.data());
  unit.reduction = Reduction{.flat = std::move(flat), .mean = memory_for_gradient(unit, dtype), .scatter = {}};
  unit.reduction->scatter = communicator->post_reduce_scatter(
      {.kind = comm::Kind::kReduceScatter, .unit = static_cast<uint32_t>(unit.index), .epoch = epoch_,
       .name = absl::StrCat("gradients of unit '", unit.name, "'")},
      unit.reduction->flat.data(), unit.reduction->mean.data_ptr(), unit.shard_numel, dtype, std::move(words), divide_factor);
  reductions_.push_back(&unit);
  ++counts.reduce_scatters;
  counts.reduced_bytes += bytes;
}

void Sharding::finish_reduction(Unit& unit) {
  if (!unit.reduction) return;
  at::NoGradGuard no_grad;
  std::erase(reductions_, &unit);
  const absl::Status status = communicator->wait(unit.reduction->scatter);
  const Reduction reduction = *std::exchange(unit.reduction, std::nullopt);
  if (!status.ok()) throw c10::Error(std::string(status.message()), nullptr);
  const comm::Words& present = comm::Communicator::words_of(reduction.scatter);
  std::vector<bool> is_present(unit.parameters.size());
  for (size_t i = 0; i < is_present.size(); ++i) is_present[i] = any_rank_has(present, i);
  place(unit, reduction.mean.to(unit.dtype), is_present);
}

void Sharding::settle(Parameter& parameter) {
  // A side that the program cleared while it kept a copy of the handle could not tell us (Note: Gradient states).
  const at::Tensor window = parameter.lock_window();
  const bool window_cleared = parameter.facade != nullptr && window.defined() && !window.grad().defined();
  if (window_cleared) return forget_gradient(parameter);
  if (slices_cleared(parameter)) {
    for (Slice* slice : slices_of(parameter)) {
      for (Parameter* member : slice->members) forget_gradient(*member);
    }
    return;
  }
  if (parameter.pending.defined()) reduce(*parameter.unit);
  finish_reduction(*parameter.unit);
}

void Sharding::use_slice_gradient(Slice& slice) {
  for (Parameter* member : slice.members) {
    const at::Tensor window = member->lock_window();
    if (member->facade != nullptr && window.defined() && !window.grad().defined()) {
      // The program keeps a handle on the gradient it cleared, so the storage could not tell us (Note: Gradient states).
      throw_error(where("optimizer.step()", member), "its gradient was cleared on the model while the program kept a copy of the handle",
                  "Clone a gradient to keep it");
    }
  }
  for (Parameter* member : slice.members) settle(*member);
}

}  // namespace rebind::runtime
