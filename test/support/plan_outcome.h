// What becomes of a plan when a small model is changed: "accepted", or the status as text.
//
//   CHECK(outcome_with_b(at::ones({3}).to_sparse()) == "UNIMPLEMENTED: plan_fsdp, rank 1: parameter 'b': ...");
#pragma once

#include <functional>
#include <string>

#include "test/support/plan_text.h"

namespace rebind::test {

inline std::string outcome(const absl::StatusOr<FsdpPlan>& plan) { return plan.ok() ? "accepted" : plan.status().ToString(); }

// Of a model with parameter 'a', float32 [2], and what `change` does to it.
inline std::string outcome_with(const std::function<void(Bag&)>& change) {
  Bag model({{"a", {2}}});
  change(model);
  return outcome(plan_fsdp(model, {}, 1, 2));
}

// Of a model with one more parameter, 'b'.
inline std::string outcome_with_b(const at::Tensor& b, bool requires_grad = true) {
  return outcome_with([&](Bag& model) { model.register_parameter("b", b, requires_grad); });
}

inline std::string outcome_with_gradient(const std::function<at::Tensor()>& gradient) {
  return outcome_with([&](Bag& model) { model["a"].mutable_grad() = gradient(); });
}

inline std::string outcome_with_options(const std::function<void(FsdpOptions&)>& change) {
  Bag model({{"a", {2}}});
  FsdpOptions options;
  change(options);
  return outcome(plan_fsdp(model, {}, 1, 2, options));
}

}  // namespace rebind::test
