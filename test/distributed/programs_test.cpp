// Programs of the kinds that users have, trained sharded and in one process: equal bit for bit.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adam.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;

// A randomized model and an Adam that holds each of its parameters once.
template <class Model>
Setup made() {
  auto model = std::make_shared<Model>();
  randomize(*model, 1);
  std::vector<at::Tensor> parameters;
  for (const auto& item : model->named_parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(item.value()); };
    if (std::none_of(parameters.begin(), parameters.end(), same)) parameters.push_back(item.value());
  }
  return {
      model, {std::make_shared<Adam>(parameters, AdamOptions(1e-2))}, [model](const at::Tensor& x) { return model->forward(x); }};
}

UnitPolicy by_child() {
  return UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
}

// At every world size, by every unit policy, before the first step and in mid-training.
void expect_parity(const std::function<Setup()>& make, const std::function<void(Setup&, int)>& before_step = nullptr) {
  const UnitPolicy policies[] = {UnitPolicy::whole_model(), UnitPolicy::automatic(), by_child()};
  for (int world_size : {1, 2, 3}) {
    Program program{.make = make, .steps = 4, .before_step = before_step};
    const Snapshot expected = reference_w(program, world_size);
    for (size_t policy = 0; policy < std::size(policies); ++policy) {
      program.options.unit_policy = policies[policy];
      program.prepare_at = policy == 0 ? 0 : 2;
      CAPTURE(world_size, policy);
      run_ranks(world_size, [&](int rank, Group group) {
        Trained trained = train_sharded(program, rank, group);
        expect_same(snapshot(trained.setup, *trained.fsdp), expected);
        expect_sharded(trained.setup, *trained.fsdp);
      });
    }
  }
}

// Five indices below 7 from five random numbers.
at::Tensor indices_of(const at::Tensor& input) { return (input.detach().abs() * 1000).to(at::kLong).remainder(7); }

struct Recurrent : torch::nn::Module {
  Recurrent() {
    lstm =
        register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(1, 4).num_layers(2).batch_first(true).bidirectional(true)));
    head = register_module("head", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& input) { return head(std::get<0>(lstm(input.unsqueeze(2))).select(1, -1)); }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};

struct Convolutional : torch::nn::Module {
  Convolutional() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, {1, 3})));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    head = register_module("head", torch::nn::Linear(12, 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor features = conv(input.view({-1, 1, 1, 5}));
    seen.push_back(features.detach().clone());
    return head(at::relu(norm(features)).flatten(1));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
  std::vector<at::Tensor> seen;  // what went into `norm`
};

// One tensor is the embedding and, in another module, the output layer.
struct Tied : torch::nn::Module {
  Tied() {
    embedding = register_module("embedding", torch::nn::Embedding(7, 4));
    output = register_module("output", std::make_shared<Bag>());
    output->register_parameter("weight", embedding->weight);
    output->register_parameter("bias", at::zeros({7}));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor hidden = embedding(indices_of(input)).mean(1);
    return at::linear(hidden, (*output)["weight"], (*output)["bias"]).narrow(1, 0, 3);
  }
  torch::nn::Embedding embedding{nullptr};
  std::shared_ptr<Bag> output;
};

// Elements 0, 1 and no dimension at all, in a module with more ordinary ones.
struct Odd : torch::nn::Module {
  Odd() {
    empty = register_parameter("empty", at::ones({0}));
    left = register_parameter("left", at::ones({5, 0}));
    right = register_parameter("right", at::ones({0, 3}));
    scale = register_parameter("scale", at::scalar_tensor(1.5));
    head = register_module("head", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& input) { return head(input) * scale + input.mm(left).mm(right) + empty.sum(); }
  at::Tensor empty, left, right, scale;
  torch::nn::Linear head{nullptr};
};

// 72 layers, 144 parameters: more than one word of bits, of parameters and of units.
struct Deep : torch::nn::Module {
  Deep() {
    for (int i = 0; i < 72; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(i == 0 ? 5 : 3, 3)));
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = layers[0](input);
    for (int i = 1; i < 72; ++i) x = x + at::tanh(layers[i](x)) * 0.1;
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

// Weights used several times, in another order every second step.
struct Reordered : torch::nn::Module {
  Reordered() {
    input_layer = register_module("input", torch::nn::Linear(5, 3));
    left = register_module("left", torch::nn::Linear(3, 3));
    right = register_module("right", torch::nn::Linear(3, 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input_layer(input);
    for (int i = 0; i < 3; ++i) x = step % 2 == 1 ? left(at::tanh(right(x))) : right(at::tanh(left(x)));
    return x + left(x);
  }
  torch::nn::Linear input_layer{nullptr}, left{nullptr}, right{nullptr};
  int step = 0;
};

// A penalty on the gradient of the output by the input: the backward of a backward.
struct Penalized : torch::nn::Module {
  Penalized() {
    first = register_module("first", torch::nn::Linear(5, 6));
    second = register_module("second", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = input.detach().requires_grad_(true);
    const at::Tensor output = second(at::tanh(first(x)));
    const at::Tensor slope = torch::autograd::grad({output.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return output + slope.pow(2).sum();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

// Recomputes `body` in backward, with a backward of its own inside: what activation checkpointing does.
struct Recompute : torch::autograd::Function<Recompute> {
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& /*makes it differentiable*/, const Body* body) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return (*body)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    at::AutoGradMode enabled(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    const auto* body = reinterpret_cast<const Body*>(context->saved_data["body"].toInt());
    (*body)(x).backward(gradients[0]);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

struct Checkpointed : torch::nn::Module {
  Checkpointed() {
    first = register_module("first", torch::nn::Linear(5, 4));
    second = register_module("second", torch::nn::Linear(4, 4));
    third = register_module("third", torch::nn::Linear(4, 3));
    body = [this](const at::Tensor& x) { return at::tanh(second(x)); };
  }
  at::Tensor forward(const at::Tensor& input) {
    return third(Recompute::apply(first(input), at::ones({1}, at::requires_grad()), &body));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  Recompute::Body body;
};

}  // namespace

TEST_CASE("programs: a bidirectional LSTM of two layers", "[programs]") { expect_parity(made<Recurrent>); }
TEST_CASE("programs: a convolution with BatchNorm", "[programs]") { expect_parity(made<Convolutional>); }
TEST_CASE("programs: an embedding tied to the output layer", "[programs]") { expect_parity(made<Tied>); }
TEST_CASE("programs: parameters of no element and of no dimension", "[programs]") { expect_parity(made<Odd>); }
TEST_CASE("programs: weights used several times, in another order every other step", "[programs]") {
  expect_parity(made<Reordered>, [](Setup& setup, int step) { dynamic_cast<Reordered&>(*setup.model).step = step + 1; });
}
TEST_CASE("programs: a penalty on a gradient", "[programs]") { expect_parity(made<Penalized>); }
TEST_CASE("programs: a backward inside backward", "[programs]") { expect_parity(made<Checkpointed>); }

TEST_CASE("programs: 144 parameters in 72 units", "[programs]") {
  for (bool units : {false, true}) {
    Program program{.make = made<Deep>, .steps = 2, .prepare_at = 1};
    program.options.unit_policy = units ? by_child() : UnitPolicy::whole_model();
    const Snapshot expected = reference_w(program, 2);
    run_ranks(2, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      EXPECT_EQ(trained.fsdp->plan().units.size(), size_t{units ? 72u : 1u});
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
    });
  }
}

TEST_CASE("programs: more ranks than elements", "[programs]") {
  struct Small : torch::nn::Module {
    Small() { register_parameter("a", at::ones({1})), register_parameter("b", at::ones({})); }
    at::Tensor forward(const at::Tensor& input) {
      return input.narrow(1, 0, 3) * named_parameters()["a"] + named_parameters()["b"];
    }
  };
  for (bool tight : {false, true}) {
    Program program{.make = made<Small>, .steps = 3, .prepare_at = 1};
    if (tight) program.options.layout_rules = {1, 1};
    for (int world_size : {4, 5}) {
      const Snapshot expected = reference_w(program, world_size);
      run_ranks(world_size, [&](int rank, Group group) {
        Trained trained = train_sharded(program, rank, group);
        expect_same(snapshot(trained.setup, *trained.fsdp), expected);
      });
    }
  }
}

TEST_CASE("programs: BatchNorm's buffers are those of the rank's own rows", "[programs]") {
  run_ranks(2, [](int rank, Group group) {
    Program program{.make = made<Convolutional>, .steps = 3};
    Trained trained = train_sharded(program, rank, group);
    auto& model = dynamic_cast<Convolutional&>(*trained.setup.model);
    torch::nn::BatchNorm2d plain(4);
    for (const at::Tensor& features : model.seen) plain(features);
    for (const auto& item : model.norm->named_buffers()) expect_same(item.key(), item.value(), plain->named_buffers()[item.key()]);
    model.eval();
    const Snapshot values = snapshot(trained.setup, *trained.fsdp);
    auto twin = std::make_shared<Convolutional>();
    {
      at::NoGradGuard no_grad;
      for (auto& item : twin->named_parameters()) item.value().copy_(values.at(item.key()));
      for (auto& item : twin->named_buffers()) item.value().copy_(model.named_buffers()[item.key()]);
    }
    twin->eval();
    at::NoGradGuard no_grad;
    const at::Tensor input = random_tensor({2, 5}, 3);
    expect_same("evaluation", model.forward(input), twin->forward(input));
  });
}

TEST_CASE("programs: hooks on parameters see the rank's whole gradient and may change it", "[programs]") {
  const auto hooked = [](Setup setup) {
    for (at::Tensor& parameter : setup.model->parameters()) {
      parameter.register_hook([sizes = parameter.sizes().vec()](const at::Tensor& gradient) {
        EXPECT_EQ(gradient.sizes().vec(), sizes);
        return gradient.clamp(-0.05, 0.05);
      });
    }
    return setup;
  };
  const Program program{.make = [&] { return hooked(made<Recurrent>()); }, .steps = 4};
  for (int world_size : {1, 2, 3}) {
    const Snapshot expected = reference_w(program, world_size);
    for (bool before : {false, true}) {
      run_ranks(world_size, [&](int rank, Group group) {
        Setup setup = before ? hooked(made<Recurrent>()) : made<Recurrent>();
        auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
        EXPECT_OK(fsdp);
        if (!before) setup = hooked(setup);
        for (int step = 0; step < program.steps; ++step) {
          auto [input, target] = rows(rank, step, at::kFloat);
          at::mse_loss(setup.forward(input), target).backward();
          setup.optimizers[0]->step();
          setup.optimizers[0]->zero_grad();
        }
        expect_same(snapshot(setup, **fsdp), expected);
      });
    }
  }
}

TEST_CASE("programs: optimizer.step(closure)", "[programs]") {
  const Program program{.make = made<Recurrent>, .steps = 4};
  for (int world_size : {1, 2, 3}) {
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Setup setup = program.make();
      auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
      EXPECT_OK(fsdp);
      for (int step = 0; step < program.steps; ++step) {
        auto [input, target] = rows(rank, step, at::kFloat);
        const at::Tensor loss = setup.optimizers[0]->step([&, &input = input, &target = target] {
          setup.optimizers[0]->zero_grad();
          at::Tensor value = at::mse_loss(setup.forward(input), target);
          value.backward();
          return value;
        });
        EXPECT(loss.item<float>() > 0);
      }
      expect_same(snapshot(setup, **fsdp), expected);
    });
  }
}

}  // namespace rebind::test
