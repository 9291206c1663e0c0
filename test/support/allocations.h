// Counts the bytes of CPU tensors, and lets the allocation of one fail. For tests of memory peaks and of running out of it.
//
//   Allocations counted;
//   const CountHere here(counted);                   // this thread's tensors, until the end of the scope
//   at::Tensor tensor = at::empty({256});            // counted.live() == 1024
//   counted.reset_peak();
//   counted.fail_at(3);                              // the third allocation from now throws std::bad_alloc, once
//
// Counted is what a thread allocates inside a CountHere, wherever it is freed; ranks are threads, so each counts its own. Threads
// that a rank starts count nothing unless they open a CountHere with the same Allocations, a handle that may be copied. Bytes are
// those asked for. What does not go through LibTorch's allocator (std::vector, Gloo's buffers) is not seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace rebind::test {

class Allocations {
 public:
  Allocations();

  int64_t live() const { return counts_->live; }    // bytes
  int64_t peak() const { return counts_->peak; }    // the most that was live at once since reset_peak
  int64_t count() const { return counts_->count; }  // allocations so far
  void reset_peak() { counts_->peak = counts_->live.load(); }

  // The number-th allocation from now, from 1, throws; 0 calls it off.
  void fail_at(int64_t number) { counts_->until_failure = number; }
  // Whether the failure asked for has not come yet.
  bool failure_pending() const { return counts_->until_failure > 0; }

  struct Counts {
    std::atomic<int64_t> live{0}, peak{0}, count{0}, until_failure{0};
  };

 private:
  friend class CountHere;
  std::shared_ptr<Counts> counts_;
};

class CountHere {
 public:
  explicit CountHere(const Allocations& allocations);
  ~CountHere();
  CountHere(const CountHere&) = delete;
  CountHere& operator=(const CountHere&) = delete;

 private:
  std::shared_ptr<Allocations::Counts> outer_;
};

}  // namespace rebind::test
