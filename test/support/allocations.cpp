#include "test/support/allocations.h"

#include <c10/core/CPUAllocator.h>

#include <new>
#include <utility>

namespace rebind::test {
namespace {

using Counts = Allocations::Counts;

thread_local std::shared_ptr<Counts> current;

// Stands before every block; as large as the alignment that LibTorch's kernels count on.
struct alignas(64) Head {
  std::shared_ptr<Counts> counts;  // null: allocated outside any CountHere
  int64_t bytes;
};

void release(void* data);

void count(const std::shared_ptr<Counts>& counts, int64_t bytes) {
  ++counts->count;
  const int64_t live = counts->live += bytes;
  for (int64_t peak = counts->peak; peak < live && !counts->peak.compare_exchange_weak(peak, live);) {
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& wrapped) : inner(wrapped) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    if (current != nullptr && current->until_failure > 0 && --current->until_failure == 0) throw std::bad_alloc();
    auto* head = new (inner.raw_allocate(sizeof(Head) + bytes)) Head{current, static_cast<int64_t>(bytes)};
    if (head->counts != nullptr) count(head->counts, head->bytes);
    return {head + 1, head + 1, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  c10::Allocator& inner;
};

// Never removed: blocks it gave out may live until the end of the program.
CountingAllocator& installed() {
  static CountingAllocator& allocator = []() -> CountingAllocator& {
    auto* made = new CountingAllocator(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(made, /*priority=*/255);
    return *made;
  }();
  return allocator;
}

void release(void* data) {
  if (data == nullptr) return;
  Head* head = static_cast<Head*>(data) - 1;
  if (head->counts != nullptr) head->counts->live -= head->bytes;
  head->~Head();
  installed().inner.raw_deallocate(head);
}

}  // namespace

Allocations::Allocations() : counts_(std::make_shared<Counts>()) { installed(); }

CountHere::CountHere(const Allocations& allocations) : outer_(std::exchange(current, allocations.counts_)) {}
CountHere::~CountHere() { current = std::move(outer_); }

}  // namespace rebind::test
