#include <ATen/Functions.h>

#include <new>
#include <thread>

#include "test/support/allocations.h"
#include "test/support/catch.h"

namespace rebind::test {
namespace {

TEST_CASE("allocations: live and peak bytes of this thread's tensors", "[support]") {
  const at::Tensor before = at::ones({100});
  Allocations counted;
  {
    const CountHere here(counted);
    at::Tensor a = at::empty({256}), b = at::empty({64}, at::kDouble);
    CHECK(counted.live() == 1024 + 512);
    CHECK(reinterpret_cast<uintptr_t>(a.data_ptr()) % 64 == 0);
    a.reset();
    CHECK(counted.live() == 512);
    CHECK(counted.peak() == 1536);
    counted.reset_peak();
    CHECK(counted.peak() == 512);
    b.resize_({128});  // the new block is there before the old one goes
    CHECK(counted.live() == 1024);
    CHECK(counted.peak() == 1536);
    CHECK(at::empty({0}).nbytes() == 0);
    CHECK(counted.count() == 3);
    std::thread([] { return at::empty({1000}); }).join();
    CHECK(counted.live() == 1024);
    std::thread([&] { b.reset(); }).join();
    CHECK(counted.live() == 0);
    CHECK(before.sum().item<float>() == 100);
  }
  const int64_t count = counted.count();
  const at::Tensor after = at::empty({256});
  CHECK(counted.live() == 0);
  CHECK(counted.count() == count);
}

TEST_CASE("allocations: the one asked for fails, once, on the threads that count", "[support]") {
  Allocations counted, other;
  const CountHere here(counted);
  counted.fail_at(2);
  {
    const CountHere inner(other);
    CHECK(at::empty({8}).numel() == 8);
    CHECK(at::empty({8}).numel() == 8);
  }
  const at::Tensor first = at::empty({8});
  CHECK(counted.failure_pending());
  CHECK_THROWS_AS(at::empty({8}), std::bad_alloc);
  CHECK_FALSE(counted.failure_pending());
  CHECK(at::empty({8}).numel() == 8);
  CHECK(counted.live() == 32);
  counted.fail_at(1);
  counted.fail_at(0);
  CHECK(at::empty({8}).numel() == 8);
}

}  // namespace
}  // namespace rebind::test
