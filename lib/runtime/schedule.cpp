#include "lib/runtime/schedule.h"

#include <algorithm>

namespace rebind::runtime {

bool Schedule::use(int unit) {
  if (unit == last_) return false;
  if (current_.size() < kMost) current_.push_back(unit);
  // The nearest such use: where the record says, else further on, else from the beginning.
  const size_t expected = last_ < 0 ? 0 : knows_place() ? place_ + 1 : 0;
  last_ = unit;
  const auto from = record_.begin() + static_cast<std::ptrdiff_t>(std::min(expected, record_.size()));
  auto found = std::find(from, record_.end(), unit);
  if (found == record_.end()) {
    found = std::find(record_.begin(), from, unit);
    if (found == from) found = record_.end();
  }
  place_ = static_cast<size_t>(found - record_.begin());
  return true;
}

std::vector<int> Schedule::upcoming(int count) const {
  std::vector<int> units;
  for (size_t i = place_ + 1; i < record_.size() && static_cast<int>(units.size()) < count; ++i) {
    const int unit = record_[i];
    if (unit != last_ && std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }
  return units;
}

int64_t Schedule::distance(int unit) const {
  if (unit == last_) return 0;
  for (size_t i = place_ + 1; i < record_.size(); ++i) {
    if (record_[i] == unit) return static_cast<int64_t>(i - place_);
  }
  return kNever;
}

void Schedule::lose_place() {
  place_ = record_.size();
  last_ = -1;
}

void Schedule::close() {
  if (!current_.empty() && current_.size() < kMost) record_ = std::move(current_);
  current_.clear();
  lose_place();
}

}  // namespace rebind::runtime
