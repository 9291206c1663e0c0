// Order of the lines: what a person would look at first. Parameters before optimizers before details, so that a model with one
// layer more shows as that layer and not as a group of another size.
#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "lib/optim/exact_text.h"
#include "lib/plan/census.h"
#include "lib/plan/text.h"

namespace rebind::plan {
namespace {

using Lines = std::vector<std::string>;

std::string tensor_text(const at::Tensor& tensor) {
  return absl::StrCat(dtype_text(tensor.scalar_type()), " ", shape_text(tensor.sizes().vec()));
}

void add_options(const FsdpOptions& options, Lines& lines) {
  const auto add = [&](const char* name, const auto& value) { lines.push_back(absl::StrCat("options.", name, ": ", value)); };
  const auto truth = [](bool value) { return value ? "true" : "false"; };
  add("strategy", static_cast<int>(options.strategy));
  add("sync_from_rank0", truth(options.sync_from_rank0));
  add("reshard_after_forward", truth(options.reshard_after_forward));
  add("prefetch_units", options.prefetch_units);
  add("coalesce", truth(options.coalesce));
  add("gradient_divide_factor",
      options.gradient_divide_factor ? optim::exact_text(*options.gradient_divide_factor) : std::string("world size"));
  add("collective_timeout", absl::StrCat(options.collective_timeout.count(), " ms"));
  add("check_order", truth(options.check_order));
  add("layout_rules", absl::StrCat("slot ", options.layout_rules.slot, ", quantum ", options.layout_rules.quantum));
}

void add_tensors(const Census& census, Lines& lines) {
  for (const NamedModule& model : census.models) lines.push_back(absl::StrCat("model '", model.name, "'"));
  for (const CensusParameter& parameter : census.parameters) {
    lines.push_back(absl::StrCat("parameter '", parameter.names.front(), "': ", tensor_text(parameter.tensor)));
  }
  lines.push_back("no more parameters");
  for_each_buffer(census, [&](const std::string& name, const at::Tensor& buffer) {
    lines.push_back(absl::StrCat("buffer '", name, "': ", tensor_text(buffer)));
  });
  lines.push_back("no more buffers");
}

void add_optimizers(const Census& census, Lines& lines) {
  for (size_t o = 0; o < census.optimizers.size(); ++o) {
    const auto& groups = census.optimizers[o]->param_groups();
    lines.push_back(absl::StrCat("optimizers[", o, "]: ", census.adapters[o]->name(), ", ",
                                 count_text(static_cast<int64_t>(groups.size()), "group")));
    for (size_t g = 0; g < groups.size(); ++g) {
      lines.push_back(absl::StrCat("optimizers[", o, "], group ", g, ": ", census.adapters[o]->options_text(groups[g].options())));
    }
  }
  lines.push_back("no more optimizers");
}

// What one optimizer holds for a parameter: "momentum_buffer float32 [3]", "none".
std::string state_text(const Census& census, const at::Tensor& held, const Holder& holder) {
  const auto o = static_cast<size_t>(holder.optimizer);
  const torch::optim::OptimizerParamState* state = state_of(*census.optimizers[o], held);
  if (state == nullptr) return "none";
  const optim::StateParts parts = census.adapters[o]->take_apart(*state);
  Lines texts;
  for (const auto& [key, tensor] : parts.tensors) texts.push_back(absl::StrCat(key, " ", tensor_text(tensor)));
  for (const auto& [key, value] : parts.scalars) texts.push_back(absl::StrCat(key, " ", value));
  return texts.empty() ? "empty" : absl::StrJoin(texts, ", ");
}

void add_foreign(const Census& census, Lines& lines) {
  for (size_t i = 0; i < census.foreign.size(); ++i) {
    const at::Tensor& tensor = census.foreign[i].tensor;
    const std::string subject = absl::StrCat("tensor ", i, " of no model: ");
    lines.push_back(absl::StrCat(subject, tensor_text(tensor), ", strides ", shape_text(tensor.strides().vec()), ", requires_grad ",
                                 tensor.requires_grad() ? "true" : "false", ", gradient ",
                                 tensor.grad().defined() ? "defined" : "undefined"));
    for (const Holder& holder : census.foreign[i].holders) {
      lines.push_back(absl::StrCat(subject, "in optimizers[", holder.optimizer, "], group ", holder.group, ", params()[",
                                   holder.index, "], state ", state_text(census, tensor, holder)));
    }
  }
}

void add_details(const Census& census, const FsdpPlan& plan, Lines& lines) {
  for (size_t p = 0; p < census.parameters.size(); ++p) {
    const CensusParameter& parameter = census.parameters[p];
    const ParameterPlan& entry = plan.parameters[p];
    const std::string subject = absl::StrCat("parameter '", parameter.names.front(), "': ");
    if (parameter.names.size() > 1) {
      lines.push_back(
          absl::StrCat(subject, "also '", absl::StrJoin(parameter.names.begin() + 1, parameter.names.end(), "', '"), "'"));
    }
    lines.push_back(absl::StrCat(subject, "strides ", shape_text(entry.strides), ", requires_grad ",
                                 entry.requires_grad ? "true" : "false", ", gradient ",
                                 parameter.tensor.grad().defined() ? "defined" : "undefined"));
    for (const Holder& holder : parameter.holders) {
      lines.push_back(absl::StrCat(subject, "in optimizers[", holder.optimizer, "], group ", holder.group, ", params()[",
                                   holder.index, "], state ", state_text(census, parameter.tensor, holder)));
    }
    lines.push_back(absl::StrCat(subject, "unit '", plan.units[static_cast<size_t>(entry.unit)].name, "', buffer ", entry.buffer,
                                 ", offset ", entry.offset));
  }
}

void add_units(const FsdpPlan& plan, Lines& lines) {
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      lines.push_back(absl::StrCat("unit '", unit.name, "': ", dtype_text(buffer.dtype), buffer.requires_grad ? ", " : " frozen, ",
                                   count_text(buffer.numel, "element"), ", ", buffer.shard_numel, " a rank"));
    }
  }
}

std::string has_text(const Lines& lines, size_t at) {
  return at < lines.size() ? absl::StrCat("\"", lines[at], "\"") : "nothing more";
}

}  // namespace

std::vector<std::string> agreement_lines(const Census& census, const FsdpPlan& plan, const FsdpOptions& options) {
  Lines lines;
  lines.push_back(absl::StrCat("world size: ", plan.world_size));
  add_options(options, lines);
  add_tensors(census, lines);
  add_optimizers(census, lines);
  add_details(census, plan, lines);
  add_foreign(census, lines);
  add_units(plan, lines);
  return lines;
}

std::string first_difference(const std::vector<std::string>& rank0, const std::vector<std::string>& other, int other_rank) {
  const size_t at =
      static_cast<size_t>(std::mismatch(rank0.begin(), rank0.end(), other.begin(), other.end()).first - rank0.begin());
  if (at == rank0.size() && at == other.size()) return "";
  return absl::StrCat("rank ", other_rank, " has ", has_text(other, at), ", rank 0 has ", has_text(rank0, at));
}

}  // namespace rebind::plan
