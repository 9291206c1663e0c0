// Fsdp::clip_grad_norm: the norm over all parameters of all ranks, from the shards alone.
#include <ATen/Functions.h>

#include <bit>
#include <cmath>
#include <limits>

#include "lib/runtime/sharding.h"

namespace rebind {
using runtime::gradient_parts;
using runtime::Sharding;

double runtime::Sharding::norm_over_ranks(const std::vector<at::Tensor>& parts, double p, const std::string& name) {
  const bool infinity = std::isinf(p);
  // This rank's sum of |g|^p (or largest |g|), in double: W partial sums of any size add up without losing the small ones.
  double own = 0;
  for (const at::Tensor& part : parts) {
    if (part.numel() == 0) continue;
    const double norm = at::linalg_vector_norm(part, p, {}, false, at::kDouble).item<double>();
    // std::max would drop a NaN.
    own = infinity ? (std::isnan(norm) || norm > own ? norm : own) : own + std::pow(norm, p);
  }
  double total = own;
  if (world_size() > 1) {
    const uint64_t word = std::bit_cast<uint64_t>(own);
    auto all = communicator->exchange({.kind = comm::Kind::kExchange, .unit = 1, .epoch = 0, .name = name}, std::span(&word, 1));
    if (!all.ok()) throw c10::Error(std::string(all.status().message()), nullptr);
    total = 0;
    for (const auto& words : *all) {
      const double part = std::bit_cast<double>(words[0]);
      total = infinity ? (std::isnan(part) || part > total ? part : total) : total + part;
      if (std::isnan(part)) total = part;
    }
  }
  return infinity ? total : std::pow(total, 1.0 / p);
}

double Fsdp::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  Sharding& sharding = *sharding_;
  std::lock_guard lock(sharding.mutex);
  const Where where = sharding.where("clip_grad_norm");
  if (sharding.restored) throw_error(where, "the model was restored", "Use torch::nn::utils::clip_grad_norm_");
  if (!(norm_type > 0)) throw_error(where, "norm_type must be a number above 0 or infinity", "2.0 is the usual one");
  if (std::isnan(max_norm) || max_norm < 0) throw_error(where, "max_norm must not be negative", "Pass a number above 0");
  at::NoGradGuard no_grad;
  for (auto& parameter : sharding.parameters) sharding.settle(*parameter);

  std::vector<at::Tensor> gradients;
  for (auto& parameter : sharding.parameters) {
    if (!parameter->reduced) continue;
    for (at::Tensor& part : gradient_parts(*parameter)) gradients.push_back(std::move(part));
  }
  std::vector<at::Tensor> replicated;  // the same on every rank: one of them counts it
  for (const auto& replica : sharding.replicas) {
    if (replica->tensor.grad().defined()) replicated.push_back(replica->tensor.grad());
  }
  std::vector<at::Tensor> counted = gradients;
  if (sharding.rank() == 0) counted.insert(counted.end(), replicated.begin(), replicated.end());
  if (sharding.world_size() > 1) ++sharding.counts.all_reduces;
  const double norm = sharding.norm_over_ranks(counted, norm_type, "clip_grad_norm");
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw_error(where, "the norm of the gradients is not finite; no gradient was changed",
                "Skip the step on all ranks, or pass error_if_nonfinite = false");
  }
  // LibTorch's factor: computed in fp32, never above 1; a NaN goes into every gradient.
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
  for (const at::Tensor& gradient : replicated) gradient.mul_(factor);
  for (auto& parameter : sharding.parameters) {
    if (parameter->reduced) parameter->unit->gradients.stale[parameter->slot_in_unit] = true;
  }
  return norm;
}

}  // namespace rebind
