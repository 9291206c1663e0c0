// What a plan refuses of FsdpOptions, with its whole text.
#include <limits>
#include <stdexcept>
#include <string>

#include "test/support/catch.h"
#include "test/support/plan_outcome.h"

namespace rebind {
namespace {

using test::Bag;
using test::outcome_with_options;

TEST_CASE("plan: refuses options that are not supported yet, by name and value", "[plan][refusal]") {
  const std::string subject = "UNIMPLEMENTED: plan_fsdp, rank 1: options.";
  const std::string strategy_remedy = ", which is not supported yet. Use ShardingStrategy::kFullShard.";
  CHECK(outcome_with_options([](FsdpOptions& o) { o.strategy = ShardingStrategy::kShardGradOp; }) ==
        subject + "strategy is kShardGradOp" + strategy_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.strategy = ShardingStrategy::kShardOptimizer; }) ==
        subject + "strategy is kShardOptimizer" + strategy_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.strategy = ShardingStrategy::kNoShard; }) ==
        subject + "strategy is kNoShard" + strategy_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.mixed_precision.param_dtype = at::kBFloat16; }) ==
        subject + "mixed_precision.param_dtype is bfloat16, but mixed precision is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.mixed_precision.reduce_dtype = at::kFloat; }) ==
        subject + "mixed_precision.reduce_dtype is float32, but mixed precision is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.replicate_group = c10::make_intrusive<c10d::ProcessGroup>(0, 1); }) ==
        subject + "replicate_group is set, but hybrid sharding is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.max_live_bytes = 4096; }) ==
        subject + "max_live_bytes is 4096, but a cap is not supported yet. Leave it unset.");
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.ignored_parameters = {"a", "b."};
        }) == subject + "ignored_parameters names 'a', 'b.', but ignored parameters are not supported yet. Leave it empty.");
}

TEST_CASE("plan: refuses option values that make no sense", "[plan][refusal]") {
  const std::string subject = "INVALID_ARGUMENT: plan_fsdp, rank 1: options.";
  const std::string factor_remedy = ". Use a finite number other than 0, or leave it unset for the mean over the ranks.";
  CHECK(outcome_with_options([](FsdpOptions& o) { o.gradient_divide_factor = 0.0; }) ==
        subject + "gradient_divide_factor is 0" + factor_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.gradient_divide_factor = std::numeric_limits<double>::infinity(); }) ==
        subject + "gradient_divide_factor is inf" + factor_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.gradient_divide_factor = std::numeric_limits<double>::quiet_NaN(); }) ==
        subject + "gradient_divide_factor is nan" + factor_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.collective_timeout = std::chrono::milliseconds(0); }) ==
        subject + "collective_timeout is 0 ms. Use a positive time.");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.prefetch_units = -1; }) == subject + "prefetch_units is -1. Use 0 or more.");
  const std::string rules_remedy = ". Both must be positive and quantum a multiple of slot; leave both 0 to have them chosen.";
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {3, 8};
        }) == subject + "layout_rules has slot 3 and quantum 8" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {0, 8};
        }) == subject + "layout_rules has slot 0 and quantum 8" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {8, 0};
        }) == subject + "layout_rules has slot 8 and quantum 0" + rules_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.layout_rules = {-8, -8};
        }) == subject + "layout_rules has slot -8 and quantum -8" + rules_remedy);
  const std::string size_remedy = ". Give by_size a number of elements of 1 or more.";
  CHECK(outcome_with_options([](FsdpOptions& o) { o.unit_policy = UnitPolicy::by_size(0); }) ==
        subject + "unit_policy is by_size(0)" + size_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.unit_policy = UnitPolicy::by_size(-5); }) ==
        subject + "unit_policy is by_size(-5)" + size_remedy);
  CHECK(outcome_with_options([](FsdpOptions& o) { o.unit_policy = UnitPolicy::by_module(nullptr); }) ==
        subject + "unit_policy is by_module without a predicate. Give by_module a function.");
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.unit_policy =
              UnitPolicy::by_module([](const std::string&, const torch::nn::Module&) -> bool { throw std::runtime_error("no"); });
        }) == subject + "unit_policy's predicate threw: no. Give by_module a function that does not throw.");
}

TEST_CASE("plan: accepts every option that is supported", "[plan][refusal]") {
  CHECK(outcome_with_options([](FsdpOptions& o) {
          o.sync_from_rank0 = false;
          o.gradient_divide_factor = -2.5;
          o.collective_timeout = std::chrono::milliseconds(1);
          o.prefetch_units = 3;
          o.coalesce = false;
          o.check_order = true;
          o.layout_rules = {4, 12};
          o.unit_policy = UnitPolicy::by_type<Bag>();
        }) == "accepted");
  CHECK(outcome_with_options([](FsdpOptions& o) { o.unit_policy = UnitPolicy::by_size(1); }) == "accepted");
}

}  // namespace
}  // namespace rebind
