// What a plan can be made for and the runtime does not serve yet.
#include "lib/plan/refuse.h"

namespace rebind::plan {

absl::Status check_runtime_support(const Census& census, const Where& where) {
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
