#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "lib/plan/census.h"
#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using test::Bag;
using test::joined;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

using Lines = std::vector<std::string>;

Lines lines_of(const std::vector<NamedModule>& models, const Optimizers& optimizers, const FsdpOptions& options = {}, int rank = 0,
               int world_size = 2) {
  const auto census = take_census(models, optimizers, {});
  REQUIRE(census.ok());
  const auto plan = make_plan(*census, rank, world_size, options, {});
  REQUIRE(plan.ok());
  return agreement_lines(*census, *plan, options);
}

// One rank's program: two layers, AdamW with decay and without.
struct Program {
  Program() {
    a = model.register_module("a", std::make_shared<Bag>(Bag({{"weight", {4, 3}}, {"bias", {4}}})));
    b = model.register_module("b", std::make_shared<Bag>(Bag({{"weight", {2, 4}}})));
  }
  Lines lines(int rank = 0) {
    std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup({(*a)["weight"], (*b)["weight"]}),
                                               OptimizerParamGroup({(*a)["bias"]})};
    if (swap_groups) std::swap(groups[0], groups[1]);
    torch::optim::AdamW adamw(groups, AdamWOptions(lr));
    if (stepped) {
      (*a)["bias"].mutable_grad() = at::ones({4});
      adamw.step();
      (*a)["bias"].mutable_grad().reset();
    }
    return lines_of({{"model", &model}}, {&adamw}, options, rank, world_size);
  }
  Bag model;
  std::shared_ptr<Bag> a, b;
  double lr = 0.01;
  bool swap_groups = false, stepped = false;
  FsdpOptions options;
  int world_size = 2;
};

// What is said when rank 1's program is changed like that.
std::string difference(const std::function<void(Program&)>& change) {
  Program rank0, rank1;
  change(rank1);
  return first_difference(rank0.lines(0), rank1.lines(1), 1);
}

TEST_CASE("agreement: ranks with equal programs agree, whatever their rank", "[plan][agreement]") {
  CHECK(difference([](Program&) {}) == "");
  CHECK(difference([](Program& program) { (*program.a)["bias"].data().zero_(); }) == "");
}

TEST_CASE("agreement: the lines of a small program", "[plan][agreement]") {
  Bag model({{"w", {3, 2}}});
  model.register_parameter("tied", model["w"]);
  model.register_buffer("mask", at::ones({2}, at::kBool));
  torch::optim::Adam adam({model["w"]});
  model["w"].mutable_grad() = at::ones({3, 2});
  adam.step();
  CHECK(joined(lines_of({{"model", &model}}, {&adam}), "\n") ==
        "world size: 2\n"
        "options.strategy: 0\n"
        "options.sync_from_rank0: true\n"
        "options.reshard_after_forward: true\n"
        "options.prefetch_units: 1\n"
        "options.coalesce: true\n"
        "options.gradient_divide_factor: world size\n"
        "options.collective_timeout: 600000 ms\n"
        "options.check_order: false\n"
        "options.layout_rules: slot 0, quantum 0\n"
        "model 'model'\n"
        "parameter 'w': float32 [3, 2]\n"
        "no more parameters\n"
        "buffer 'mask': bool [2]\n"
        "no more buffers\n"
        "optimizers[0]: Adam, 1 group\n"
        "optimizers[0], group 0: lr=0.001 betas=(0.9, 0.999) eps=1e-08 weight_decay=0 amsgrad=0\n"
        "no more optimizers\n"
        "parameter 'w': also 'tied'\n"
        "parameter 'w': strides [2, 1], requires_grad true, gradient defined\n"
        "parameter 'w': in optimizers[0], group 0, params()[0], state exp_avg float32 [3, 2], exp_avg_sq float32 [3, 2], step 1\n"
        "parameter 'w': unit '<root>', buffer 0, offset 0\n"
        "unit '<root>': float32, 6 elements, 8 a rank");
}

TEST_CASE("agreement: a parameter more, or another, is named", "[plan][agreement]") {
  CHECK(difference([](Program& program) { program.b->register_parameter("bias", at::ones({3})); }) ==
        "rank 1 has \"parameter 'b.bias': float32 [3]\", rank 0 has \"no more parameters\"");
  CHECK(difference([](Program& program) { program.model.register_parameter("scale", at::ones({1})); }) ==
        "rank 1 has \"parameter 'scale': float32 [1]\", rank 0 has \"parameter 'a.weight': float32 [4, 3]\"");
  Program rank0, rank1;
  rank1.b = std::make_shared<Bag>(Bag({{"weight", {3, 4}}}));
  rank1.model = Bag();
  rank1.model.register_module("a", rank1.a);
  rank1.model.register_module("b", rank1.b);
  CHECK(first_difference(rank0.lines(), rank1.lines(), 3) ==
        "rank 3 has \"parameter 'b.weight': float32 [3, 4]\", rank 0 has \"parameter 'b.weight': float32 [2, 4]\"");
}

TEST_CASE("agreement: a buffer, a tie and a defined gradient are compared", "[plan][agreement]") {
  CHECK(difference([](Program& program) {
          program.model.register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(3).affine(false)).ptr());
        }) == "rank 1 has \"buffer 'norm.running_mean': float32 [3]\", rank 0 has \"no more buffers\"");
  CHECK(difference([](Program& program) { program.b->register_parameter("tied", (*program.a)["bias"]); }) ==
        "rank 1 has \"parameter 'a.bias': also 'b.tied'\", rank 0 has \"parameter 'a.bias': strides [1], requires_grad true, "
        "gradient "
        "undefined\"");
  CHECK(difference([](Program& program) {
          (*program.a)["weight"].mutable_grad() = at::ones({4, 3});
        }) ==
        "rank 1 has \"parameter 'a.weight': strides [3, 1], requires_grad true, gradient defined\", "
        "rank 0 has \"parameter 'a.weight': strides [3, 1], requires_grad true, gradient undefined\"");
}

TEST_CASE("agreement: optimizer options are compared to the last bit", "[plan][agreement]") {
  CHECK(difference([](Program& program) { program.lr = 0.010000000000000002; }) ==
        "rank 1 has \"optimizers[0], group 0: lr=0.010000000000000002 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.01 amsgrad=0\", "
        "rank 0 has \"optimizers[0], group 0: lr=0.01 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.01 amsgrad=0\"");
}

TEST_CASE("agreement: the order of groups is compared", "[plan][agreement]") {
  CHECK(difference([](Program& program) { program.swap_groups = true; }) ==
        "rank 1 has \"parameter 'a.weight': in optimizers[0], group 1, params()[0], state none\", "
        "rank 0 has \"parameter 'a.weight': in optimizers[0], group 0, params()[0], state none\"");
}

TEST_CASE("agreement: state on one rank only is named", "[plan][agreement]") {
  CHECK(difference([](Program& program) { program.stepped = true; }) ==
        "rank 1 has \"parameter 'a.bias': in optimizers[0], group 1, params()[0], state exp_avg float32 [4], exp_avg_sq float32 "
        "[4], step "
        "1\", rank 0 has \"parameter 'a.bias': in optimizers[0], group 1, params()[0], state none\"");
}

TEST_CASE("agreement: optimizers are compared by number and type", "[plan][agreement]") {
  Bag model({{"w", {2}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  torch::optim::Adam adam(model.parameters());
  CHECK(first_difference(lines_of({{"model", &model}}, {&sgd}), lines_of({{"model", &model}}, {&adam}), 1) ==
        "rank 1 has \"optimizers[0]: Adam, 1 group\", rank 0 has \"optimizers[0]: SGD, 1 group\"");
  CHECK(first_difference(lines_of({{"model", &model}}, {&sgd}), lines_of({{"model", &model}}, {&sgd, &adam}), 1) ==
        "rank 1 has \"optimizers[1]: Adam, 1 group\", rank 0 has \"no more optimizers\"");
}

TEST_CASE("agreement: world size and options are compared", "[plan][agreement]") {
  CHECK(difference([](Program& program) { program.world_size = 3; }) ==
        "rank 1 has \"world size: 3\", rank 0 has \"world size: 2\"");
  const auto options_differ = [](const std::function<void(FsdpOptions&)>& change) {
    return difference([&](Program& program) { change(program.options); });
  };
  CHECK(options_differ([](FsdpOptions& o) { o.sync_from_rank0 = false; }) ==
        "rank 1 has \"options.sync_from_rank0: false\", rank 0 has \"options.sync_from_rank0: true\"");
  CHECK(options_differ([](FsdpOptions& o) { o.prefetch_units = 2; }) ==
        "rank 1 has \"options.prefetch_units: 2\", rank 0 has \"options.prefetch_units: 1\"");
  CHECK(options_differ([](FsdpOptions& o) { o.coalesce = false; }) ==
        "rank 1 has \"options.coalesce: false\", rank 0 has \"options.coalesce: true\"");
  CHECK(options_differ([](FsdpOptions& o) { o.gradient_divide_factor = 1; }) ==
        "rank 1 has \"options.gradient_divide_factor: 1\", rank 0 has \"options.gradient_divide_factor: world size\"");
  CHECK(options_differ([](FsdpOptions& o) { o.collective_timeout = std::chrono::milliseconds(1500); }) ==
        "rank 1 has \"options.collective_timeout: 1500 ms\", rank 0 has \"options.collective_timeout: 600000 ms\"");
  CHECK(options_differ([](FsdpOptions& o) { o.check_order = true; }) ==
        "rank 1 has \"options.check_order: true\", rank 0 has \"options.check_order: false\"");
  CHECK(options_differ([](FsdpOptions& o) {
          o.layout_rules = {8, 8};
        }) == "rank 1 has \"options.layout_rules: slot 8, quantum 8\", rank 0 has \"options.layout_rules: slot 0, quantum 0\"");
}

TEST_CASE("agreement: unit policies are compared by the units they make", "[plan][agreement]") {
  CHECK(difference([](Program& program) { program.options.unit_policy = UnitPolicy::whole_model(); }) ==
        "rank 1 has \"parameter 'a.weight': unit 'model', buffer 0, offset 0\", "
        "rank 0 has \"parameter 'a.weight': unit '<root>', buffer 0, offset 0\"");
  CHECK(difference([](Program& program) {
          program.options.unit_policy = UnitPolicy::by_module([](const std::string&, const torch::nn::Module&) { return false; });
        }) == "");
}

TEST_CASE("agreement: the first line that differs is told, and a list that ends", "[plan][agreement]") {
  CHECK(first_difference({"x", "y"}, {"x", "y"}, 1) == "");
  CHECK(first_difference({"x", "y", "z"}, {"x", "w", "v"}, 2) == "rank 2 has \"w\", rank 0 has \"y\"");
  CHECK(first_difference({"x"}, {"x", "parameter 'b.bias': float32 [3]"}, 1) ==
        "rank 1 has \"parameter 'b.bias': float32 [3]\", rank 0 has nothing more");
  CHECK(first_difference({"x", "y"}, {"x"}, 1) == "rank 1 has nothing more, rank 0 has \"y\"");
}

}  // namespace
}  // namespace rebind::plan
