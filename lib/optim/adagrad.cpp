// Adagrad. Its state is made in the constructor and looked up without a check in step: a parameter without state crashes there,
// so every shard needs one.
#include <typeinfo>

#include <absl/strings/str_cat.h>
#include <torch/optim/adagrad.h>

#include "lib/base/error.h"
#include "lib/optim/adapters.h"
#include "lib/optim/exact_text.h"

namespace rebind::optim {
namespace {

using torch::optim::AdagradOptions;
using torch::optim::AdagradParamState;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// State: "sum", from the start, and the scalar "step".
class AdagradAdapter final : public Adapter {
 public:
  std::string name() const override { return "Adagrad"; }

  bool knows(const OptimizerOptions& options) const override { return typeid(options) == typeid(AdagradOptions); }
  bool knows(const OptimizerParamState& state) const override { return typeid(state) == typeid(AdagradParamState); }

  std::string options_text(const OptimizerOptions& options) const override {
    const auto& adagrad = static_cast<const AdagradOptions&>(options);
    return absl::StrCat("lr=", exact_text(adagrad.lr()), " lr_decay=", exact_text(adagrad.lr_decay()),
                        " weight_decay=", exact_text(adagrad.weight_decay()),
                        " initial_accumulator_value=", exact_text(adagrad.initial_accumulator_value()),
                        " eps=", exact_text(adagrad.eps()));
  }

  int state_tensors(const OptimizerOptions&) const override { return 1; }

  StateParts take_apart(const OptimizerParamState& state) const override {
    const auto& adagrad = static_cast<const AdagradParamState&>(state);
    StateParts parts;
    if (adagrad.sum().defined()) parts.tensors.emplace_back("sum", adagrad.sum());
    parts.scalars.emplace_back("step", adagrad.step());
    return parts;
  }

  std::unique_ptr<OptimizerParamState> put_together(const StateParts& parts) const override {
    auto state = std::make_unique<AdagradParamState>();
    for (const auto& [key, tensor] : parts.tensors) {
      if (key != "sum") throw_error({}, "Adagrad state has no tensor '" + key + "'", "");
      state->sum(tensor);
    }
    for (const auto& [key, value] : parts.scalars) {
      if (key != "step") throw_error({}, "Adagrad state has no scalar '" + key + "'", "");
      state->step(value);
    }
    return state;
  }
};

}  // namespace

const Adapter& adagrad_adapter() {
  static const AdagradAdapter adapter;
  return adapter;
}

}  // namespace rebind::optim
