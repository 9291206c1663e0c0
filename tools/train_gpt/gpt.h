// A character GPT, small and ordinary: what a user's model file looks like. It knows nothing of rebind.
//
//   Gpt model({.vocabulary = 96, .layers = 4, .dim = 256, .context = 128});
//   at::Tensor logits = model->forward(ids);      // [rows, length] -> [rows, length, vocabulary]
//
// Modules are made and registered in the order of bench/peers/gpt_peer.py, so that one seed gives one set of initial weights in
// both languages.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace train_gpt {

struct GptOptions {
  int64_t vocabulary = 0;
  int64_t layers = 4;
  int64_t dim = 256;  // a multiple of kHeadDim
  int64_t context = 128;
};
constexpr int64_t kHeadDim = 64;

// x + attention(norm1(x)), then x + mlp(norm2(x)).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t dim);
  at::Tensor forward(at::Tensor x);  // [rows, length, dim]

 private:
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& ids);

 private:
  torch::nn::Embedding token_{nullptr}, position_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Gpt);

// Mean cross entropy of the logits against the targets [rows, length].
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets);

// Of a model with these options.
int64_t parameter_count(const GptOptions& options);

}  // namespace train_gpt
