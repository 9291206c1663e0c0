#include "lib/plan/flat_layout.h"

#include <random>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"

namespace rebind::plan {
namespace {

using test::Bag;
using test::buffers_text;
using test::render;
using test::shards;

FsdpOptions whole_model(LayoutRules rules = {}) {
  FsdpOptions options;
  options.unit_policy = UnitPolicy::whole_model();
  options.layout_rules = rules;
  return options;
}

TEST_CASE("layout: a shard boundary may cut a parameter", "[plan][layout]") {
  // A small unit: slots of 8 elements, shards a multiple of 8, here 16.
  //   flat  0                       16        21  24  27  32
  //         | weight                          |gap|b  |tail|
  //   rank  | 0                     | 1                    |
  torch::nn::Linear model(7, 3);  // weight 21, bias 3
  torch::optim::SGD sgd(model->parameters(), /*lr=*/0.1);

  CHECK(shards(*model, sgd, /*rank=*/0, /*world_size=*/2) == "weight [0,16)  bias -");
  CHECK(shards(*model, sgd, /*rank=*/1, /*world_size=*/2) == "weight [16,21)  bias [0,3)");
  CHECK(render(plan_fsdp(*model, {&sgd}, 0, 2), buffers_text) == "<root>: weight@0 bias@24 of 32");
}

TEST_CASE("layout: with slot 1 and quantum 1 parameters are packed and only the tail is padded", "[plan][layout]") {
  //   flat  0         5   7           13  14 15
  //         | a       | b | c         |   tail |
  //   rank  | 0       | 1       | 2            |
  Bag model({{"a", {5}}, {"b", {2}}, {"c", {2, 3}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  const FsdpOptions options = whole_model({1, 1});

  CHECK(render(plan_fsdp(model, {&sgd}, 0, 3, options), buffers_text) == "model: a@0 b@5 c@7 of 15");
  CHECK(shards(model, sgd, 0, 3, options) == "a [0,5)  b -  c -");
  CHECK(shards(model, sgd, 1, 3, options) == "a -  b [0,2)  c [0,3)");
  CHECK(shards(model, sgd, 2, 3, options) == "a -  b -  c [3,6)");
}

TEST_CASE("layout: a parameter may span every rank", "[plan][layout]") {
  //   flat  0       8       16      24    30 32
  //         | a                           |tail|
  //   rank  | 0     | 1     | 2     | 3        |
  Bag model({{"a", {30}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(shards(model, sgd, 0, 4) == "a [0,8)");
  CHECK(shards(model, sgd, 1, 4) == "a [8,16)");
  CHECK(shards(model, sgd, 2, 4) == "a [16,24)");
  CHECK(shards(model, sgd, 3, 4) == "a [24,30)");
}

TEST_CASE("layout: a rank beyond the last element owns nothing", "[plan][layout]") {
  // One element, three ranks: S = 8, all of it on rank 0.
  Bag model({{"bias", {1}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(shards(model, sgd, 0, 3) == "bias [0,1)");
  CHECK(shards(model, sgd, 1, 3) == "bias -");
  CHECK(shards(model, sgd, 2, 3) == "bias -");
  CHECK(render(plan_fsdp(model, {&sgd}, 2, 3), buffers_text) == "<root>: bias@0 of 24");
}

TEST_CASE("layout: more ranks than elements, packed to the element, give one to each of the first", "[plan][layout]") {
  Bag model({{"a", {2}}, {"b", {}}});  // b is 0-dim: one element
  torch::optim::SGD sgd(model.parameters(), 0.1);
  const FsdpOptions options = whole_model({1, 1});
  CHECK(shards(model, sgd, 0, 5, options) == "a [0,1)  b -");
  CHECK(shards(model, sgd, 1, 5, options) == "a [1,2)  b -");
  CHECK(shards(model, sgd, 2, 5, options) == "a -  b [0,1)");
  CHECK(shards(model, sgd, 3, 5, options) == "a -  b -");
  CHECK(shards(model, sgd, 4, 5, options) == "a -  b -");
}

TEST_CASE("layout: a parameter without elements has an empty interval and takes no room", "[plan][layout]") {
  Bag model({{"a", {3}}, {"none", {0, 4}}, {"b", {3}}, {"last", {0}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 1), buffers_text) == "<root>: a@0 none@8 b@8 last@16 of 16");
  CHECK(shards(model, sgd, 0, 1) == "a [0,3)  none -  b [0,3)  last -");
}

TEST_CASE("layout: a unit without any element has shards of 0 elements", "[plan][layout]") {
  Bag model({{"none", {0}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  CHECK(render(plan_fsdp(model, {&sgd}, 0, 2), buffers_text) == "<root>: none@0 of 0");
  CHECK(shards(model, sgd, 1, 2) == "none -");
}

TEST_CASE("layout: runs follow one another, in the order of their first parameter", "[plan][layout]") {
  Bag model({{"w0", {8}}, {"b0", {8}}, {"w1", {8}}, {"b1", {8}}});
  // Weights are decayed, biases are not.
  torch::optim::Adam adam({torch::optim::OptimizerParamGroup({model["w0"], model["w1"]}),
                           torch::optim::OptimizerParamGroup({model["b0"], model["b1"]})});
  CHECK(render(plan_fsdp(model, {&adam}, 0, 1), buffers_text) == "<root>: w0@0 w1@8 b0@16 b1@24 of 32");
}

TEST_CASE("layout: parameters of another optimizer are another run", "[plan][layout]") {
  Bag model({{"a", {8}}, {"b", {8}}, {"c", {8}}});
  torch::optim::SGD first({model["a"], model["c"]}, 0.1), second({model["b"]}, 0.1);
  CHECK(render(plan_fsdp(model, {&first, &second}, 0, 1), buffers_text) == "<root>: a@0 c@8 b@16 of 24");
}

TEST_CASE("layout: parameters with another step count are another run", "[plan][layout]") {
  Bag model({{"a", {8}}, {"b", {8}}, {"c", {8}}});
  torch::optim::Adam adam(model.parameters());
  model["a"].mutable_grad() = at::ones({8});
  model["c"].mutable_grad() = at::ones({8});
  adam.step();  // a and c have step 1, b has none
  CHECK(render(plan_fsdp(model, {&adam}, 0, 1), buffers_text) == "<root>: a@0 c@8 b@16 of 24");
}

TEST_CASE("layout: a parameter in no optimizer and one in two are runs of their own", "[plan][layout]") {
  Bag model({{"a", {8}}, {"free", {8}}, {"b", {8}}, {"both", {8}}, {"c", {8}}});
  torch::optim::SGD first({model["a"], model["b"], model["both"], model["c"]}, 0.1);
  torch::optim::SGD second({model["both"]}, 0.1);
  CHECK(render(plan_fsdp(model, {&first, &second}, 0, 1), buffers_text) == "<root>: a@0 b@8 c@16 free@24 both@32 of 40");
}

TEST_CASE("layout: rules are {8, 8} below 64 Ki elements a rank and {64, 512} from there", "[plan][layout]") {
  const auto text = [](const LayoutRules& rules) { return std::to_string(rules.slot) + " " + std::to_string(rules.quantum); };
  CHECK(text(layout_rules(0, 1, {})) == "8 8");
  CHECK(text(layout_rules(65535, 1, {})) == "8 8");
  CHECK(text(layout_rules(65536, 1, {})) == "64 512");
  CHECK(text(layout_rules(196607, 3, {})) == "8 8");
  CHECK(text(layout_rules(196608, 3, {})) == "64 512");
  CHECK(text(layout_rules(196608, 3, {2, 6})) == "2 6");
}

TEST_CASE("layout: a large unit is laid out in slots of 64 and shards of a multiple of 512", "[plan][layout]") {
  // 131,073 + 1 elements on two ranks: the second at 64 * 2049, the end 131,137 needs shards of 65,569, which are rounded up to
  // 512 * 129 = 66,048.
  const FlatLayout layout = flat_layout({131073, 1}, 2, layout_rules(131074, 2, {}));
  CHECK(layout.offsets == std::vector<int64_t>{0, 131136});
  CHECK(layout.shard_numel == 66048);
  CHECK(layout.padded_numel == 132096);
}

TEST_CASE("layout: every element belongs to exactly one rank, every offset is aligned, nothing overlaps", "[plan][layout]") {
  std::mt19937 random(20260101);
  const std::vector<LayoutRules> all_rules = {{1, 1}, {1, 3}, {4, 12}, {8, 8}, {64, 512}};
  for (int round = 0; round < 400; ++round) {
    const int world_size = std::uniform_int_distribution(1, 17)(random);
    const LayoutRules rules = all_rules[std::uniform_int_distribution<size_t>(0, all_rules.size() - 1)(random)];
    std::vector<int64_t> numels(std::uniform_int_distribution<size_t>(1, 12)(random));
    for (int64_t& numel : numels)
      numel = std::uniform_int_distribution(0, 3)(random) * std::uniform_int_distribution(0, 41)(random);
    CAPTURE(round, world_size, rules.slot, rules.quantum, numels);

    const FlatLayout layout = flat_layout(numels, world_size, rules);
    REQUIRE(layout.offsets.size() == numels.size());
    REQUIRE(layout.shard_numel % rules.quantum == 0);
    REQUIRE(layout.padded_numel == layout.shard_numel * world_size);
    int64_t end = 0;
    for (size_t p = 0; p < numels.size(); ++p) {
      REQUIRE(layout.offsets[p] % rules.slot == 0);
      REQUIRE(layout.offsets[p] >= end);
      REQUIRE(layout.offsets[p] < end + rules.slot);  // no more than the gap that alignment needs
      end = layout.offsets[p] + numels[p];
      REQUIRE(end <= layout.padded_numel);

      int64_t next = 0;  // of the parameter's elements
      for (int rank = 0; rank < world_size; ++rank) {
        const Interval shard = shard_of(layout.offsets[p], numels[p], layout.shard_numel, rank);
        if (shard == Interval{0, 0}) continue;
        REQUIRE(shard.begin == next);
        REQUIRE(shard.end > shard.begin);
        REQUIRE(layout.offsets[p] + shard.begin >= rank * layout.shard_numel);
        REQUIRE(layout.offsets[p] + shard.end <= (rank + 1) * layout.shard_numel);
        next = shard.end;
      }
      REQUIRE(next == numels[p]);
    }
    REQUIRE(layout.padded_numel - end < rules.quantum * world_size + world_size);
  }
}

}  // namespace
}  // namespace rebind::plan
