#include "test/distributed/heap_failures.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace {

thread_local int64_t until_failure = 0;

void* allocate(size_t bytes, size_t alignment) {
  if (until_failure > 0 && --until_failure == 0) throw std::bad_alloc();
  if (bytes == 0) bytes = 1;
  void* memory =
      alignment == 0 ? std::malloc(bytes) : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// The forms for arrays and without exceptions end in these.
void* operator new(size_t bytes) { return allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace rebind::test {

int64_t fail_heap_at(int64_t number) { return std::exchange(until_failure, number); }

}  // namespace rebind::test
