#include "lib/plan/units.h"

#include <algorithm>
#include <memory>
#include <string>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using test::Bag;
using test::render;

std::string units(torch::nn::Module& model, const UnitPolicy& policy) {
  FsdpOptions options;
  options.unit_policy = policy;
  return render(plan_fsdp(model, {}, 0, 2, options), test::units_text);
}

std::string units(const std::vector<NamedModule>& models, const UnitPolicy& policy) {
  FsdpOptions options;
  options.unit_policy = policy;
  return render(plan_fsdp(models, {}, 0, 2, options), test::units_text);
}

UnitPolicy by_names(std::vector<std::string> names) {
  return UnitPolicy::by_module([names](const std::string& name, const torch::nn::Module&) {
    return std::find(names.begin(), names.end(), name) != names.end();
  });
}

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(int64_t width) {
    register_module("q", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    register_module("k", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).elementwise_affine(true)));
    register_module("attention", std::make_shared<AttentionImpl>(width));
  }
};

// Embeddings, `layers` blocks in a container of their own, a head.
struct Gpt : torch::nn::Module {
  explicit Gpt(int layers) {
    register_module("tokens", torch::nn::Embedding(11, 4));
    register_module("places", torch::nn::Embedding(5, 4));
    torch::nn::ModuleList blocks;
    for (int i = 0; i < layers; ++i) blocks->push_back(std::make_shared<BlockImpl>(4));
    auto trunk = register_module("trunk", std::make_shared<Bag>());
    trunk->register_module("blocks", blocks.ptr());
    register_module("head", torch::nn::Linear(4, 11));
  }
};

TEST_CASE("units: the whole model is one unit", "[plan][units]") {
  Gpt model(1);
  CHECK(units(model, UnitPolicy::whole_model()) ==
        "model: tokens.weight places.weight trunk.blocks.0.norm.weight trunk.blocks.0.norm.bias trunk.blocks.0.attention.q.weight "
        "trunk.blocks.0.attention.k.weight head.weight head.bias");
}

TEST_CASE("units: automatic makes each repeated block a unit, not what repeats inside it, and the rest one", "[plan][units]") {
  Gpt model(2);
  CHECK(units(model, UnitPolicy::automatic()) ==
        "<root>: tokens.weight places.weight head.weight head.bias | "
        "trunk.blocks.0: trunk.blocks.0.norm.weight trunk.blocks.0.norm.bias trunk.blocks.0.attention.q.weight "
        "trunk.blocks.0.attention.k.weight | "
        "trunk.blocks.1: trunk.blocks.1.norm.weight trunk.blocks.1.norm.bias trunk.blocks.1.attention.q.weight "
        "trunk.blocks.1.attention.k.weight");
}

TEST_CASE("units: automatic looks inside what is not repeated", "[plan][units]") {
  Gpt model(1);  // the only block is no repetition; q and k inside it are one
  CHECK(units(model, UnitPolicy::automatic()) ==
        "<root>: tokens.weight places.weight trunk.blocks.0.norm.weight trunk.blocks.0.norm.bias head.weight head.bias | "
        "trunk.blocks.0.attention.q: trunk.blocks.0.attention.q.weight | "
        "trunk.blocks.0.attention.k: trunk.blocks.0.attention.k.weight");
}

TEST_CASE("units: blocks repeat only with equal names and shapes", "[plan][units]") {
  Bag names, shapes, equal;
  names.register_module("0", std::make_shared<Bag>(Bag({{"a", {2}}})));
  names.register_module("1", std::make_shared<Bag>(Bag({{"b", {2}}})));
  CHECK(units(names, UnitPolicy::automatic()) == "<root>: 0.a 1.b");
  shapes.register_module("0", std::make_shared<Bag>(Bag({{"a", {2}}})));
  shapes.register_module("1", std::make_shared<Bag>(Bag({{"a", {1, 2}}})));
  CHECK(units(shapes, UnitPolicy::automatic()) == "<root>: 0.a 1.a");
  equal.register_module("0", std::make_shared<Bag>(Bag({{"a", {2}}})));
  equal.register_module("between", std::make_shared<Bag>());  // nothing in it
  equal.register_module("1", std::make_shared<Bag>(Bag({{"a", {2}}})));
  equal.register_module("empty", std::make_shared<Bag>());
  CHECK(units(equal, UnitPolicy::automatic()) == "0: 0.a | 1: 1.a");
}

TEST_CASE("units: an embedding and a head of one shape are no repetition", "[plan][units]") {
  Bag model;
  model.register_module("tokens", torch::nn::Embedding(7, 4));
  model.register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 7).bias(false)));
  CHECK(units(model, UnitPolicy::automatic()) == "<root>: tokens.weight head.weight");
}

TEST_CASE("units: blocks of different dtypes do not repeat each other", "[plan][units]") {
  Bag model;
  model.register_module("0", std::make_shared<Bag>(Bag({{"a", {2}}})));
  model.register_module("1", std::make_shared<Bag>(Bag({{"a", {2}}}, at::kDouble)));
  CHECK(units(model, UnitPolicy::automatic()) == "<root>: 0.a 1.a");
}

TEST_CASE("units: a block registered twice is one unit, under its first name", "[plan][units]") {
  Bag model;
  const auto block = std::make_shared<Bag>(Bag({{"a", {2}}}));
  model.register_module("0", block);
  model.register_module("1", block);
  CHECK(units(model, UnitPolicy::automatic()) == "0: 0.a");
}

TEST_CASE("units: a nested unit takes its parameters out of the one around it", "[plan][units]") {
  Gpt model(2);
  CHECK(units(model, by_names({"trunk", "trunk.blocks.1", "head"})) ==
        "<root>: tokens.weight places.weight | "
        "trunk: trunk.blocks.0.norm.weight trunk.blocks.0.norm.bias trunk.blocks.0.attention.q.weight "
        "trunk.blocks.0.attention.k.weight | "
        "trunk.blocks.1: trunk.blocks.1.norm.weight trunk.blocks.1.norm.bias trunk.blocks.1.attention.q.weight "
        "trunk.blocks.1.attention.k.weight | "
        "head: head.weight head.bias");
}

TEST_CASE("units: by_type chooses modules by their type", "[plan][units]") {
  Gpt model(2);
  CHECK(
      units(model, UnitPolicy::by_type<torch::nn::EmbeddingImpl, AttentionImpl>()) ==
      "tokens: tokens.weight | places: places.weight | "
      "<root>: trunk.blocks.0.norm.weight trunk.blocks.0.norm.bias trunk.blocks.1.norm.weight trunk.blocks.1.norm.bias head.weight "
      "head.bias | "
      "trunk.blocks.0.attention: trunk.blocks.0.attention.q.weight trunk.blocks.0.attention.k.weight | "
      "trunk.blocks.1.attention: trunk.blocks.1.attention.q.weight trunk.blocks.1.attention.k.weight");
}

TEST_CASE("units: a unit that is left without parameters does not exist", "[plan][units]") {
  Gpt model(1);
  CHECK(units(model, by_names({"tokens", "places", "trunk", "trunk.blocks", "trunk.blocks.0", "head"})) ==
        "tokens: tokens.weight | places: places.weight | "
        "trunk.blocks.0: trunk.blocks.0.norm.weight trunk.blocks.0.norm.bias trunk.blocks.0.attention.q.weight "
        "trunk.blocks.0.attention.k.weight | "
        "head: head.weight head.bias");
}

TEST_CASE("units: the predicate sees the model itself under the empty name", "[plan][units]") {
  Gpt model(1);
  std::vector<std::string> names;
  units(model, UnitPolicy::by_module([&](const std::string& name, const torch::nn::Module&) {
          names.push_back(name.empty() ? "(model)" : name);
          return false;
        }));
  CHECK(test::joined(names, " ") ==
        "(model) tokens places trunk trunk.blocks trunk.blocks.0 trunk.blocks.0.norm trunk.blocks.0.attention "
        "trunk.blocks.0.attention.q "
        "trunk.blocks.0.attention.k head");
  Bag small({{"a", {2}}});
  CHECK(units(small, by_names({""})) == "<root>: a");
}

TEST_CASE("units: a tied parameter is in the unit of its first name", "[plan][units]") {
  Bag model;
  const auto first = model.register_module("first", std::make_shared<Bag>(Bag({{"weight", {2}}})));
  const auto second = model.register_module("second", std::make_shared<Bag>(Bag({{"bias", {2}}})));
  second->register_parameter("weight", (*first)["weight"]);
  CHECK(units(model, by_names({"first", "second"})) == "first: first.weight | second: second.bias");
  CHECK(units(model, by_names({"second"})) == "<root>: first.weight | second: second.bias");
}

TEST_CASE("units: several models never share a unit, and their units carry their names", "[plan][units]") {
  Bag generator, critic({{"w", {3}}});
  generator.register_module("0", std::make_shared<Bag>(Bag({{"a", {2}}})));
  generator.register_module("1", std::make_shared<Bag>(Bag({{"a", {2}}})));
  generator.register_parameter("w", at::ones({3}));
  const std::vector<NamedModule> models = {{"generator", &generator}, {"critic", &critic}};
  CHECK(units(models, UnitPolicy::automatic()) ==
        "generator: generator.w | generator.0: generator.0.a | generator.1: generator.1.a | critic: critic.w");
  CHECK(units(models, UnitPolicy::whole_model()) == "generator: generator.w generator.0.a generator.1.a | critic: critic.w");
  CHECK(units(models, by_names({"1"})) == "generator: generator.w generator.0.a | generator.1: generator.1.a | critic: critic.w");
}

}  // namespace
}  // namespace rebind::plan
