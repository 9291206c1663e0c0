#include "lib/plan/flat_layout.h"

#include <algorithm>

namespace rebind::plan {
namespace {

constexpr int64_t kLargeNumelPerRank = 64 * 1024;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

LayoutRules layout_rules(int64_t total_numel, int world_size, const LayoutRules& rules) {
  if (rules.slot > 0) return rules;
  const bool large = total_numel >= kLargeNumelPerRank * world_size;
  return large ? LayoutRules{.slot = 64, .quantum = 512} : LayoutRules{.slot = 8, .quantum = 8};
}

FlatLayout flat_layout(const std::vector<int64_t>& numels, int world_size, const LayoutRules& rules) {
  FlatLayout layout;
  layout.offsets.reserve(numels.size());
  int64_t end = 0;
  for (const int64_t numel : numels) {
    const int64_t offset = round_up(end, rules.slot);
    layout.offsets.push_back(offset);
    end = offset + numel;
  }
  layout.shard_numel = round_up((end + world_size - 1) / world_size, rules.quantum);
  layout.padded_numel = layout.shard_numel * world_size;
  return layout;
}

Interval shard_of(int64_t offset, int64_t numel, int64_t shard_numel, int rank) {
  const int64_t first = shard_numel * rank - offset;
  const int64_t begin = std::clamp<int64_t>(first, 0, numel);
  const int64_t end = std::clamp<int64_t>(first + shard_numel, 0, numel);
  return begin == end ? Interval{} : Interval{begin, end};
}

}  // namespace rebind::plan
