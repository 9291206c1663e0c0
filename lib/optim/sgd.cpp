#include <typeinfo>

#include <absl/strings/str_cat.h>
#include <torch/optim/sgd.h>

#include "lib/base/error.h"
#include "lib/optim/adapters.h"
#include "lib/optim/exact_text.h"

namespace rebind::optim {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

// State: "momentum_buffer" once stepped with a momentum, no state at all without one.
class SgdAdapter final : public Adapter {
 public:
  std::string name() const override { return "SGD"; }

  bool knows(const OptimizerOptions& options) const override { return typeid(options) == typeid(SGDOptions); }
  bool knows(const OptimizerParamState& state) const override { return typeid(state) == typeid(SGDParamState); }

  std::string options_text(const OptimizerOptions& options) const override {
    const auto& sgd = static_cast<const SGDOptions&>(options);
    return absl::StrCat("lr=", exact_text(sgd.lr()), " momentum=", exact_text(sgd.momentum()),
                        " dampening=", exact_text(sgd.dampening()), " weight_decay=", exact_text(sgd.weight_decay()),
                        " nesterov=", sgd.nesterov() ? 1 : 0);
  }

  int state_tensors(const OptimizerOptions& options) const override {
    return static_cast<const SGDOptions&>(options).momentum() != 0 ? 1 : 0;
  }

  StateParts take_apart(const OptimizerParamState& state) const override {
    StateParts parts;
    const at::Tensor& buffer = static_cast<const SGDParamState&>(state).momentum_buffer();
    if (buffer.defined()) parts.tensors.emplace_back("momentum_buffer", buffer);
    return parts;
  }

  std::unique_ptr<OptimizerParamState> put_together(const StateParts& parts) const override {
    auto state = std::make_unique<SGDParamState>();
    for (const auto& [key, tensor] : parts.tensors) {
      if (key != "momentum_buffer") throw_error({}, "SGD state has no tensor '" + key + "'", "");
      state->momentum_buffer(tensor);
    }
    for (const auto& [key, value] : parts.scalars) throw_error({}, "SGD state has no scalar '" + key + "'", "");
    return state;
  }
};

}  // namespace

const Adapter& sgd_adapter() {
  static const SgdAdapter adapter;
  return adapter;
}

}  // namespace rebind::optim
