#include <typeinfo>

#include <absl/strings/str_cat.h>
#include <torch/optim/rmsprop.h>

#include "lib/base/error.h"
#include "lib/optim/adapters.h"
#include "lib/optim/exact_text.h"

namespace rebind::optim {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using torch::optim::RMSpropOptions;
using torch::optim::RMSpropParamState;

// State once stepped: "square_avg", with a momentum "momentum_buffer", when centered "grad_avg", and the scalar "step".
class RmspropAdapter final : public Adapter {
 public:
  std::string name() const override { return "RMSprop"; }

  bool knows(const OptimizerOptions& options) const override { return typeid(options) == typeid(RMSpropOptions); }
  bool knows(const OptimizerParamState& state) const override { return typeid(state) == typeid(RMSpropParamState); }

  std::string options_text(const OptimizerOptions& options) const override {
    const auto& rmsprop = static_cast<const RMSpropOptions&>(options);
    return absl::StrCat("lr=", exact_text(rmsprop.lr()), " alpha=", exact_text(rmsprop.alpha()), " eps=", exact_text(rmsprop.eps()),
                        " weight_decay=", exact_text(rmsprop.weight_decay()), " momentum=", exact_text(rmsprop.momentum()),
                        " centered=", rmsprop.centered() ? 1 : 0);
  }

  int state_tensors(const OptimizerOptions& options) const override {
    const auto& rmsprop = static_cast<const RMSpropOptions&>(options);
    return 1 + (rmsprop.momentum() > 0 ? 1 : 0) + (rmsprop.centered() ? 1 : 0);
  }

  StateParts take_apart(const OptimizerParamState& state) const override {
    const auto& rmsprop = static_cast<const RMSpropParamState&>(state);
    StateParts parts;
    const auto add = [&](const char* key, const at::Tensor& tensor) {
      if (tensor.defined()) parts.tensors.emplace_back(key, tensor);
    };
    add("square_avg", rmsprop.square_avg());
    add("momentum_buffer", rmsprop.momentum_buffer());
    add("grad_avg", rmsprop.grad_avg());
    parts.scalars.emplace_back("step", rmsprop.step());
    return parts;
  }

  std::unique_ptr<OptimizerParamState> put_together(const StateParts& parts) const override {
    auto state = std::make_unique<RMSpropParamState>();
    for (const auto& [key, tensor] : parts.tensors) {
      if (key == "square_avg") {
        state->square_avg(tensor);
      } else if (key == "momentum_buffer") {
        state->momentum_buffer(tensor);
      } else if (key == "grad_avg") {
        state->grad_avg(tensor);
      } else {
        throw_error({}, "RMSprop state has no tensor '" + key + "'", "");
      }
    }
    for (const auto& [key, value] : parts.scalars) {
      if (key != "step") throw_error({}, "RMSprop state has no scalar '" + key + "'", "");
      state->step(value);
    }
    return state;
  }
};

}  // namespace

const Adapter& rmsprop_adapter() {
  static const RmspropAdapter adapter;
  return adapter;
}

}  // namespace rebind::optim
