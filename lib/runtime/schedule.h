// Which units come next: the order in which the last iteration used them, and where this one is in it.
//
//   schedule.use(3);                       // an operator is about to use unit 3
//   schedule.upcoming(2);                  // {4, 5}: what the record says comes then
//   schedule.distance(0);                  // 7: unit 0 comes after seven changes of unit
//   schedule.close();                      // the iteration is over; the next one follows its order
//
// Only advice: a program that leaves the record is served all the same, without knowledge of the future. Equal uses give equal
// advice, so ranks that run the same program decide alike without talking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace rebind::runtime {

class Schedule {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // Uses of the same unit one after another count as one. True if another unit than last time.
  bool use(int unit);
  // The next `count` different units that the record has after the current use, this one left out; fewer near its end.
  std::vector<int> upcoming(int count) const;
  // Changes of unit until `unit` is used again; kNever if the record has no more use of it, or is lost.
  int64_t distance(int unit) const;
  bool knows_place() const { return place_ < record_.size(); }
  // The program is elsewhere (evaluation): nothing is known until the record is met again.
  void lose_place();
  void close();

 private:
  // A program without backward would record for ever.
  static constexpr size_t kMost = 1 << 16;

  std::vector<int> record_;   // of the last iteration
  std::vector<int> current_;  // of this one
  size_t place_ = 0;          // in record_, of the last use; past its end: lost
  int last_ = -1;
};

}  // namespace rebind::runtime
