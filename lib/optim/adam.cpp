// Adam and AdamW: two types in LibTorch with the same fields, so one body serves both.
#include <tuple>
#include <typeinfo>

#include <absl/strings/str_cat.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "lib/base/error.h"
#include "lib/optim/adapters.h"
#include "lib/optim/exact_text.h"

namespace rebind::optim {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// State: "exp_avg", "exp_avg_sq", with amsgrad "max_exp_avg_sq", and the scalar "step".
template <class Options, class State>
class AdamAdapter final : public Adapter {
 public:
  explicit AdamAdapter(std::string name) : name_(std::move(name)) {}

  std::string name() const override { return name_; }

  bool knows(const OptimizerOptions& options) const override { return typeid(options) == typeid(Options); }
  bool knows(const OptimizerParamState& state) const override { return typeid(state) == typeid(State); }

  std::string options_text(const OptimizerOptions& options) const override {
    const auto& adam = static_cast<const Options&>(options);
    const auto [beta1, beta2] = adam.betas();
    return absl::StrCat("lr=", exact_text(adam.lr()), " betas=(", exact_text(beta1), ", ", exact_text(beta2),
                        ") eps=", exact_text(adam.eps()), " weight_decay=", exact_text(adam.weight_decay()),
                        " amsgrad=", adam.amsgrad() ? 1 : 0);
  }

  int state_tensors(const OptimizerOptions& options) const override {
    return static_cast<const Options&>(options).amsgrad() ? 3 : 2;
  }

  StateParts take_apart(const OptimizerParamState& state) const override {
    const auto& adam = static_cast<const State&>(state);
    StateParts parts;
    const auto add = [&](const char* key, const at::Tensor& tensor) {
      if (tensor.defined()) parts.tensors.emplace_back(key, tensor);
    };
    add("exp_avg", adam.exp_avg());
    add("exp_avg_sq", adam.exp_avg_sq());
    add("max_exp_avg_sq", adam.max_exp_avg_sq());
    parts.scalars.emplace_back("step", adam.step());
    return parts;
  }

  std::unique_ptr<OptimizerParamState> put_together(const StateParts& parts) const override {
    auto state = std::make_unique<State>();
    for (const auto& [key, tensor] : parts.tensors) {
      if (key == "exp_avg") {
        state->exp_avg(tensor);
      } else if (key == "exp_avg_sq") {
        state->exp_avg_sq(tensor);
      } else if (key == "max_exp_avg_sq") {
        state->max_exp_avg_sq(tensor);
      } else {
        throw_error({}, name_ + " state has no tensor '" + key + "'", "");
      }
    }
    for (const auto& [key, value] : parts.scalars) {
      if (key != "step") throw_error({}, name_ + " state has no scalar '" + key + "'", "");
      state->step(value);
    }
    return state;
  }

 private:
  const std::string name_;
};

}  // namespace

const Adapter& adam_adapter() {
  static const AdamAdapter<torch::optim::AdamOptions, torch::optim::AdamParamState> adapter("Adam");
  return adapter;
}

const Adapter& adamw_adapter() {
  static const AdamAdapter<torch::optim::AdamWOptions, torch::optim::AdamWParamState> adapter("AdamW");
  return adapter;
}

}  // namespace rebind::optim
