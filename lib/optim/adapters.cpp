#include "lib/optim/adapters.h"

#include <typeinfo>

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace rebind::optim {

const Adapter* adapter_of(const torch::optim::Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(torch::optim::SGD)) return &sgd_adapter();
  if (type == typeid(torch::optim::Adam)) return &adam_adapter();
  if (type == typeid(torch::optim::AdamW)) return &adamw_adapter();
  if (type == typeid(torch::optim::Adagrad)) return &adagrad_adapter();
  if (type == typeid(torch::optim::RMSprop)) return &rmsprop_adapter();
  return nullptr;
}

std::string type_name(const torch::optim::Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

}  // namespace rebind::optim
