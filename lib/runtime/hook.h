// The post-accumulate hook on each model parameter: takes its gradient, and ties the sharding's life to the parameter's.
//
// The hook sits in the parameter's autograd metadata, which survives set_data, Module::to and zero_grad. So the sharding lives
// exactly as long as a parameter of the model does, and a window that was moved away is still noticed in its next backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>

#include "lib/runtime/parameter.h"

namespace rebind::runtime {

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<Sharding> sharding, Parameter& parameter)
      : sharding_(std::move(sharding)), parameter_(&parameter) {}
  // LibTorch has one such hook a tensor: a program that sets its own afterwards takes ours away.
  ~GradientHook() override;

  // The hook on `tensor` if it is one of ours, else null.
  static const GradientHook* of(const at::Tensor& tensor);

  const std::shared_ptr<Sharding>& sharding() const { return sharding_; }
  void operator()(const at::Tensor& window) override;

 private:
  const std::shared_ptr<Sharding> sharding_;
  Parameter* const parameter_;
};

}  // namespace rebind::runtime
