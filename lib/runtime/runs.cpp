// Runs and their slices: made at prepare, joined or single as the gradients of their members demand (Note: Runs).
#include <ATen/Functions.h>
#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "lib/plan/flat_layout.h"
#include "lib/runtime/sharding.h"
#include "lib/runtime/slice_state.h"

namespace rebind::runtime {
namespace {

using plan::shard_of;

bool has_handle(const Parameter* parameter) { return parameter->reduced || parameter->waiting; }

// LibTorch's kernels round the last elements of a half precision tensor differently than those before: where a tensor ends shows.
bool may_join(at::ScalarType dtype) { return c10::elementSize(dtype) >= 4; }

std::string label_of(const Slice& slice) {
  const size_t others = slice.members.size() - 1;
  return absl::StrCat("parameter '", slice.members[0]->name, "'", others == 0 ? "" : absl::StrCat(" and ", others, " more"));
}

// The flat elements [begin, end) of a run, and the pieces it has on every rank.
struct Extent {
  int64_t begin, end, shard_numel;
  int pieces = 1;

  Extent(const Run& run, int world_size)
      : begin(run.members.front()->offset),
        end(run.members.back()->offset + run.members.back()->numel),
        shard_numel(run.unit->shard_numel) {
    for (int r = 0; r < world_size; ++r) {
      const int64_t numel = shard_of(begin, end - begin, shard_numel, r).numel();
      pieces = std::max(pieces, static_cast<int>((numel + Run::kMostNumel - 1) / Run::kMostNumel));
    }
  }

  // In the flat shard of `rank`.
  Interval piece(int rank, int index) const {
    const Interval own = shard_of(begin, end - begin, shard_numel, rank);
    if (own.numel() == 0) return {};
    const int64_t first = begin + own.begin - rank * shard_numel;
    const int64_t length = (own.numel() + pieces - 1) / pieces;
    return {first + std::min(own.numel(), index * length), first + std::min(own.numel(), (index + 1) * length)};
  }
};

Interval intersection(const Interval& a, const Interval& b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.begin < both.end ? both : Interval{};
}

// Where `parameter` lies in the flat shard of `rank`.
Interval place_of(const Parameter& parameter, int rank) {
  const int64_t shard_numel = parameter.unit->shard_numel;
  const Interval own = shard_of(parameter.offset, parameter.numel, shard_numel, rank);
  const int64_t shift = parameter.offset - rank * shard_numel;
  return own.numel() == 0 ? Interval{} : Interval{own.begin + shift, own.end + shift};
}

// The pieces of the run that the parameter reaches into on `rank`, not empty.
std::vector<Interval> reached(const Parameter& parameter, const Extent& extent, int rank) {
  std::vector<Interval> result;
  for (int i = 0; i < extent.pieces; ++i) {
    const Interval both = intersection(place_of(parameter, rank), extent.piece(rank, i));
    if (both.numel() > 0) result.push_back(both);
  }
  return result;
}

}  // namespace

std::vector<Slice*> slices_of(const Parameter& parameter) {
  if (!parameter.run->is_joined) return parameter.singles;
  std::vector<Slice*> slices;
  for (const auto& slice : parameter.run->joined) slices.push_back(slice.get());
  return slices;
}

std::vector<Part> parts_of(const Parameter& parameter) {
  std::vector<Part> parts;
  const Interval own{parameter.shard_offset, parameter.shard_offset + parameter.shard_interval.numel()};
  for (Slice* slice : slices_of(parameter)) {
    const Interval both = intersection(own, {slice->begin, slice->end});
    if (both.numel() > 0) parts.push_back({slice, both.begin - slice->begin, both.begin - own.begin, both.numel()});
  }
  return parts;
}

std::vector<at::Tensor> gradient_parts(const Parameter& parameter) {
  std::vector<at::Tensor> parts;
  for (const Part& part : parts_of(parameter)) parts.push_back(part.slice->values.narrow(0, part.in_slice, part.numel));
  return parts;
}

void Sharding::make_runs(const std::vector<std::string>& keys, bool coalesce) {
  for (auto& unit : units) {
    for (Parameter* parameter : unit->parameters) {
      const bool goes_on = may_join(unit->dtype) && coalesce && !unit->runs.empty() && keys[unit->runs.back()->members.back()->index] == keys[parameter->index];
      if (!goes_on) {
        unit->runs.push_back(std::make_unique<Run>());
        unit->runs.back()->unit = unit.get();
        for (const Holder& holder : parameter->holders) {
          std::vector<int>& optimizers_of_run = unit->runs.back()->optimizers;
          if (optimizers_of_run.empty() || optimizers_of_run.back() != holder.optimizer) optimizers_of_run.push_back(holder.optimizer);
        }
      }
      parameter->run = unit->runs.back().get();
      parameter->run->members.push_back(parameter);
    }
    for (auto& run : unit->runs) {
      const auto add = [&](std::vector<std::unique_ptr<Slice>>& to, std::vector<Parameter*> members, Interval place, bool active) {
        auto slice = std::make_unique<Slice>();
        slice->run = run.get();
        slice->begin = place.begin;
        slice->end = place.end;
        slice->members = std::move(members);
        slice->tensor = make_slice_tensor(*slice, active);
        to.push_back(std::move(slice));
        return to.back().get();
      };
      const Extent extent(*run, world_size());
      run->is_joined = coalesce && may_join(unit->dtype) && (run->members.size() > 1 || extent.pieces > 1);
      if (run->is_joined) {
        for (int i = 0; i < extent.pieces; ++i) add(run->joined, run->members, extent.piece(rank(), i), true);
        if (run->members.size() == 1) continue;  // it never has a gradient and none
      }
      for (Parameter* parameter : run->members) {
        if (!run->is_joined) {
          parameter->singles.push_back(add(run->single, {parameter}, place_of(*parameter, rank()), true));
          continue;
        }
        size_t count = 1;
        for (int r = 0; r < world_size(); ++r) count = std::max(count, reached(*parameter, extent, r).size());
        std::vector<Interval> places = reached(*parameter, extent, rank());
        places.resize(count);
        for (const Interval& place : places) parameter->singles.push_back(add(run->single, {parameter}, place, false));
      }
    }
  }
}

at::Tensor Sharding::make_slice_tensor(Slice& slice, bool active) {
  Unit& unit = *slice.run->unit;
  auto storage = c10::make_intrusive<KeyedStorage>(Role::kShard, slice, shared_from_this(), slice.numel() * unit.item_bytes, "");
  storage->expose(static_cast<char*>(unit.flat_shard.data_ptr()) + slice.begin * unit.item_bytes,
                  std::make_shared<at::Tensor>(unit.flat_shard));
  at::Tensor tensor = make_keyed_tensor(std::move(storage), unit.dtype, {active ? slice.numel() : 0}, {1});
  tensor.set_requires_grad(slice.members.front()->requires_grad);
  return tensor;
}

void Sharding::put_handle(Slice& slice) {
  if (slice.gradient != nullptr) return;
  const Unit& unit = *slice.run->unit;
  auto storage = c10::make_intrusive<KeyedStorage>(
      Role::kShardGradient, slice, shared_from_this(), slice.numel() * unit.item_bytes,
      absl::StrCat("rank ", rank(), ": the gradient of the shard of ", label_of(slice),
                   " is not reduced yet: backward was interrupted. Call zero_grad, or use it through an operator."));
  slice.gradient = storage.get();
  ClosingScope on_purpose(*this);  // what is replaced here is no zero_grad
  slice.tensor.mutable_grad() = make_keyed_tensor(std::move(storage), unit.dtype, {slice.numel()}, {1});
}

void Sharding::set_gradient(Slice& slice, at::Tensor values) {
  put_handle(slice);
  slice.values = std::move(values);
  slice.gradient->expose(slice.values.data_ptr(), std::make_shared<at::Tensor>(slice.values));
}

void Sharding::remove_handle(Slice& slice) noexcept {
  ClosingScope on_purpose(*this);
  slice.values.reset();
  if (slice.gradient == nullptr) return;
  slice.gradient = nullptr;
  slice.tensor.mutable_grad().reset();
}

void Sharding::put_slice_handles(Parameter& parameter) {
  for (Slice* slice : slices_of(parameter)) put_handle(*slice);
}

bool Sharding::slices_cleared(const Parameter& parameter) const {
  const std::vector<Slice*> slices = slices_of(parameter);
  return std::any_of(slices.begin(), slices.end(),
                     [](const Slice* slice) { return slice->gradient != nullptr && !slice->tensor.grad().defined(); });
}

void Sharding::distribute(Unit& unit, const at::Tensor& mean, const std::function<bool(const Parameter&)>& present) {
  for (auto& run : unit.runs) {
    const std::vector<Parameter*>& members = run->members;
    const auto is_present = [&](const Parameter* parameter) { return present(*parameter); };
    if (std::none_of(members.begin(), members.end(), is_present)) continue;
    const bool anew = std::none_of(members.begin(), members.end(), [](const Parameter* parameter) { return parameter->reduced; });
    if (anew && !std::all_of(members.begin(), members.end(), is_present)) {
      make_single(*run);
    } else if (anew && (finishing_ || torch::autograd::get_current_graph_task_id() != -1)) {  // no optimizer is walking
      make_joined(*run);
    }
    for (const auto& slice : run->active()) {
      if (!slice->values.defined()) {
        // Of a joined slice all members are here, or none is.
        if (is_present(slice->members.front())) set_gradient(*slice, mean.narrow(0, slice->begin, slice->numel()));
        continue;
      }
      for (Parameter* parameter : slice->members) {
        if (!present(*parameter)) continue;
        const Interval part = intersection(place_of(*parameter, rank()), {slice->begin, slice->end});
        slice->values.narrow(0, part.numel() == 0 ? 0 : part.begin - slice->begin, part.numel())
            .add_(mean.narrow(0, part.begin, part.numel()));
      }
    }
    for (Parameter* parameter : members) {
      if (!present(*parameter)) continue;
      parameter->reduced = true;
      unit.gradients.stale[parameter->slot_in_unit] = true;
    }
  }
}

void Sharding::forget_on_slices(Parameter& parameter) noexcept {
  parameter.reduced = false;
  Run& run = *parameter.run;
  if (!run.is_joined) {
    for (Slice* slice : parameter.singles) remove_handle(*slice);
    return;
  }
  if (std::none_of(run.members.begin(), run.members.end(), has_handle)) {
    for (auto& slice : run.joined) remove_handle(*slice);
  } else if (run.joined.front()->values.defined()) {
    make_single(run);
  }
  // Else all are waiting: distribute will see who has come.
}

void Sharding::make_joined(Run& run) {
  if (run.is_joined || run.joined.empty() || !join_state(run, optimizers)) return;
  for (auto& slice : run.single) {
    remove_handle(*slice);  // a hidden one at most
    slice->tensor.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  }
  for (auto& slice : run.joined) slice->tensor.unsafeGetTensorImpl()->set_sizes_contiguous({slice->numel()});
  run.is_joined = true;
}

void Sharding::make_single(Run& run) {
  if (!run.is_joined || run.single.empty()) return;
  split_state(run, optimizers);
  for (auto& slice : run.joined) slice->tensor.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  for (auto& slice : run.single) {
    slice->tensor.unsafeGetTensorImpl()->set_sizes_contiguous({slice->numel()});
    const Parameter& parameter = *slice->members.front();
    if (!has_handle(&parameter)) continue;
    put_handle(*slice);
    if (!parameter.reduced) continue;
    const auto piece = std::find_if(run.joined.begin(), run.joined.end(), [&](const auto& candidate) {
      return slice->numel() == 0 || (candidate->begin <= slice->begin && slice->end <= candidate->end);
    });
    const int64_t first = slice->numel() == 0 ? 0 : slice->begin - (*piece)->begin;
    set_gradient(*slice, (*piece)->values.narrow(0, first, slice->numel()));
  }
  for (auto& slice : run.joined) remove_handle(*slice);
  run.is_joined = false;
}

}  // namespace rebind::runtime
