#include "lib/comm/rank_order_sum.h"

#include <algorithm>

namespace rebind::comm {
namespace {

template <class T>
void add(T* __restrict out, const T* __restrict a, const T* __restrict b, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) out[i] = a[i] + b[i];
}

template <class T>
void accumulate(T* __restrict out, const T* __restrict a, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) out[i] += a[i];
}

template <class T>
void divide(T* out, int64_t numel, T divisor) {
  for (int64_t i = 0; i < numel; ++i) out[i] /= divisor;
}

template <class T>
void sum(T* out, std::span<const T* const> parts, int64_t numel, T divisor) {
  // A block of the result stays in the first-level cache while the ranks' blocks stream by.
  constexpr int64_t kBlock = 2048;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    if (parts.size() == 1) {
      std::copy_n(parts[0] + begin, length, out + begin);
    } else {
      add(out + begin, parts[0] + begin, parts[1] + begin, length);
      for (size_t r = 2; r < parts.size(); ++r) accumulate(out + begin, parts[r] + begin, length);
    }
    if (divisor != 1) divide(out + begin, length, divisor);
  }
}

}  // namespace

void rank_order_sum(float* out, std::span<const float* const> parts, int64_t numel, float divisor) { sum(out, parts, numel, divisor); }
void rank_order_sum(double* out, std::span<const double* const> parts, int64_t numel, double divisor) {
  sum(out, parts, numel, divisor);
}

}  // namespace rebind::comm
