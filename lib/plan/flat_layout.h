// Where parameters lie in a flat buffer, as pure integers: no tensor, no unit, no rank's memory.
//
//   offsets   every parameter at a multiple of `slot`, in the given order
//   shards    rank r owns [r * S, (r + 1) * S); S is a multiple of `quantum`; W * S >= the end of the last parameter
//
// Worked example: sizes {21, 3}, W = 2, slot = quantum = 8:  offsets {0, 24}, S = 16.
//   flat  0                       16        21  24  27  32
//         | weight                          |gap|b  |tail|
//   rank  | 0                     | 1                    |
#pragma once

#include <cstdint>
#include <vector>

#include "rebind/options.h"
#include "rebind/plan.h"

namespace rebind::plan {

struct FlatLayout {
  std::vector<int64_t> offsets;
  int64_t shard_numel = 0;
  int64_t padded_numel = 0;
};

// `rules` if set, else by the size a rank gets: {64, 512} from 65,536 elements a rank, else {8, 8}.
LayoutRules layout_rules(int64_t total_numel, int world_size, const LayoutRules& rules);
FlatLayout flat_layout(const std::vector<int64_t>& numels, int world_size, const LayoutRules& rules);
// The part of a parameter at `offset` with `numel` elements that `rank` owns, in the parameter's own elements. Empty: {0, 0}.
Interval shard_of(int64_t offset, int64_t numel, int64_t shard_numel, int rank);

}  // namespace rebind::plan
