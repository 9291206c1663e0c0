// A sharded model that is nothing but its parameters, its optimizer, and backwards that give exact gradients or break off.
//
//   Sharded s = sharded(group, {{"a", {4, 4}}, {"b", {16}}});      // ones; SGD with lr 1
//   give(s["a"], at::full({4, 4}, 2.0f));                          // adds to the gradient through a real backward
//   s.sgd->step();
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "test/support/plan_text.h"
#include "test/support/training.h"

namespace rebind::test {

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Sharded {
  std::unique_ptr<Bag> model;
  std::unique_ptr<torch::optim::SGD> sgd;
  std::unique_ptr<Fsdp> fsdp;

  at::Tensor& operator[](const std::string& name) { return (*model)[name]; }
  // This rank's part of the first parameter.
  at::Tensor& shard() { return sgd->param_groups()[0].params()[0]; }
};

inline Sharded sharded(const Group& group, std::initializer_list<std::pair<const char*, std::vector<int64_t>>> shapes,
                       at::ScalarType dtype = at::kFloat) {
  Sharded result{std::make_unique<Bag>(shapes, dtype), nullptr, nullptr};
  result.sgd = std::make_unique<torch::optim::SGD>(result.model->parameters(), 1);
  auto fsdp = prepare_fsdp(*result.model, {result.sgd.get()}, group, one_tensor_each());
  EXPECT_OK(fsdp);
  result.fsdp = *std::move(fsdp);
  return result;
}

// Adds `gradient` to the parameter's gradient.
inline void give(const at::Tensor& parameter, const at::Tensor& gradient) { (parameter * gradient).sum().backward(); }

// The identity; its backward throws. Autograd takes what was made last first: what is made after it still gets its gradients.
struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("an accident in backward");
  }
};

// As give, but the backward then throws before `other` gets a gradient: their unit is left unreduced.
inline void give_and_break(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& other) {
  const at::Tensor broken = Broken::apply(other * 1).sum();
  const at::Tensor loss = (parameter * gradient).sum() + broken;
  EXPECT(contains(EXPECT_THROWS(loss.backward()), "an accident in backward"));
}

}  // namespace rebind::test
