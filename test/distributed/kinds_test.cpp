// Parameters of every kind, sharded: the failures A5, A6, C1, C2, C4, E2, E3, E5, E6 of other systems, each with the value that is
// right.
#include <ATen/Functions.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/short_forms.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;

// Equal to one process at every world size, prepared at `prepare_at`, units one and several.
void expect_parity(const std::function<Setup()>& make, int steps, int prepare_at,
                   const std::function<void(Trained&)>& also = nullptr) {
  for (int world_size : {1, 2, 3}) {
    for (bool several : {false, true}) {
      CAPTURE(world_size, several);
      Program program{.make = make, .steps = steps, .prepare_at = prepare_at};
      program.options.unit_policy = several ? UnitPolicy::by_size(1) : UnitPolicy::whole_model();
      const Snapshot expected = reference_w(program, world_size);
      run_ranks(world_size, [&](int rank, Group group) {
        Trained trained = train_sharded(program, rank, group);
        expect_same(snapshot(trained.setup, *trained.fsdp), expected);
        expect_sharded(trained.setup, *trained.fsdp);
        if (also) also(trained);
      });
    }
  }
}

std::string names_of(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) names.push_back(item.key());
  return joined(names, " ");
}

// Five indices below 7 from five random numbers.
at::Tensor indices_of(const at::Tensor& input) { return (input.detach().abs() * 1000).to(at::kLong).remainder(7); }

std::vector<at::Tensor> without_duplicates(const torch::nn::Module& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : model.parameters()) {
    if (std::none_of(result.begin(), result.end(), [&](const at::Tensor& other) { return other.is_same(parameter); })) {
      result.push_back(parameter);
    }
  }
  return result;
}

// The output layer uses the embedding's tensor.
struct TiedNet : torch::nn::Module {
  TiedNet() {
    embedding = register_module("embedding", torch::nn::Embedding(7, 4));
    output = register_module("output", std::make_shared<Bag>());
    output->register_parameter("weight", embedding->weight);
  }
  at::Tensor forward(const at::Tensor& input) {
    return at::linear(embedding(indices_of(input)).mean(1), (*output)["weight"]).narrow(1, 0, 3);
  }
  torch::nn::Embedding embedding{nullptr};
  std::shared_ptr<Bag> output;
};

// One layer under two names, used twice.
struct SharedLayer : torch::nn::Module {
  SharedLayer() {
    first = register_module("first", torch::nn::Linear(5, 5));
    auto inner = register_module("inner", std::make_shared<Bag>());
    inner->register_module("again", first.ptr());
    head = register_module("head", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& input) { return head(first(at::tanh(first(input)))); }
  torch::nn::Linear first{nullptr}, head{nullptr};
};

// A frozen layer with a trainable change of low rank.
struct LoraNet : torch::nn::Module {
  LoraNet() {
    layer = register_module("layer", torch::nn::Linear(torch::nn::LinearOptions(5, 6).bias(false)));
    a = register_parameter("a", at::ones({2, 5}));
    b = register_parameter("b", at::ones({6, 2}));
    head = register_parameter("head", at::ones({3, 6}), /*requires_grad=*/false);
    layer->weight.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& input) {
    return at::linear(at::tanh(layer(input) + at::linear(at::linear(input, a), b)), head);
  }
  torch::nn::Linear layer{nullptr};
  at::Tensor a, b, head;
};

// fp32 norm, bf16 layer, fp64 head.
struct MixedNet : torch::nn::Module {
  MixedNet() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
    middle = register_module("middle", torch::nn::Linear(5, 6));
    head = register_module("head", torch::nn::Linear(6, 3));
    middle->to(at::kBFloat16);
    head->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& input) {
    return head(at::tanh(middle(norm(input).to(at::kBFloat16))).to(at::kDouble)).to(at::kFloat);
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear middle{nullptr}, head{nullptr};
};

// A channels_last convolution and a layer whose weight is a transposed matrix.
struct StridedNet : torch::nn::Module {
  StridedNet() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 3, 2)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    turned = register_parameter("turned", at::ones({12, 3}).t());
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor image = at::cat({input, input.cos(), input.sin(), input.pow(2)}, 1).narrow(1, 0, 18).reshape({-1, 2, 3, 3});
    return at::linear(conv(image).flatten(1), turned);
  }
  torch::nn::Conv2d conv{nullptr};
  at::Tensor turned;
};

template <class Model, class Optimizer, class Options>
std::function<Setup()> made(const Options& options) {
  return [options]() -> Setup {
    auto model = std::make_shared<Model>();
    randomize(*model, 1);
    return {model, {std::make_shared<Optimizer>(without_duplicates(*model), options)}, [model](const at::Tensor& input) {
              return model->forward(input);
            }};
  };
}

}  // namespace

TEST_CASE("A5: a child under two names inside nested modules keeps all names", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      SharedLayer model;
      SGD sgd(without_duplicates(model), /*lr=*/0.1);
      const std::string before = names_of(model);
      EXPECT_EQ(before, "first.weight first.bias inner.again.weight inner.again.bias head.weight head.bias");
      auto fsdp = prepare(model, {&sgd}, group);
      EXPECT_EQ(names_of(model), before);
      EXPECT_EQ(census_text(fsdp->plan()),
                "first.weight=inner.again.weight 0.0[0]  first.bias=inner.again.bias 0.0[1]  head.weight 0.0[2]  head.bias 0.0[3]");
      EXPECT(model.named_parameters()["inner.again.weight"].is_same(model.first->weight));
    });
  }
}

TEST_CASE("A6: two parameters without elements are two; two views of one storage are refused, both named", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"w", {3}}});
      model.register_parameter("first", at::zeros({0}));
      model.register_parameter("second", at::zeros({0}));
      SGD sgd(model.parameters(), /*lr=*/1);
      FsdpOptions options;
      options.coalesce = false;  // one entry a parameter
      auto fsdp = prepare(model, {&sgd}, group, options);
      EXPECT_EQ(sgd.param_groups()[0].params().size(), 3u);
      (model["w"].sum() + model["first"].sum() + model["second"].sum()).backward();
      sgd.step();
      EXPECT_OK(fsdp->restore());
      EXPECT(at::equal(model["w"], at::zeros({3})));
      EXPECT_EQ(model["first"].sizes(), at::IntArrayRef({0}));
      EXPECT(!model["first"].is_same(model["second"]));

      Bag overlapping;
      const at::Tensor base = at::ones({6});
      overlapping.register_parameter("b1", base.slice(0, 0, 4));
      overlapping.register_parameter("b2", base.slice(0, 2, 6));
      SGD other(overlapping.parameters(), 0.1);
      const auto refused = prepare_fsdp(overlapping, {&other}, group);
      EXPECT_EQ(refused.status().ToString(),
                "UNIMPLEMENTED: prepare_fsdp, rank 0: parameter 'b2': it shares its storage with parameter 'b1'. "
                "Give each its own memory (clone()), or register one and the same tensor under both names.");
    });
  }
}

TEST_CASE("C1: an embedding tied to the output layer, prepared in mid-training, gets both gradients", "[cases][kinds]") {
  expect_parity(made<TiedNet, Adam>(AdamOptions(1e-2)), 8, 4, [](Trained& trained) {
    auto& model = static_cast<TiedNet&>(*trained.setup.model);
    EXPECT((*model.output)["weight"].is_same(model.embedding->weight));
    EXPECT_OK(trained.fsdp->restore());
    EXPECT((*model.output)["weight"].is_same(model.embedding->weight));
  });
}

TEST_CASE("C2: a shared layer is reduced once a step, with the sum of both uses", "[cases][kinds]") {
  expect_parity(made<SharedLayer, Adam>(AdamOptions(1e-2)), 6, 3);
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      SharedLayer model;
      SGD sgd(without_duplicates(model), 0.1);
      {
        at::NoGradGuard no_grad;
        model.first->weight.copy_(at::eye(5) * 2);
        model.first->bias.zero_();
      }
      FsdpOptions options;
      options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
      auto fsdp = prepare(model, {&sgd}, group, options);
      // y = W (W x + b) + b with x = 1, W = 2: the bias's gradient is 1 + 2, the weight's 2 from outside and 2 from inside.
      model.first(model.first(at::ones({1, 5}))).sum().backward();
      EXPECT_EQ(fsdp->stats().reduce_scatters, 1);
      EXPECT(at::equal(*fsdp->full_gradient("inner.again.bias"), at::full({5}, 3.0f)));
      EXPECT(at::equal(*fsdp->full_gradient("first.weight"), at::full({5, 5}, 4.0f)));
    });
  }
}

TEST_CASE("C4: frozen weights stay to the bit and have no gradient memory, what is trained is right", "[cases][kinds]") {
  const auto only_trainable = []() -> Setup {
    auto model = std::make_shared<LoraNet>();
    randomize(*model, 1);
    return {model,
            {std::make_shared<AdamW>(std::vector<at::Tensor>{model->a, model->b}, AdamWOptions(1e-2).weight_decay(0.1))},
            [model](const at::Tensor& input) { return model->forward(input); }};
  };
  const auto everything = made<LoraNet, AdamW>(AdamWOptions(1e-2).weight_decay(0.1));  // the frozen ones are in the group, too
  LoraNet untouched;
  randomize(untouched, 1);
  for (const auto& make : {std::function<Setup()>(only_trainable), everything}) {
    expect_parity(make, 5, 2, [&](Trained& trained) {
      auto& model = static_cast<LoraNet&>(*trained.setup.model);
      expect_same("layer.weight", *trained.fsdp->full_parameter("layer.weight"), untouched.layer->weight.detach());
      expect_same("head", *trained.fsdp->full_parameter("head"), untouched.head.detach());
      EXPECT(!model.layer->weight.requires_grad() && !model.layer->weight.grad().defined());
      // a 10 and b 12 elements are reduced, the frozen 30 and 18 are not.
      const int64_t world_size = trained.fsdp->plan().world_size;
      int64_t trainable = 0;
      for (const UnitPlan& unit : trained.fsdp->plan().units) {
        for (const BufferPlan& buffer : unit.buffers) trainable += buffer.requires_grad ? buffer.padded_numel * 4 : 0;
      }
      EXPECT_EQ(trained.fsdp->plan().memory.gradient_bytes, trainable / world_size);
      trained.fsdp->reset_stats();
      model.forward(at::ones({2, 5})).sum().backward();
      EXPECT_EQ(trained.fsdp->stats().reduced_bytes, world_size == 1 ? 0 : trainable);
      for (auto& optimizer : trained.setup.optimizers) optimizer->zero_grad();
      EXPECT_OK(trained.fsdp->restore());
      EXPECT(!model.layer->weight.requires_grad() && model.a.requires_grad());
      expect_same("layer.weight", model.layer->weight.detach(), untouched.layer->weight.detach());
    });
  }
}

TEST_CASE("E2: several dtypes in one unit, each trained in its own", "[cases][kinds]") {
  // A power of two as learning rate: LibTorch's add_(x, alpha) on bfloat16 rounds alpha * x for the last elements of a tensor, which
  // its vectors do not cover, and not for the others.
  expect_parity(made<MixedNet, SGD>(torch::optim::SGDOptions(0.125).momentum(0.9)), 4, 2, [](Trained& trained) {
    auto& model = static_cast<MixedNet&>(*trained.setup.model);
    const auto check = [&] {
      EXPECT_EQ(model.norm->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(model.middle->weight.scalar_type(), at::kBFloat16);
      EXPECT_EQ(model.head->bias.scalar_type(), at::kDouble);
    };
    check();
    EXPECT_OK(trained.fsdp->restore());
    check();
  });
  expect_parity(made<MixedNet, SGD>(torch::optim::SGDOptions(0.125)), 2, 0);
}

TEST_CASE("E3: channels_last and transposed weights are trained in place, and come back as they were", "[cases][kinds]") {
  expect_parity(made<StridedNet, Adam>(AdamOptions(1e-2)), 6, 3, [](Trained& trained) {
    auto& model = static_cast<StridedNet&>(*trained.setup.model);
    const auto check = [&] {
      EXPECT_EQ(model.conv->weight.strides(), at::IntArrayRef({8, 1, 4, 2}));
      EXPECT_EQ(model.turned.strides(), at::IntArrayRef({1, 3}));
    };
    check();
    const at::Tensor conv = *trained.fsdp->full_parameter("conv.weight");
    EXPECT_OK(trained.fsdp->restore());
    check();
    expect_same("conv.weight", model.conv->weight.detach(), conv);
    const auto& state = *trained.setup.optimizers[0]->state().at(model.turned.unsafeGetTensorImpl());
    EXPECT_EQ(static_cast<const torch::optim::AdamParamState&>(state).exp_avg().sizes(), at::IntArrayRef({3, 12}));
  });
}

TEST_CASE("E3: state and gradients of another memory order than their parameter's are brought into it", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"w", {4, 6}}});
      Adam adam(model.parameters(), AdamOptions(1e-2));
      auto made_state = std::make_unique<torch::optim::AdamParamState>();
      const at::Tensor exp_avg = random_tensor({6, 4}, 3).t(), exp_avg_sq = random_tensor({4, 6}, 4).abs();
      made_state->step(2).exp_avg(exp_avg.clone()).exp_avg_sq(exp_avg_sq.clone());
      adam.state()[model["w"].unsafeGetTensorImpl()] = std::move(made_state);
      const at::Tensor gradient = random_tensor({6, 4}, 5).t();
      model["w"].mutable_grad() = gradient.clone();
      auto fsdp = prepare(model, {&adam}, group);
      EXPECT(at::equal(*fsdp->full_state(adam, "w", "exp_avg"), exp_avg));
      EXPECT(at::equal(*fsdp->full_state(adam, "w", "exp_avg_sq"), exp_avg_sq));
      EXPECT(at::equal(*fsdp->full_gradient("w"), gradient));
      EXPECT(at::equal(model["w"].grad() * 1, gradient));
    });
  }
}

TEST_CASE("E5: ten elements on four ranks are gathered whole", "[cases][kinds]") {
  run_ranks(4, [](int rank, Group group) {
    Bag model;
    model.register_parameter("w", at::arange(10, at::kFloat));
    SGD sgd(model.parameters(), 0.5);
    auto fsdp = prepare(model, {&sgd}, group);
    EXPECT_EQ(sgd.param_groups()[0].params()[0].numel(), rank == 0 ? 8 : rank == 1 ? 2 : 0);
    EXPECT(at::equal(model["w"] * 1, at::arange(10, at::kFloat)));
    (model["w"] * (rank + 1)).sum().backward();  // mean 2.5
    sgd.step();
    EXPECT(at::equal(*fsdp->full_parameter("w"), at::arange(10, at::kFloat) - 1.25f));
  });
}

TEST_CASE("E6: integer, byte and bool parameters keep every bit, in forward, whole and restored", "[cases][kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      const at::Tensor bytes = at::tensor(std::vector<int64_t>{0, 127, 128, 255}, at::kLong).to(at::kByte);
      const at::Tensor large = at::tensor(std::vector<int64_t>{INT64_MAX, INT64_MIN, (int64_t{1} << 53) + 1}, at::kLong);
      const at::Tensor flags = (at::arange(21) % 3 == 0).view({3, 7});
      const at::Tensor small = at::arange(-128, 128, at::kLong).to(at::kChar).view({16, 16}).t();
      Bag model;
      model.register_parameter("bytes", bytes.clone(), /*requires_grad=*/false);
      model.register_parameter("large", large.clone(), false);
      model.register_parameter("flags", flags.clone(), false);
      model.register_parameter("small", small.clone(), false);
      model.register_parameter("w", at::ones({4}));
      SGD sgd(model.parameters(), 0.1);  // holds them all; what has no gradient is passed over
      auto fsdp = prepare(model, {&sgd}, group);
      poison_padding(*fsdp, model);
      const auto check = [&](const std::function<at::Tensor(const std::string&)>& get) {
        expect_same("bytes", get("bytes"), bytes);
        expect_same("large", get("large"), large);
        expect_same("flags", get("flags"), flags);
        expect_same("small", get("small"), small);
      };
      for (int step = 0; step < 2; ++step) {
        check([&](const std::string& name) { return model[name].clone(); });
        (model["w"] * model["bytes"]).sum().backward();
        EXPECT(at::equal(*fsdp->full_gradient("w"), bytes.to(at::kFloat)));
        sgd.step();
        sgd.zero_grad();
      }
      check([&](const std::string& name) { return *fsdp->full_parameter(name); });
      EXPECT_EQ(model["large"].index({1}).item<int64_t>(), INT64_MIN);
      EXPECT_OK(fsdp->restore());
      check([&](const std::string& name) { return model[name]; });
      EXPECT(at::equal(model["w"], at::ones({4}) - at::tensor({0.f, 127.f, 128.f, 255.f}) * 0.1f -
                                       at::tensor({0.f, 127.f, 128.f, 255.f}) * 0.1f));
    });
  }
}

}  // namespace rebind::test
