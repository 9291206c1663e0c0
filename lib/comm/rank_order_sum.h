// The sum over ranks, added in rank order: at every world size the bits of one process that adds the same values in that order.
#pragma once

#include <cstdint>
#include <span>

namespace rebind::comm {

// out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i] + ...) / divisor; out overlaps no part, there is at least one part.
void rank_order_sum(float* out, std::span<const float* const> parts, int64_t numel, float divisor = 1);
void rank_order_sum(double* out, std::span<const double* const> parts, int64_t numel, double divisor = 1);

}  // namespace rebind::comm
