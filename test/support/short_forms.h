// Short forms for tests in which a sharded program meets the rest of its life.
//
//   Setup setup = net_with_momentum();
//   auto fsdp = prepare(*setup.model, setup.pointers(), group);       // throws where prepare_fsdp returns an error
//   loss_on(setup, rank, step).backward();
#pragma once

#include <ATen/Functions.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <vector>

#include "test/support/training.h"

namespace rebind::test {

// A Net with SGD(0.1), momentum 0.9.
inline Setup net_with_momentum() {
  return net_with([](Net& net) {
    return std::vector<std::shared_ptr<torch::optim::Optimizer>>{
        std::make_shared<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9))};
  });
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Of the rows of `rank` in `step`.
inline at::Tensor loss_on(Setup& setup, int rank, int step) {
  auto [input, target] = rows(rank, step, at::kFloat);
  return at::mse_loss(setup.forward(input), target);
}

}  // namespace rebind::test
