// A convolutional net and a language model of LSTMs, with each optimizer, trained sharded and in one process: equal bit for bit,
// prepared before the first step and in mid-training.
#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/training.h"

namespace rebind::test {
namespace {

using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::RMSpropOptions;
using torch::optim::SGDOptions;

// Two stages of equal blocks (conv, norm), weights in channels_last, a frozen first convolution.
//   input [n, 5] -> image [n, 3, 6, 6] -> [n, 8, 6, 6] -> blocks -> pooled [n, 8] -> [n, 3]
struct ConvNet : torch::nn::Module {
  ConvNet() {
    namespace nn = torch::nn;
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
    for (int i = 0; i < 2; ++i) {
      auto block = register_module("block" + std::to_string(i), std::make_shared<nn::Module>());
      convs.push_back(block->register_module("conv", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1).bias(false))));
      norms.push_back(block->register_module("norm", nn::BatchNorm2d(8)));
    }
    head = register_module("head", nn::Linear(8, 3));
    stem->weight.set_requires_grad(false);
    for (auto& conv : convs) conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor row =
        at::cat({input, input.sin(), input.cos(), input.pow(2), input.abs(), input * 2, input * 3}, 1);  // [n, 35]
    const at::Tensor image = at::cat({row, row.roll(1, 1), row.roll(2, 1), input.narrow(1, 0, 3)}, 1).view({-1, 3, 6, 6});
    at::Tensor x = at::relu(stem(image.contiguous(at::MemoryFormat::ChannelsLast)));
    for (size_t i = 0; i < convs.size(); ++i) x = x + at::relu(norms[i](convs[i](x)));
    return head(x.mean({2, 3}));
  }
  torch::nn::Conv2d stem{nullptr};
  std::vector<torch::nn::Conv2d> convs;
  std::vector<torch::nn::BatchNorm2d> norms;
  torch::nn::Linear head{nullptr};
};

// Embedding [11, 6] -> two LSTM layers of width 6 -> output layer tied to the embedding.
struct LstmNet : torch::nn::Module {
  LstmNet() {
    namespace nn = torch::nn;
    embedding = register_module("embedding", nn::Embedding(11, 6));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 6).num_layers(2).batch_first(true)));
    bias = register_parameter("bias", at::zeros({11}));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor ids = (input.detach().abs() * 1000).to(at::kLong).remainder(11);
    const at::Tensor hidden = std::get<0>(lstm(embedding(ids)));  // [n, 5, 6]
    return at::linear(hidden, embedding->weight, bias).mean(1).narrow(1, 2, 3);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LSTM lstm{nullptr};
  at::Tensor bias;
};

// Weights decay, what has one dimension does not.
template <class Optimizer, class Options>
std::shared_ptr<torch::optim::Optimizer> two_groups(torch::nn::Module& model, const Options& options) {
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& parameter : model.parameters()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(options));
  auto plain = std::make_unique<Options>(options);
  plain->weight_decay(0);
  groups.emplace_back(vectors, std::move(plain));
  return std::make_shared<Optimizer>(groups, options);
}

using MakeOptimizer = std::function<std::shared_ptr<torch::optim::Optimizer>(torch::nn::Module&)>;

const std::vector<std::pair<const char*, MakeOptimizer>>& optimizers() {
  static const std::vector<std::pair<const char*, MakeOptimizer>> all = {
      {"SGD",
       [](auto& m) { return two_groups<torch::optim::SGD>(m, SGDOptions(0.05).momentum(0.9).weight_decay(0.01).nesterov(true)); }},
      {"Adam", [](auto& m) { return two_groups<torch::optim::Adam>(m, AdamOptions(1e-2).weight_decay(0.01).amsgrad(true)); }},
      {"AdamW", [](auto& m) { return two_groups<torch::optim::AdamW>(m, AdamWOptions(1e-2).weight_decay(0.1)); }},
      {"Adagrad",
       [](auto& m) {
         return two_groups<torch::optim::Adagrad>(m, AdagradOptions(0.05).lr_decay(0.1).initial_accumulator_value(0.1));
       }},
      {"RMSprop", [](auto& m) { return two_groups<torch::optim::RMSprop>(m, RMSpropOptions(1e-2).momentum(0.9).centered(true)); }}};
  return all;
}

template <class Model>
void expect_parity() {
  for (const auto& [name, make_optimizer] : optimizers()) {
    const auto make = [&make_optimizer = make_optimizer]() -> Setup {
      auto model = std::make_shared<Model>();
      randomize(*model, 1);
      return {model, {make_optimizer(*model)}, [model](const at::Tensor& input) { return model->forward(input); }};
    };
    for (int world_size : {1, 2, 3}) {
      Program program{.make = make, .steps = 6};
      const Snapshot expected = reference_w(program, world_size);
      for (int prepare_at : {0, 3}) {
        CAPTURE(name, world_size, prepare_at);
        program.prepare_at = prepare_at;
        run_ranks(world_size, [&](int rank, Group group) {
          Trained trained = train_sharded(program, rank, group);
          expect_same(snapshot(trained.setup, *trained.fsdp), expected);
          expect_sharded(trained.setup, *trained.fsdp);
          // As a plain program again it has the same values, in the same memory orders.
          EXPECT_OK(trained.fsdp->restore());
          expect_same(snapshot(trained.setup), expected);
        });
      }
    }
  }
}

}  // namespace

TEST_CASE("models: a convolutional net with a frozen stem and channels_last weights", "[models][parity]") {
  expect_parity<ConvNet>();
}

TEST_CASE("models: a language model of LSTMs with a tied output layer", "[models][parity]") { expect_parity<LstmNet>(); }

}  // namespace rebind::test
