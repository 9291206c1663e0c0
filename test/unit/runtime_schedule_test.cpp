// What the record says comes next, and the memory that gathered units share.
#include "lib/runtime/arena.h"
#include "lib/runtime/schedule.h"
#include "test/support/catch.h"

using rebind::runtime::Arena;
using rebind::runtime::Schedule;

namespace {

using Units = std::vector<int>;

void run(Schedule& schedule, const Units& uses) {
  for (const int unit : uses) schedule.use(unit);
}

}  // namespace

TEST_CASE("schedule: the first iteration knows nothing", "[runtime]") {
  Schedule schedule;
  run(schedule, {0, 1, 2});
  CHECK(schedule.upcoming(3) == Units{});
  CHECK(schedule.distance(0) == Schedule::kNever);
  CHECK_FALSE(schedule.knows_place());
}

TEST_CASE("schedule: uses of one unit in a row count once, and the next iteration is told what follows", "[runtime]") {
  Schedule schedule;
  run(schedule, {0, 0, 1, 1, 2, 1, 0});
  schedule.close();
  CHECK(schedule.use(0));
  CHECK_FALSE(schedule.use(0));
  CHECK(schedule.upcoming(1) == Units{1});
  CHECK(schedule.upcoming(5) == Units{1, 2});
  CHECK(schedule.distance(0) == 0);
  CHECK(schedule.distance(1) == 1);
  CHECK(schedule.distance(2) == 2);
  CHECK(schedule.distance(7) == Schedule::kNever);
  run(schedule, {1, 2, 1});
  CHECK(schedule.upcoming(5) == Units{0});
  CHECK(schedule.distance(2) == Schedule::kNever);
  run(schedule, {0});
  CHECK(schedule.upcoming(5) == Units{});
}

TEST_CASE("schedule: an order that changed is found again, and the new one is the next record", "[runtime]") {
  Schedule schedule;
  run(schedule, {0, 1, 2, 3, 2, 1, 0});
  schedule.close();
  run(schedule, {0, 2});  // 1 is left out: the nearest use of 2 from here on
  CHECK(schedule.upcoming(1) == Units{3});
  schedule.use(9);
  CHECK_FALSE(schedule.knows_place());
  CHECK(schedule.upcoming(1) == Units{});
  schedule.use(1);  // from the beginning
  CHECK(schedule.upcoming(1) == Units{2});
  schedule.close();
  schedule.use(0);
  CHECK(schedule.upcoming(4) == Units{2, 9, 1});
}

TEST_CASE("schedule: an evaluation leaves the record, an empty iteration does not replace it", "[runtime]") {
  Schedule schedule;
  run(schedule, {0, 1});
  schedule.close();
  schedule.lose_place();
  CHECK(schedule.distance(1) == Schedule::kNever);
  schedule.close();
  schedule.use(0);
  CHECK(schedule.upcoming(1) == Units{1});
}

TEST_CASE("arena: blocks come from one memory, 64 bytes apart, and a gap is used again", "[runtime]") {
  Arena arena(300);
  CHECK(arena.capacity() == 320);
  Arena::Block a = arena.allocate(100), b = arena.allocate(64), c = arena.allocate(128);
  CHECK(b.data() == a.data() + 128);
  CHECK(c.data() == b.data() + 64);
  CHECK(c.bytes() == 128);
  CHECK_FALSE(arena.allocate(1));
  char* const place = a.data();
  a.reset();
  CHECK_FALSE(arena.allocate(129));
  CHECK(Arena::Block(arena.allocate(128)).data() == place);
  a = arena.allocate(1);
  CHECK(a.data() == place);
  CHECK(Arena::Block(arena.allocate(0)).data() == place + 64);
}

TEST_CASE("arena: a block that moves is given back once, and one from outside takes nothing of it", "[runtime]") {
  Arena arena(64);
  Arena::Block a = arena.allocate(64);
  Arena::Block b = std::move(a);
  CHECK_FALSE(a);
  CHECK_FALSE(arena.allocate(64));
  const Arena::Block other = Arena::outside(1000);
  CHECK(other.bytes() == 1000);
  b = Arena::Block();
  CHECK(arena.allocate(64));
}
