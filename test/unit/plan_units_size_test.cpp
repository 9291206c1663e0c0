// Units by size, and what `automatic` makes of models of real sizes. Their tensors have no memory.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/plan/text.h"
#include "lib/plan/units.h"
#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using test::Bag;
using test::render;
using test::without_memory;

using Shapes = std::vector<std::pair<const char*, std::vector<int64_t>>>;

std::shared_ptr<Bag> module_of(const Shapes& shapes) {
  auto module = std::make_shared<Bag>();
  for (const auto& [name, sizes] : shapes) module->register_parameter(name, without_memory(sizes));
  return module;
}

// Of another type than a linear layer of the same shape.
struct Embedding : Bag {
  Embedding(int64_t rows, int64_t dim) { register_parameter("weight", without_memory({rows, dim})); }
};

std::shared_ptr<Bag> linear(int64_t in, int64_t out) { return module_of({{"weight", {out, in}}, {"bias", {out}}}); }

std::shared_ptr<Bag> block(int64_t dim) {
  auto result = std::make_shared<Bag>();
  result->register_module("norm1", module_of({{"weight", {dim}}, {"bias", {dim}}}));
  result->register_module("norm2", module_of({{"weight", {dim}}, {"bias", {dim}}}));
  result->register_module("qkv", linear(dim, 3 * dim));
  result->register_module("out", linear(dim, dim));
  result->register_module("up", linear(dim, 4 * dim));
  result->register_module("down", linear(4 * dim, dim));
  return result;
}

struct GptShape {
  int64_t dim, vocabulary, context, layers;
  bool tied = false;
};

std::shared_ptr<Bag> gpt(const GptShape& shape) {
  auto model = std::make_shared<Bag>();
  auto token = model->register_module("token", std::make_shared<Embedding>(shape.vocabulary, shape.dim));
  model->register_module("position", std::make_shared<Embedding>(shape.context, shape.dim));
  auto blocks = model->register_module("blocks", std::make_shared<Bag>());
  for (int64_t i = 0; i < shape.layers; ++i) blocks->register_module(std::to_string(i), block(shape.dim));
  model->register_module("norm", module_of({{"weight", {shape.dim}}, {"bias", {shape.dim}}}));
  auto head = model->register_module("head", std::make_shared<Bag>());
  head->register_parameter("weight", shape.tied ? (*token)["weight"] : without_memory({shape.vocabulary, shape.dim}));
  return model;
}

// "token..position 39,383,808 | blocks.0 7,087,872": units and their elements.
std::string sizes(const FsdpPlan& plan) {
  std::vector<std::string> texts;
  for (const UnitPlan& unit : plan.units) {
    int64_t numel = 0;
    for (const BufferPlan& buffer : unit.buffers) numel += buffer.numel;
    texts.push_back(unit.name + " " + count_text(numel));
  }
  return test::joined(texts, " | ");
}

std::string automatic(torch::nn::Module& model) { return render(plan_fsdp(model, {}, 0, 2), sizes); }

std::string by_size(torch::nn::Module& model, int64_t min_numel) {
  FsdpOptions options;
  options.unit_policy = UnitPolicy::by_size(min_numel);
  return render(plan_fsdp(model, {}, 0, 2, options), test::units_text);
}

TEST_CASE("units: automatic parts a large GPT's beginning from its end", "[plan][units]") {
  CHECK(automatic(*gpt({.dim = 768, .vocabulary = 50257, .context = 1024, .layers = 3})) ==
        "token..position 39,383,808 | blocks.0 7,087,872 | blocks.1 7,087,872 | blocks.2 7,087,872 | norm..head 38,598,912");
}

TEST_CASE("units: automatic joins the last norm of a GPT with a tied head to the last block", "[plan][units]") {
  CHECK(automatic(*gpt({.dim = 768, .vocabulary = 50257, .context = 1024, .layers = 2, .tied = true})) ==
        "token..position 39,383,808 | blocks.0 7,087,872 | blocks.1 7,089,408");
}

TEST_CASE("units: automatic makes no tiny unit of a small vocabulary", "[plan][units]") {
  // tools/quickstart: token and position together have less than 1/64 of the model, norm and head even less.
  CHECK(automatic(*gpt({.dim = 256, .vocabulary = 96, .context = 64, .layers = 4})) ==
        "blocks.0 830,720 | blocks.1 789,760 | blocks.2 789,760 | blocks.3 814,848");
  // 58,880 and 27,136 of 3,245,056: more than 1/64 the first, less the second.
  CHECK(automatic(*gpt({.dim = 256, .vocabulary = 104, .context = 126, .layers = 4})) ==
        "token..position 58,880 | blocks.0 789,760 | blocks.1 789,760 | blocks.2 789,760 | blocks.3 816,896");
}

TEST_CASE("units: automatic keeps a small rest together", "[plan][units]") {
  CHECK(automatic(*gpt({.dim = 64, .vocabulary = 96, .context = 64, .layers = 2})) ==
        "<root> 16,512 | blocks.0 49,984 | blocks.1 49,984");
}

TEST_CASE("units: automatic puts blocks that are too small for a gather together", "[plan][units]") {
  Bag model;
  for (int i = 0; i < 100; ++i) model.register_module("layer" + std::to_string(i), linear(200, 200));  // 40,200 each
  CHECK(automatic(model) == "layer0..layer26 1,085,400 | layer27..layer53 1,085,400 | layer54..layer99 1,849,200");
}

TEST_CASE("units: automatic makes no unit of two norms that repeat each other inside a lone block", "[plan][units]") {
  CHECK(automatic(*gpt({.dim = 768, .vocabulary = 50257, .context = 1024, .layers = 1})) ==
        "token 38,597,376 | position..blocks.0.qkv 2,561,280 | blocks.0.out..blocks.0.up 2,952,960 | blocks.0.down 2,360,064 | "
        "norm..head 38,598,912");
}

TEST_CASE("units: automatic cuts a model without repetition by size, between modules", "[plan][units]") {
  Bag model;
  model.register_module("stem", linear(1000, 1000));  // 1,001,000: less than a piece
  model.register_module("wide", linear(1000, 3000));  // 3,003,000
  model.register_module("deep", linear(3000, 2000));  // 6,002,000
  model.register_module("head", linear(2000, 10));    // 20,010: a remainder
  CHECK(automatic(model) == "stem..wide 4,004,000 | deep..head 6,022,010");
}

TEST_CASE("units: by_size closes a unit at its number of elements, and joins what is left over", "[plan][units]") {
  Bag model({{"a", {6}}, {"b", {6}}, {"c", {6}}, {"d", {6}}, {"e", {6}}});
  CHECK(by_size(model, 1) == "a: a | b: b | c: c | d: d | e: e");
  CHECK(by_size(model, 6) == "a: a | b: b | c: c | d: d | e: e");
  CHECK(by_size(model, 7) == "a..b: a b | c..e: c d e");
  CHECK(by_size(model, 12) == "a..b: a b | c..e: c d e");
  CHECK(by_size(model, 24) == "<root>: a b c d e");
  CHECK(by_size(model, 1000) == "<root>: a b c d e");
}

TEST_CASE("units: by_size leaves a module's small parameters with its large one", "[plan][units]") {
  Bag model({{"own", {4}}});
  model.register_module("first", linear(9, 10));    // 90 and 10: a ninth
  model.register_module("second", linear(7, 100));  // 700 and 100: a seventh
  CHECK(by_size(model, 50) == "own..first: own first.weight first.bias | second.weight: second.weight | second.bias: second.bias");
  CHECK(by_size(model, 101) == "own..first: own first.weight first.bias | second: second.weight second.bias");
}

TEST_CASE("units: by_size never puts two models into one unit, and names what is whole", "[plan][units]") {
  Bag generator, critic({{"w", {3}}, {"v", {3}}});
  generator.register_module("first", linear(2, 2));
  generator.register_module("second", linear(2, 2));
  FsdpOptions options;
  options.unit_policy = UnitPolicy::by_size(6);
  CHECK(render(plan_fsdp({{"generator", &generator}, {"critic", &critic}}, {}, 0, 2, options), test::units_text) ==
        "generator.first: generator.first.weight generator.first.bias | generator.second: generator.second.weight "
        "generator.second.bias | critic: critic.w critic.v");
}

TEST_CASE("units: a model that shares all of its parameters with one before it has no unit", "[plan][units]") {
  Bag first({{"w", {3}}}), second;
  second.register_parameter("w", first["w"]);
  for (const auto& policy : {UnitPolicy::automatic(), UnitPolicy::by_size(2), UnitPolicy::whole_model()}) {
    FsdpOptions options;
    options.unit_policy = policy;
    CHECK(render(plan_fsdp({{"first", &first}, {"second", &second}}, {}, 0, 2, options), test::units_text) == "first: first.w");
  }
}

}  // namespace
}  // namespace rebind::plan
