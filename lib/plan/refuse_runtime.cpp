// What a plan can be made for and the runtime does not serve yet.
#include <absl/strings/str_cat.h>

#include "lib/plan/refuse.h"
#include "lib/plan/text.h"

namespace rebind::plan {
namespace {

bool has_strided_state(const Census& census, const CensusParameter& parameter) {
  for (const Holder& holder : parameter.holders) {
    const auto o = static_cast<size_t>(holder.optimizer);
    const torch::optim::OptimizerParamState* state = state_of(*census.optimizers[o], parameter.tensor);
    if (state == nullptr) continue;
    for (const auto& [key, tensor] : census.adapters[o]->take_apart(*state).tensors) {
      if (!tensor.is_contiguous()) return true;
    }
  }
  return false;
}

}  // namespace

absl::Status check_runtime_support(const Census& census, const Where& where) {
  const auto refuse = [&](const std::string& name, const std::string& what, const std::string& remedy) {
    Where here = where;
    here.parameter = name;
    return error(absl::StatusCode::kUnimplemented, here, what, remedy);
  };
  std::vector<const CensusParameter*> first(census.models.size(), nullptr);
  for (const CensusParameter& parameter : census.parameters) {
    const std::string& name = parameter.names.front();
    const at::Tensor& tensor = parameter.tensor;
    if (!tensor.requires_grad()) {
      return refuse(name, "it has requires_grad=false, frozen parameters are not supported yet",
                    "Register it as a buffer, or set requires_grad to true");
    }
    if (!tensor.is_contiguous()) {
      return refuse(name,
                    absl::StrCat("it has shape ", shape_text(tensor.sizes().vec()), " and strides ",
                                 shape_text(tensor.strides().vec()), ", only contiguous tensors are supported yet"),
                    "Register t.contiguous() instead (channels_last and transposed weights are such tensors)");
    }
    if ((tensor.grad().defined() && !tensor.grad().is_contiguous()) || has_strided_state(census, parameter)) {
      return refuse(name, "its gradient or its state is not contiguous, which is not supported yet", "Call contiguous() on it");
    }
    const CensusParameter*& other = first[static_cast<size_t>(parameter.model)];
    if (other == nullptr) other = &parameter;
    if (other->tensor.scalar_type() != tensor.scalar_type()) {
      return refuse(name,
                    absl::StrCat("it has dtype ", dtype_text(tensor.scalar_type()), " and '", other->names.front(), "' has ",
                                 dtype_text(other->tensor.scalar_type()), ", different dtypes in one model are not supported yet"),
                    "Convert the model to one dtype before building the optimizer");
    }
  }
  if (census.foreign.empty()) return absl::OkStatus();
  const Holder& holder = census.foreign.front().holders.front();
  Where here = where;
  here.optimizer = census.adapters[static_cast<size_t>(holder.optimizer)]->name();
  here.optimizer_index = holder.optimizer;
  here.group = holder.group;
  here.index = holder.index;
  return error(absl::StatusCode::kUnimplemented, here, "the tensor is no parameter of a given model, which is not supported yet",
               "Register it in the model, or give it an optimizer of its own");
}

}  // namespace rebind::plan
