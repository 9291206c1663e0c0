#include <cmath>
#include <vector>

#include "lib/comm/rank_order_sum.h"
#include "test/support/catch.h"

namespace rebind::comm {
namespace {

TEST_CASE("sum: the order of the parts shows in the bits", "[comm]") {
  const float big[] = {1e8f}, one[] = {1.0f}, minus[] = {-1e8f};
  float out[1];
  rank_order_sum(out, std::vector<const float*>{big, one, minus}, 1);
  CHECK(out[0] == 0.0f);
  rank_order_sum(out, std::vector<const float*>{big, minus, one}, 1);
  CHECK(out[0] == 1.0f);
}

TEST_CASE("sum: every element, at lengths around a block", "[comm]") {
  for (const int64_t numel : {0, 1, 2, 15, 2047, 2048, 2049, 4097}) {
    std::vector<double> a(numel), b(numel), c(numel), out(numel + 1, -7.0);
    for (int64_t i = 0; i < numel; ++i) a[i] = i, b[i] = 0.5, c[i] = -2.0 * i;
    rank_order_sum(out.data(), std::vector<const double*>{a.data(), b.data(), c.data()}, numel);
    int64_t wrong = 0;
    for (int64_t i = 0; i < numel; ++i) wrong += out[i] != 0.5 - i;
    CHECK(wrong == 0);
    CHECK(out[numel] == -7.0);
  }
}

TEST_CASE("sum: one part is copied to the bit", "[comm]") {
  const float part[] = {-0.0f, std::nanf("1"), 3.0f};
  float out[3] = {};
  rank_order_sum(out, std::vector<const float*>{part}, 3);
  CHECK(std::signbit(out[0]));
  CHECK(std::isnan(out[1]));
  CHECK(out[2] == 3.0f);
}

}  // namespace
}  // namespace rebind::comm
