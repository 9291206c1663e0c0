// Options that are out of range, or not supported yet.
#include <cmath>
#include <optional>

#include <absl/strings/str_cat.h>

#include "lib/optim/exact_text.h"
#include "lib/plan/refuse.h"
#include "lib/plan/text.h"

namespace rebind::plan {
namespace {

using absl::StatusCode;

struct Refusal {
  std::string what, remedy;
};

const char* strategy_text(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::kFullShard: return "kFullShard";
    case ShardingStrategy::kShardGradOp: return "kShardGradOp";
    case ShardingStrategy::kShardOptimizer: return "kShardOptimizer";
    case ShardingStrategy::kNoShard: return "kNoShard";
  }
  return "unknown";
}

std::optional<Refusal> unsupported_option(const FsdpOptions& options) {
  if (options.strategy != ShardingStrategy::kFullShard) {
    return Refusal{absl::StrCat("options.strategy is ", strategy_text(options.strategy), ", which is not supported yet"),
                   "Use ShardingStrategy::kFullShard"};
  }
  if (options.mixed_precision.param_dtype || options.mixed_precision.reduce_dtype) {
    const bool param = options.mixed_precision.param_dtype.has_value();
    const auto dtype = param ? *options.mixed_precision.param_dtype : *options.mixed_precision.reduce_dtype;
    return Refusal{absl::StrCat("options.mixed_precision.", param ? "param_dtype" : "reduce_dtype", " is ", dtype_text(dtype),
                                ", but mixed precision is not supported yet"),
                   "Leave it unset"};
  }
  if (options.replicate_group) {
    return Refusal{"options.replicate_group is set, but hybrid sharding is not supported yet", "Leave it unset"};
  }
  if (options.max_live_bytes) {
    return Refusal{absl::StrCat("options.max_live_bytes is ", *options.max_live_bytes, ", but a cap is not supported yet"),
                   "Leave it unset"};
  }
  if (!options.ignored_parameters.empty()) {
    return Refusal{absl::StrCat("options.ignored_parameters names ", some_of(options.ignored_parameters),
                                ", but ignored parameters are not supported yet"),
                   "Leave it empty"};
  }
  return std::nullopt;
}

std::optional<Refusal> impossible_option(const FsdpOptions& options) {
  if (options.gradient_divide_factor && (!std::isfinite(*options.gradient_divide_factor) || *options.gradient_divide_factor == 0)) {
    return Refusal{absl::StrCat("options.gradient_divide_factor is ", optim::exact_text(*options.gradient_divide_factor)),
                   "Use a finite number other than 0, or leave it unset for the mean over the ranks"};
  }
  if (options.collective_timeout.count() <= 0) {
    return Refusal{absl::StrCat("options.collective_timeout is ", options.collective_timeout.count(), " ms"),
                   "Use a positive time"};
  }
  if (options.prefetch_units < 0) {
    return Refusal{absl::StrCat("options.prefetch_units is ", options.prefetch_units), "Use 0 or more"};
  }
  const auto [slot, quantum] = options.layout_rules;
  if (!(slot == 0 && quantum == 0) && !(slot > 0 && quantum > 0 && quantum % slot == 0)) {
    return Refusal{absl::StrCat("options.layout_rules has slot ", slot, " and quantum ", quantum),
                   "Both must be positive and quantum a multiple of slot; leave both 0 to have them chosen"};
  }
  if (options.unit_policy.kind() == UnitPolicy::Kind::kBySize && options.unit_policy.min_numel() < 1) {
    return Refusal{absl::StrCat("options.unit_policy is by_size(", options.unit_policy.min_numel(), ")"),
                   "Give by_size a number of elements of 1 or more"};
  }
  if (options.unit_policy.kind() == UnitPolicy::Kind::kByModule && !options.unit_policy.predicate()) {
    return Refusal{"options.unit_policy is by_module without a predicate", "Give by_module a function"};
  }
  return std::nullopt;
}

}  // namespace

absl::Status check_options(const FsdpOptions& options, const Where& where) {
  if (const auto refusal = unsupported_option(options)) {
    return error(StatusCode::kUnimplemented, where, refusal->what, refusal->remedy);
  }
  if (const auto refusal = impossible_option(options)) {
    return error(StatusCode::kInvalidArgument, where, refusal->what, refusal->remedy);
  }
  return absl::OkStatus();
}

}  // namespace rebind::plan
