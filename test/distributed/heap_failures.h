// Lets operator new fail on a thread. Linking heap_failures.cpp replaces the operator in the whole program, LibTorch included.
//
//   fail_heap_at(3);          // the third allocation of this thread from now throws std::bad_alloc, once
//   ...
//   const bool came = fail_heap_at(0) == 0;      // calls it off; what was left to count
#pragma once

#include <cstdint>

namespace rebind::test {

// Sets the number of the allocation that fails, 0 for none, and returns what was left of the last number.
int64_t fail_heap_at(int64_t number);

}  // namespace rebind::test
