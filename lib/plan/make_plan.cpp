#include <algorithm>
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

  void forecast() {
    int64_t full_bytes = 0, full_state_bytes = 0, state_shard_bytes = 0, largest_unit_bytes = 0;
    MemoryForecast& memory = plan_.memory;
    for (const UnitPlan& unit : plan_.units) {
      int64_t unit_bytes = 0;
      for (const BufferPlan& buffer : unit.buffers) {
        const int64_t bytes = element_bytes(buffer.dtype);
        memory.parameter_bytes += buffer.shard_numel * bytes;
        if (buffer.requires_grad) memory.gradient_bytes += buffer.shard_numel * bytes;
        unit_bytes += buffer.padded_numel * bytes;
      }
      largest_unit_bytes = std::max(largest_unit_bytes, unit_bytes);
    }
    for (size_t p = 0; p < plan_.parameters.size(); ++p) {
      const ParameterPlan& entry = plan_.parameters[p];
      const at::Tensor& tensor = census_.parameters[p].tensor;
      const int64_t bytes = element_bytes(entry.dtype);
      full_bytes += entry.numel() * bytes;
      if (tensor.grad().defined()) {
        full_state_bytes += entry.numel() * bytes;
        state_shard_bytes += entry.shard.numel() * bytes;
      }
      for (const Holder& holder : entry.holders) {
        int64_t held = 0, held_bytes = 0;  // state tensors now, and the bytes of one element in all of them
        const auto& optimizer = *census_.optimizers[static_cast<size_t>(holder.optimizer)];
        const optim::Adapter& adapter = *census_.adapters[static_cast<size_t>(holder.optimizer)];
        if (const auto* state = state_of(optimizer, tensor)) {
          for (const auto& [key, part] : adapter.take_apart(*state).tensors) {
            if (part.sizes() != tensor.sizes()) continue;
            ++held;
            held_bytes += element_bytes(part.scalar_type());
          }
        }
        if (!is_first_of_optimizer(entry, holder)) continue;  // two groups, one state
        full_state_bytes += entry.numel() * held_bytes;
        state_shard_bytes += entry.shard.numel() * held_bytes;
        const int expected = adapter.state_tensors(optimizer.param_groups()[static_cast<size_t>(holder.group)].options());
        memory.state_bytes += entry.shard.numel() * (held_bytes + std::max<int64_t>(0, expected - held) * bytes);
      }
    }
    memory.peak_gathered_bytes = plan_.world_size == 1 ? 0 : largest_unit_bytes;
    memory.prepare_peak_bytes = full_bytes + full_state_bytes + memory.parameter_bytes + state_shard_bytes + 2 * largest_unit_bytes;
  }

  static bool is_first_of_optimizer(const ParameterPlan& entry, const Holder& holder) {
    return std::find_if(entry.holders.begin(), entry.holders.end(), [&](const Holder& other) {
             return other.optimizer == holder.optimizer;
           })->group == holder.group;
  }

  void describe_groups() {
    struct After {
      int64_t tensors = 0, elements = 0;
    };
    std::map<std::pair<int, int>, After> after;
    for (const ParameterPlan& entry : plan_.parameters) {
      for (const Holder& holder : entry.holders) {
        After& group = after[{holder.optimizer, holder.group}];
        ++group.tensors;
        group.elements += entry.shard.numel();
      }
    }
    for (size_t o = 0; o < census_.optimizers.size(); ++o) {
      const auto& groups = census_.optimizers[o]->param_groups();
      for (size_t g = 0; g < groups.size(); ++g) {
        int64_t elements = 0;
        for (const at::Tensor& tensor : groups[g].params()) elements += tensor.numel();
        const After& held = after[{static_cast<int>(o), static_cast<int>(g)}];
        plan_.groups.push_back(absl::StrCat("optimizers[", o, "] ", census_.adapters[o]->name(), ", group ", g, ": ",
                                            count_text(static_cast<int64_t>(groups[g].params().size()), "tensor"), ", ",
                                            count_text(elements, "element"), " -> ", count_text(held.tensors, "shard"), ", ",
                                            count_text(held.elements, "element"), "; ",
                                            census_.adapters[o]->options_text(groups[g].options())));
      }
    }
  }

  void write_notes() {
    plan_.notes = census_.notes;
    std::vector<std::string> idle;
    for (const ParameterPlan& entry : plan_.parameters) {
      if (entry.holders.empty()) idle.push_back(entry.names.front());
    }
    if (!idle.empty()) {
      plan_.notes.push_back(absl::StrCat("in no optimizer, sharded but never stepped: ", some_of(idle)));
    }
    if (options_.coalesce && !census_.optimizers.empty()) plan_.notes.push_back("one optimizer tensor per parameter");
    if (options_.prefetch_units > 1) {
      plan_.notes.push_back(
          absl::StrCat("prefetch_units = ", options_.prefetch_units, " has no effect yet: nothing is prefetched"));
    }
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
