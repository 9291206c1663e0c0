#include "tools/train_gpt/gpt.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>

namespace train_gpt {

namespace nn = torch::nn;

BlockImpl::BlockImpl(int64_t dim) {
  norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({dim})));
  norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({dim})));
  qkv_ = register_module("qkv", nn::Linear(dim, 3 * dim));
  out_ = register_module("out", nn::Linear(dim, dim));
  up_ = register_module("up", nn::Linear(dim, 4 * dim));
  down_ = register_module("down", nn::Linear(4 * dim, dim));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  const int64_t rows = x.size(0), length = x.size(1), dim = x.size(2), heads = dim / kHeadDim;
  const auto qkv =
      qkv_(norm1_(x)).view({rows, length, 3, heads, kHeadDim}).permute({2, 0, 3, 1, 4}).unbind();  // [rows, heads, length, 64]
  const at::Tensor mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                            /*is_causal=*/true);
  x = x + out_(mixed.transpose(1, 2).reshape({rows, length, dim}));
  return x + down_(at::gelu(up_(norm2_(x))));
}

GptImpl::GptImpl(const GptOptions& options) {
  token_ = register_module("token", nn::Embedding(options.vocabulary, options.dim));
  position_ = register_module("position", nn::Embedding(options.context, options.dim));
  blocks_ = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < options.layers; ++i) blocks_->push_back(Block(options.dim));
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.dim})));
  head_ = register_module("head", nn::Linear(nn::LinearOptions(options.dim, options.vocabulary).bias(false)));
}

at::Tensor GptImpl::forward(const at::Tensor& ids) {
  at::Tensor x = token_(ids) + position_(at::arange(ids.size(1), at::kLong));
  for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
  return head_(norm_(x));
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets.reshape({-1}));
}

int64_t parameter_count(const GptOptions& options) {
  const int64_t block = 12 * options.dim * options.dim + 13 * options.dim;
  return (2 * options.vocabulary + options.context) * options.dim + options.layers * block + 2 * options.dim;
}

}  // namespace train_gpt
