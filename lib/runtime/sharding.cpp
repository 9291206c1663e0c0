#include "lib/runtime/sharding.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "lib/plan/flat_layout.h"
#include "lib/runtime/hook.h"
#include "lib/runtime/touch.h"

namespace rebind::runtime {
namespace {
std::atomic<bool> strict{false};

std::string name_of(const UnitPlan& unit, const BufferPlan& buffer) {
  if (unit.buffers.size() == 1) return unit.name;
  return absl::StrCat(unit.name, " (", buffer.requires_grad ? "" : "frozen ", c10::toString(buffer.dtype), ")");
}

// The `count` largest of `sizes`, added.
int64_t sum_of_largest(std::vector<int64_t> sizes, size_t count) {
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  sizes.resize(std::min(count, sizes.size()));
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// The unit in use and those that are gathered ahead; every unit, if none is freed after forward.
int64_t gathered_capacity(const FsdpPlan& plan, const FsdpOptions& options) {
  std::vector<int64_t> sizes;
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      sizes.push_back(Arena::rounded(buffer.padded_numel * static_cast<int64_t>(c10::elementSize(buffer.dtype))));
    }
  }
  const size_t most = options.reshard_after_forward ? 1 + static_cast<size_t>(options.prefetch_units) : sizes.size();
  return sum_of_largest(std::move(sizes), most);
}

// One unit's gradients on their way while the next ones are packed.
int64_t reducing_capacity(const FsdpPlan& plan) {
  std::vector<int64_t> sizes;
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      const auto item = static_cast<int64_t>(c10::elementSize(reduce_dtype(buffer.dtype)));
      if (buffer.requires_grad) sizes.push_back(Arena::rounded(buffer.padded_numel * item));
    }
  }
  return sum_of_largest(std::move(sizes), 2);
}
}  // namespace

// Half precision is summed in fp32: W roundings to 8 bits of mantissa would be visible.
at::ScalarType reduce_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

void set_strict_for_tests(bool value) { strict = value; }
bool strict_for_tests() { return strict.load(std::memory_order_relaxed); }

std::shared_ptr<Sharding> Sharding::make(const FsdpPlan& plan, const FsdpOptions& options, const Optimizers& optimizers,
                                         std::unique_ptr<comm::Communicator> communicator,
                                         c10::intrusive_ptr<c10d::ProcessGroup> group) {
  keep_touch_registered();
  return std::shared_ptr<Sharding>(new Sharding(plan, options, optimizers, std::move(communicator), std::move(group)));
}

Sharding::Sharding(const FsdpPlan& plan_value, const FsdpOptions& options, const Optimizers& optimizer_list,
                   std::unique_ptr<comm::Communicator> communicator_value, c10::intrusive_ptr<c10d::ProcessGroup> group_value)
    : plan(plan_value),
      optimizers(optimizer_list),
      gathered(gathered_capacity(plan_value, options)),
      reducing(reducing_capacity(plan_value)),
      communicator(std::move(communicator_value)),
      group(std::move(group_value)),
      timeout(options.collective_timeout),
      divide_factor(options.gradient_divide_factor.value_or(plan_value.world_size)),
      prefetch_units_(options.prefetch_units),
      coalesce_(options.coalesce) {
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const ParameterPlan& from = plan.parameters[i];
    auto parameter = std::make_unique<Parameter>();
    parameter->index = static_cast<int>(i);
    parameter->name = from.names.front();
    parameter->sizes = from.sizes;
    parameter->strides = from.strides;
    parameter->dtype = from.dtype;
    parameter->item_bytes = static_cast<int64_t>(c10::elementSize(from.dtype));
    parameter->numel = from.numel();
    parameter->shard_interval = from.shard;
    parameter->offset = from.offset;
    parameter->requires_grad = from.requires_grad;
    parameter->holders = from.holders;
    parameters.push_back(std::move(parameter));
  }
  for (const UnitPlan& from : plan.units) {
    for (const BufferPlan& buffer : from.buffers) add_unit(buffer, name_of(from, buffer));
  }
}

void Sharding::add_unit(const BufferPlan& buffer, std::string name) {
  auto unit = std::make_unique<Unit>();
  unit->index = static_cast<int>(units.size());
  unit->name = std::move(name);
  unit->dtype = buffer.dtype;
  unit->item_bytes = static_cast<int64_t>(c10::elementSize(buffer.dtype));
  unit->shard_numel = buffer.shard_numel;
  unit->padded_numel = buffer.padded_numel;
  for (int index : buffer.parameters) {
    Parameter& parameter = *parameters[index];
    parameter.unit = unit.get();
    parameter.slot_in_unit = static_cast<int>(unit->parameters.size());
    // 0 for a parameter that has nothing here: any valid place will do.
    parameter.shard_offset = parameter.shard_interval.numel() == 0
                                 ? 0
                                 : parameter.offset + parameter.shard_interval.begin - plan.rank * unit->shard_numel;
    unit->parameters.push_back(&parameter);
  }
  unit->values.stale.assign(unit->parameters.size(), false);
  unit->gradients.stale.assign(unit->parameters.size(), false);
  unit->flat_shard = at::zeros({unit->shard_numel}, at::TensorOptions().dtype(unit->dtype));
  units.push_back(std::move(unit));
}

at::Tensor Parameter::in_memory_order(const at::Tensor& whole) const {
  at::Tensor dense = whole.detach().resolve_conj().resolve_neg();
  if (dense.strides() != at::IntArrayRef(strides)) dense = at::empty_strided(sizes, strides, whole.options()).copy_(dense);
  return dense.as_strided({numel}, {1});
}

std::shared_ptr<Sharding> Sharding::of(const at::Tensor& tensor) {
  if (const KeyedStorage* storage = KeyedStorage::of(tensor)) return storage->lock();
  if (const GradientHook* hook = GradientHook::of(tensor)) return hook->sharding();
  return nullptr;
}

Where Sharding::where(std::string_view call, const Parameter* parameter) const {
  Where where{.call = std::string(call), .rank = plan.rank};
  if (parameter != nullptr) where.parameter = parameter->name;
  return where;
}

Parameter* Sharding::find(const std::string& name) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<std::string>& names = plan.parameters[i].names;
    if (std::find(names.begin(), names.end(), name) != names.end()) return parameters[i].get();
  }
  return nullptr;
}

void Sharding::shard_written(Slice& slice, const at::Tensor& tensor) {
  Unit& unit = *slice.run->unit;
  if (live_bytes_ > 0) {
    // A step: whatever is still gathered has had its last use.
    for (const Parameter* member : slice.members) unit.values.stale[member->slot_in_unit] = true;
    drop_unpinned();
  }
  // A backward through an older graph must fail where the plain program's fails: if the written tensor shares the slice's version
  // counter (the tensor itself and its views do, data() does not), the windows' counters move too, on every rank those of all
  // members. Sharing has no query, so a trial bump tells; what it outdates is outdated by the write anyway.
  const auto before = slice.tensor._version();
  tensor.unsafeGetTensorImpl()->bump_version();
  if (slice.tensor._version() == before) return;
  for (const Parameter* member : slice.members) {
    if (at::Tensor window = member->lock_window(); window.defined()) window.unsafeGetTensorImpl()->bump_version();
  }
}

RuntimeStats Sharding::stats() {
  std::lock_guard lock(mutex);
  RuntimeStats result = counts;
  result.live_bytes = live_bytes_;
  result.exposed_wait_seconds = communicator->waited_seconds() - waited_at_reset_;
  return result;
}

void Sharding::reset_stats() {
  std::lock_guard lock(mutex);
  counts = {};
  counts.peak_live_bytes = live_bytes_;
  waited_at_reset_ = communicator->waited_seconds();
}

void Sharding::set_live_bytes(int64_t change) {
  live_bytes_ += change;
  counts.peak_live_bytes = std::max(counts.peak_live_bytes, live_bytes_);
}

}  // namespace rebind::runtime
