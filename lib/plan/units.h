// Which parameters are gathered together: applies a UnitPolicy to the module tree.
//
//   gpt: token, position, blocks.0 ... blocks.11, norm, head      automatic: token..position, blocks.0, ..., blocks.11, norm..head
//
// Every parameter is in exactly one unit, the one of its first name; a unit without parameters does not exist; models never share
// one. Units stand in the order of their first parameter's registration.
//
// The rule of `automatic`, for each model, sizes in elements:
//   1. Blocks. Children of one container that have one type, and below them equal names, types, shapes and dtypes, are a unit
//      each. The outermost container wins: nothing inside a block is a unit of its own.
//   2. Nothing tiny. What has less than kTinyNumel and less than 1/kTinyShare of the model is no unit: a gather of it would cost
//      its latency and nothing else. A tiny block counts as rest.
//   3. The rest falls into stretches, cut where blocks lie in between, since what is registered apart is used apart: an embedding
//      at the start and a head at the end are two units. A tiny stretch joins the unit of the parameter before it (the model's
//      first one, of the parameter after it). The others are cut as by_size(kPieceNumel) does.
//   4. A small rest, less than kSmallRestNumel and not tiny, is one unit: "<root>".
//
// by_size(n): in the order of registration, a unit is closed once it has n elements. A last one with less joins the one before. A
// module's small parameters (1/8 of its largest or less: a bias) stay in the unit of what they are used with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "lib/plan/census.h"

namespace rebind::plan {

inline constexpr int64_t kTinyNumel = 64 * 1024, kTinyShare = 64;
inline constexpr int64_t kSmallRestNumel = 64 * 1024;
inline constexpr int64_t kPieceNumel = 1024 * 1024;

// Names: a module's path if the unit is all that is below it; "<root>" for a rest that was not cut ("model" for whole_model);
// otherwise where the unit begins and ends: "token..position". With several models the model's name comes first, and stands for
// "<root>".
struct UnitAssignment {
  std::vector<std::string> names;  // of the units
  std::vector<int> unit_of;        // by parameter of the census
};

// InvalidArgument: the policy's predicate threw.
absl::StatusOr<UnitAssignment> assign_units(const Census& census, const UnitPolicy& policy, const Where& where);

}  // namespace rebind::plan
