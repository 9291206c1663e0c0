#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "lib/plan/census.h"
#include "lib/plan/flat_layout.h"
#include "lib/plan/refuse.h"
#include "lib/plan/text.h"
#include "lib/plan/units.h"

namespace rebind {

int64_t ParameterPlan::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, [](int64_t a, int64_t b) { return a * b; });
}

namespace plan {
namespace {

int64_t element_bytes(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

absl::Status check_ranks(int rank, int world_size, const Where& where) {
  if (world_size >= 1 && rank >= 0 && rank < world_size) return absl::OkStatus();
  Where here = where;
  here.rank = -1;
  return error(absl::StatusCode::kInvalidArgument, here, absl::StrCat("rank is ", rank, " and world size ", world_size),
               "Use a world size of 1 or more, and 0 <= rank < world size");
}

// Parameters of one buffer with equal keys are a run: they are stepped alike, and lie side by side.
using RunKey = std::pair<std::vector<std::pair<int, int>>, int64_t>;

RunKey run_of(const CensusParameter& parameter) {
  RunKey key;
  for (const Holder& holder : parameter.holders) key.first.emplace_back(holder.optimizer, holder.group);
  key.second = parameter.step;
  return key;
}

class Planner {
 public:
  Planner(const Census& census, int rank, int world_size, const FsdpOptions& options) : census_(census), options_(options) {
    plan_.rank = rank;
    plan_.world_size = world_size;
  }

  FsdpPlan make(const UnitAssignment& assignment) {
    for (const std::string& name : assignment.names) plan_.units.push_back({name, {}});
    for (size_t p = 0; p < census_.parameters.size(); ++p) describe(census_.parameters[p], assignment.unit_of[p]);
    for (UnitPlan& unit : plan_.units) lay_out(unit);
    forecast();
    describe_groups();
    write_notes();
    return std::move(plan_);
  }

 private:
  void describe(const CensusParameter& parameter, int unit_index) {
    const at::Tensor& tensor = parameter.tensor;
    ParameterPlan entry;
    entry.model = parameter.model;
    entry.names = parameter.names;
    entry.sizes = tensor.sizes().vec();
    entry.strides = tensor.strides().vec();
    entry.dtype = tensor.scalar_type();
    entry.requires_grad = tensor.requires_grad();
    entry.unit = unit_index;
    entry.holders = parameter.holders;
    std::vector<BufferPlan>& buffers = plan_.units[static_cast<size_t>(unit_index)].buffers;
    auto buffer = std::find_if(buffers.begin(), buffers.end(), [&](const BufferPlan& b) {
      return b.dtype == entry.dtype && b.requires_grad == entry.requires_grad;
    });
    if (buffer == buffers.end()) {
      buffer = buffers.emplace(buffers.end());
      buffer->dtype = entry.dtype;
      buffer->requires_grad = entry.requires_grad;
    }
    entry.buffer = static_cast<int>(buffer - buffers.begin());
    buffer->parameters.push_back(static_cast<int>(plan_.parameters.size()));
    buffer->numel += entry.numel();
    plan_.parameters.push_back(std::move(entry));
  }

  void lay_out(UnitPlan& unit) {
    int64_t unit_numel = 0;
    for (const BufferPlan& buffer : unit.buffers) unit_numel += buffer.numel;
    const LayoutRules rules = layout_rules(unit_numel, plan_.world_size, options_.layout_rules);
    for (BufferPlan& buffer : unit.buffers) {
      sort_into_runs(buffer.parameters);
      std::vector<int64_t> numels;
      for (const int p : buffer.parameters) numels.push_back(parameter(p).numel());
      const FlatLayout layout = flat_layout(numels, plan_.world_size, rules);
      buffer.shard_numel = layout.shard_numel;
      buffer.padded_numel = layout.padded_numel;
      for (size_t i = 0; i < numels.size(); ++i) {
        ParameterPlan& entry = parameter(buffer.parameters[i]);
        entry.offset = layout.offsets[i];
        entry.shard = shard_of(entry.offset, numels[i], layout.shard_numel, plan_.rank);
      }
    }
  }

  // Runs in the order in which they first appear, registration order inside a run.
  void sort_into_runs(std::vector<int>& parameters) const {
    std::map<RunKey, int> runs;
    std::vector<std::pair<int, int>> order;  // (run, parameter)
    for (const int p : parameters) {
      const auto run = runs.emplace(run_of(census_.parameters[static_cast<size_t>(p)]), static_cast<int>(runs.size())).first;
      order.emplace_back(run->second, p);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); ++i) parameters[i] = order[i].second;
  }

  // The formulas stand at MemoryForecast.
  void forecast() {
    MemoryForecast& memory = plan_.memory;
    int64_t full_bytes = 0, largest_unit_bytes = 0;
    std::vector<int64_t> gathers;
    for (const UnitPlan& unit : plan_.units) {
      int64_t unit_bytes = 0;
      for (const BufferPlan& buffer : unit.buffers) {
        const int64_t bytes = element_bytes(buffer.dtype);
        memory.parameter_bytes += buffer.shard_numel * bytes;
        if (buffer.requires_grad) memory.gradient_bytes += buffer.shard_numel * bytes;
        gathers.push_back(buffer.padded_numel * bytes);
        unit_bytes += gathers.back();
      }
      largest_unit_bytes = std::max(largest_unit_bytes, unit_bytes);
    }
    int64_t carried_shard_bytes = 0;  // gradients and state that exist now: whole in full_bytes, this rank's part here
    for (size_t p = 0; p < plan_.parameters.size(); ++p) {
      const ParameterPlan& entry = plan_.parameters[p];
      const at::Tensor& tensor = census_.parameters[p].tensor;
      const State state = state_bytes_of(tensor, entry.holders);
      const int64_t carried = state.held + (tensor.grad().defined() ? element_bytes(entry.dtype) : 0);
      full_bytes += entry.numel() * (element_bytes(entry.dtype) + carried);
      carried_shard_bytes += entry.shard.numel() * carried;
      memory.state_bytes += entry.shard.numel() * (state.held + state.to_come);
    }
    memory.peak_gathered_bytes = peak_of(gathers);
    memory.prepare_peak_bytes = full_bytes + memory.parameter_bytes + carried_shard_bytes + 2 * largest_unit_bytes;
    for (const ForeignTensor& foreign : census_.foreign) {
      const at::Tensor& tensor = foreign.tensor;
      const int64_t numel = tensor.numel(), bytes = numel * element_bytes(tensor.scalar_type());
      const State state = state_bytes_of(tensor, foreign.holders);
      memory.parameter_bytes += bytes;
      if (tensor.requires_grad()) memory.gradient_bytes += bytes;
      memory.state_bytes += numel * (state.held + state.to_come);
      memory.prepare_peak_bytes += bytes + numel * state.held + (tensor.grad().defined() ? bytes : 0);
    }
  }

  // Bytes of one element in all state tensors shaped like the parameter: those it has, and those its next steps will add.
  struct State {
    int64_t held = 0, to_come = 0;
  };

  State state_bytes_of(const at::Tensor& tensor, const std::vector<Holder>& holders) const {
    State bytes;
    for (const Holder& holder : holders) {
      if (!is_first_of_optimizer(holders, holder)) continue;  // two groups, one state
      const auto& optimizer = *census_.optimizers[static_cast<size_t>(holder.optimizer)];
      const optim::Adapter& adapter = *census_.adapters[static_cast<size_t>(holder.optimizer)];
      int64_t held = 0;
      if (const auto* state = state_of(optimizer, tensor)) {
        for (const auto& [key, part] : adapter.take_apart(*state).tensors) {
          if (part.sizes() != tensor.sizes()) continue;
          ++held;
          bytes.held += element_bytes(part.scalar_type());
        }
      }
      if (!tensor.requires_grad()) continue;  // never stepped
      const int expected = adapter.state_tensors(optimizer.param_groups()[static_cast<size_t>(holder.group)].options());
      bytes.to_come += std::max<int64_t>(0, expected - held) * element_bytes(tensor.scalar_type());
    }
    return bytes;
  }

  int64_t peak_of(std::vector<int64_t> gathers) const {
    if (plan_.world_size == 1) return 0;
    const size_t most = options_.reshard_after_forward ? static_cast<size_t>(options_.prefetch_units) + 1 : gathers.size();
    const size_t at_once = std::min(gathers.size(), most);
    std::partial_sort(gathers.begin(), gathers.begin() + static_cast<int64_t>(at_once), gathers.end(), std::greater<>());
    return std::accumulate(gathers.begin(), gathers.begin() + static_cast<int64_t>(at_once), int64_t{0});
  }

  static bool is_first_of_optimizer(const std::vector<Holder>& holders, const Holder& holder) {
    const auto same = [&](const Holder& other) { return other.optimizer == holder.optimizer; };
    return *std::find_if(holders.begin(), holders.end(), same) == holder;
  }

  struct Held {
    int64_t tensors = 0, elements = 0;
  };
  using HeldByGroup = std::map<std::pair<int, int>, Held>;

  static void count(const std::vector<Holder>& holders, int64_t numel, HeldByGroup& groups) {
    for (const Holder& holder : holders) {
      Held& group = groups[{holder.optimizer, holder.group}];
      ++group.tensors;
      group.elements += numel;
    }
  }

  static std::string held_text(const Held& held, const std::string& noun) {
    return absl::StrCat(count_text(held.tensors, noun), ", ", count_text(held.elements, "element"));
  }

  // "optimizers[0] SGD, group 0: 3 tensors, 30 elements -> 2 shards, 9 elements, and 1 whole tensor, 12 elements; lr=0.1 ..."
  void describe_groups() {
    HeldByGroup shards, foreign;
    for (const ParameterPlan& entry : plan_.parameters) count(entry.holders, entry.shard.numel(), shards);
    for (const ForeignTensor& tensor : census_.foreign) count(tensor.holders, tensor.tensor.numel(), foreign);
    for (size_t o = 0; o < census_.optimizers.size(); ++o) {
      const auto& groups = census_.optimizers[o]->param_groups();
      for (size_t g = 0; g < groups.size(); ++g) {
        const std::pair<int, int> key(static_cast<int>(o), static_cast<int>(g));
        Held before{static_cast<int64_t>(groups[g].params().size()), 0};
        for (const at::Tensor& tensor : groups[g].params()) before.elements += tensor.numel();
        std::string text = absl::StrCat("optimizers[", o, "] ", census_.adapters[o]->name(), ", group ", g, ": ",
                                        held_text(before, "tensor"), " -> ", held_text(shards[key], "shard"));
        if (const auto found = foreign.find(key); found != foreign.end()) {
          absl::StrAppend(&text, ", and ", held_text(found->second, "whole tensor"));
        }
        plan_.groups.push_back(absl::StrCat(text, "; ", census_.adapters[o]->options_text(groups[g].options())));
      }
    }
  }

  void write_notes() {
    plan_.notes = census_.notes;
    std::vector<std::string> idle, frozen;
    for (const ParameterPlan& entry : plan_.parameters) {
      if (entry.holders.empty() && entry.requires_grad) idle.push_back(entry.names.front());
      if (!entry.holders.empty() && !entry.requires_grad) frozen.push_back(entry.names.front());
    }
    if (!idle.empty()) {
      plan_.notes.push_back(absl::StrCat("in no optimizer, sharded but never stepped: ", some_of(idle)));
    }
    if (!frozen.empty()) plan_.notes.push_back(absl::StrCat("frozen, never stepped, state kept as it is: ", some_of(frozen)));
    if (!census_.foreign.empty()) {
      std::vector<std::string> places;
      for (const ForeignTensor& foreign : census_.foreign) {
        const Holder& first = foreign.holders.front();
        places.push_back(absl::StrCat("optimizers[", first.optimizer, "], group ", first.group, ", params()[", first.index, "]"));
      }
      plan_.notes.push_back(absl::StrCat("of no given model, whole on every rank, gradients averaged: ", some_of(places)));
    }
    if (options_.coalesce && !census_.optimizers.empty()) plan_.notes.push_back("neighbours of equal state are one optimizer tensor");
  }

  ParameterPlan& parameter(int index) { return plan_.parameters[static_cast<size_t>(index)]; }

  const Census& census_;
  const FsdpOptions& options_;
  FsdpPlan plan_;
};

}  // namespace

absl::StatusOr<FsdpPlan> make_plan(const Census& census, int rank, int world_size, const FsdpOptions& options, const Where& where) {
  absl::Status status = check_ranks(rank, world_size, where);
  if (status.ok()) status = check_options(options, where);
  if (status.ok()) status = check_tensors(census, where);
  if (status.ok()) status = check_state(census, where);
  if (!status.ok()) return status;
  const absl::StatusOr<UnitAssignment> assignment = assign_units(census, options.unit_policy, where);
  if (!assignment.ok()) return assignment.status();
  return Planner(census, rank, world_size, options).make(*assignment);
}

}  // namespace plan

absl::StatusOr<FsdpPlan> plan_fsdp(torch::nn::Module& model, const Optimizers& optimizers, int rank, int world_size,
                                   const FsdpOptions& options) {
  return plan_fsdp(std::vector<NamedModule>{{"model", &model}}, optimizers, rank, world_size, options);
}

absl::StatusOr<FsdpPlan> plan_fsdp(const std::vector<NamedModule>& models, const Optimizers& optimizers, int rank, int world_size,
                                   const FsdpOptions& options) {
  Where where;
  where.call = "plan_fsdp";
  where.rank = rank;
  const absl::StatusOr<plan::Census> census = plan::take_census(models, optimizers, where);
  if (!census.ok()) return census.status();
  return plan::make_plan(*census, rank, world_size, options, where);
}

}  // namespace rebind
