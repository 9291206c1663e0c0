// Which parameters are gathered together: applies a UnitPolicy to the module tree.
//
//   gpt: wte, wpe, blocks.0, blocks.1, ln_f     automatic: units <root>, blocks.0, blocks.1
//
// Every parameter is in exactly one unit, the one of its first name; a unit without parameters does not exist. Units stand in the
// order of their first parameter's registration.
#pragma once

#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "lib/plan/census.h"

namespace rebind::plan {

struct UnitAssignment {
  std::vector<std::string> names;  // of the units
  std::vector<int> unit_of;        // by parameter of the census
};

// InvalidArgument: the policy's predicate threw.
absl::StatusOr<UnitAssignment> assign_units(const Census& census, const UnitPolicy& policy, const Where& where);

}  // namespace rebind::plan
