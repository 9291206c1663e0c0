#include "lib/optim/adapters.h"

#include <cmath>
#include <string>

#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"

namespace rebind::optim {
namespace {

at::Tensor leaf() { return at::ones({3}).set_requires_grad(true); }

// One step with gradient 1.
template <class Optimizer>
void step_once(Optimizer& optimizer) {
  for (at::Tensor& tensor : optimizer.param_groups()[0].params()) tensor.mutable_grad() = at::ones_like(tensor);
  optimizer.step();
}

const torch::optim::OptimizerParamState& only_state(const torch::optim::Optimizer& optimizer) {
  REQUIRE(optimizer.state().size() == 1);
  return *optimizer.state().begin()->second;
}

// "exp_avg exp_avg_sq step=3"
std::string parts_text(const StateParts& parts) {
  std::string text;
  for (const auto& [key, tensor] : parts.tensors) text += (text.empty() ? "" : " ") + key;
  for (const auto& [key, value] : parts.scalars) text += (text.empty() ? "" : " ") + key + "=" + std::to_string(value);
  return text;
}

struct DerivedSgd : torch::optim::SGD {
  using SGD::SGD;
};

TEST_CASE("adapters: five optimizers are known by their exact type, nothing else is", "[optim]") {
  torch::optim::SGD sgd({leaf()}, 0.1);
  torch::optim::Adam adam({leaf()});
  torch::optim::AdamW adamw({leaf()});
  torch::optim::RMSprop rmsprop({leaf()});
  torch::optim::Adagrad adagrad({leaf()});
  const auto name_of = [](const torch::optim::Optimizer& optimizer) {
    const Adapter* adapter = adapter_of(optimizer);
    return adapter == nullptr ? std::string("none") : adapter->name();
  };
  CHECK(name_of(sgd) == "SGD");
  CHECK(name_of(adam) == "Adam");
  CHECK(name_of(adamw) == "AdamW");
  CHECK(name_of(rmsprop) == "RMSprop");
  CHECK(name_of(adagrad) == "Adagrad");

  torch::optim::LBFGS lbfgs({leaf()});
  DerivedSgd derived({leaf()}, 0.1);
  CHECK(name_of(lbfgs) == "none");
  CHECK(name_of(derived) == "none");
  CHECK(type_name(lbfgs) == "torch::optim::LBFGS");
}

TEST_CASE("adapters: options and states of another optimizer are not known", "[optim]") {
  torch::optim::Adam adam({leaf()});
  torch::optim::AdamW adamw({leaf()});
  CHECK(adam_adapter().knows(adam.defaults()));
  CHECK_FALSE(adam_adapter().knows(adamw.defaults()));
  CHECK_FALSE(sgd_adapter().knows(adam.defaults()));
  step_once(adam);
  CHECK(adam_adapter().knows(only_state(adam)));
  CHECK_FALSE(adamw_adapter().knows(only_state(adam)));
  CHECK_FALSE(sgd_adapter().knows(only_state(adam)));
  CHECK(adagrad_adapter().knows(torch::optim::AdagradOptions()));
  CHECK_FALSE(adagrad_adapter().knows(adam.defaults()));
  CHECK(adagrad_adapter().knows(torch::optim::AdagradParamState()));
  CHECK_FALSE(adagrad_adapter().knows(only_state(adam)));
  CHECK(rmsprop_adapter().knows(torch::optim::RMSpropOptions()));
  CHECK_FALSE(rmsprop_adapter().knows(adam.defaults()));
  CHECK(rmsprop_adapter().knows(torch::optim::RMSpropParamState()));
  CHECK_FALSE(rmsprop_adapter().knows(only_state(adam)));
}

TEST_CASE("adapters: every option is in the text", "[optim]") {
  using torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::SGDOptions;
  CHECK(sgd_adapter().options_text(SGDOptions(0.1)) == "lr=0.1 momentum=0 dampening=0 weight_decay=0 nesterov=0");
  CHECK(sgd_adapter().options_text(SGDOptions(1).momentum(0.9).dampening(0.25).weight_decay(1e-4).nesterov(true)) ==
        "lr=1 momentum=0.9 dampening=0.25 weight_decay=1e-04 nesterov=1");
  CHECK(adam_adapter().options_text(AdamOptions()) == "lr=0.001 betas=(0.9, 0.999) eps=1e-08 weight_decay=0 amsgrad=0");
  CHECK(adamw_adapter().options_text(AdamWOptions(0.01).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).amsgrad(true)) ==
        "lr=0.01 betas=(0.8, 0.95) eps=1e-06 weight_decay=0.1 amsgrad=1");
  using torch::optim::AdagradOptions, torch::optim::RMSpropOptions;
  CHECK(adagrad_adapter().options_text(AdagradOptions()) ==
        "lr=0.01 lr_decay=0 weight_decay=0 initial_accumulator_value=0 eps=1e-10");
  CHECK(adagrad_adapter().options_text(AdagradOptions(0.5).lr_decay(0.25).weight_decay(0.1).initial_accumulator_value(1).eps(
            1e-6)) == "lr=0.5 lr_decay=0.25 weight_decay=0.1 initial_accumulator_value=1 eps=1e-06");
  CHECK(rmsprop_adapter().options_text(RMSpropOptions()) == "lr=0.01 alpha=0.99 eps=1e-08 weight_decay=0 momentum=0 centered=0");
  CHECK(rmsprop_adapter().options_text(RMSpropOptions(0.5).alpha(0.75).eps(1e-6).weight_decay(0.1).momentum(0.9).centered(true)) ==
        "lr=0.5 alpha=0.75 eps=1e-06 weight_decay=0.1 momentum=0.9 centered=1");
}

TEST_CASE("adapters: options that differ in the last bit have different texts", "[optim]") {
  const double next = std::nextafter(0.1, 1.0);
  CHECK(adam_adapter().options_text(torch::optim::AdamOptions(0.1)) ==
        "lr=0.1 betas=(0.9, 0.999) eps=1e-08 weight_decay=0 amsgrad=0");
  CHECK(adam_adapter().options_text(torch::optim::AdamOptions(next)) ==
        "lr=0.10000000000000002 betas=(0.9, 0.999) eps=1e-08 weight_decay=0 amsgrad=0");
}

TEST_CASE("adapters: the forecast of state tensors follows the options", "[optim]") {
  CHECK(sgd_adapter().state_tensors(torch::optim::SGDOptions(0.1)) == 0);
  CHECK(sgd_adapter().state_tensors(torch::optim::SGDOptions(0.1).momentum(0.9)) == 1);
  CHECK(adam_adapter().state_tensors(torch::optim::AdamOptions()) == 2);
  CHECK(adam_adapter().state_tensors(torch::optim::AdamOptions().amsgrad(true)) == 3);
  CHECK(adamw_adapter().state_tensors(torch::optim::AdamWOptions()) == 2);
  CHECK(adamw_adapter().state_tensors(torch::optim::AdamWOptions().amsgrad(true)) == 3);
  CHECK(adagrad_adapter().state_tensors(torch::optim::AdagradOptions()) == 1);
  CHECK(rmsprop_adapter().state_tensors(torch::optim::RMSpropOptions()) == 1);
  CHECK(rmsprop_adapter().state_tensors(torch::optim::RMSpropOptions().momentum(0.9)) == 2);
  CHECK(rmsprop_adapter().state_tensors(torch::optim::RMSpropOptions().centered(true)) == 2);
  CHECK(rmsprop_adapter().state_tensors(torch::optim::RMSpropOptions().momentum(0.9).centered(true)) == 3);
}

TEST_CASE("adapters: state is taken apart by name, without what is undefined", "[optim]") {
  torch::optim::SGD sgd({leaf()}, torch::optim::SGDOptions(0.1).momentum(0.9));
  step_once(sgd);
  CHECK(parts_text(sgd_adapter().take_apart(only_state(sgd))) == "momentum_buffer");
  CHECK(parts_text(sgd_adapter().take_apart(torch::optim::SGDParamState())) == "");

  torch::optim::Adam adam({leaf()});
  step_once(adam);
  step_once(adam);
  CHECK(parts_text(adam_adapter().take_apart(only_state(adam))) == "exp_avg exp_avg_sq step=2");

  torch::optim::AdamW adamw({leaf()}, torch::optim::AdamWOptions().amsgrad(true));
  step_once(adamw);
  CHECK(parts_text(adamw_adapter().take_apart(only_state(adamw))) == "exp_avg exp_avg_sq max_exp_avg_sq step=1");

  torch::optim::Adagrad adagrad({leaf()});
  CHECK(parts_text(adagrad_adapter().take_apart(only_state(adagrad))) == "sum step=0");  // made in the constructor
  step_once(adagrad);
  CHECK(parts_text(adagrad_adapter().take_apart(only_state(adagrad))) == "sum step=1");

  torch::optim::RMSprop plain({leaf()});
  step_once(plain);
  CHECK(parts_text(rmsprop_adapter().take_apart(only_state(plain))) == "square_avg step=1");
  torch::optim::RMSprop rmsprop({leaf()}, torch::optim::RMSpropOptions().momentum(0.9).centered(true));
  step_once(rmsprop);
  CHECK(parts_text(rmsprop_adapter().take_apart(only_state(rmsprop))) == "square_avg momentum_buffer grad_avg step=1");
}

TEST_CASE("adapters: a state put together from its parts is the same, and is the caller's own", "[optim]") {
  using torch::optim::AdamParamState, torch::optim::AdamWParamState, torch::optim::SGDParamState;
  AdamParamState adam;
  adam.step(7).exp_avg(at::full({3}, 0.25)).exp_avg_sq(at::full({3}, 0.5)).max_exp_avg_sq(at::full({3}, 0.75));
  const auto adam_copy = adam_adapter().put_together(adam_adapter().take_apart(adam));
  CHECK(adam_adapter().knows(*adam_copy));
  CHECK(static_cast<AdamParamState&>(*adam_copy) == adam);

  AdamWParamState adamw;  // no amsgrad
  adamw.step(int64_t{1} << 40).exp_avg(at::full({3}, 0.25)).exp_avg_sq(at::full({3}, 0.5));
  const auto adamw_copy = adamw_adapter().put_together(adamw_adapter().take_apart(adamw));
  CHECK(adamw_adapter().knows(*adamw_copy));
  const auto& taken = static_cast<AdamWParamState&>(*adamw_copy);
  CHECK(taken.step() == 1099511627776);
  CHECK(taken.exp_avg().is_same(adamw.exp_avg()));
  CHECK(taken.exp_avg_sq().is_same(adamw.exp_avg_sq()));
  CHECK_FALSE(taken.max_exp_avg_sq().defined());

  SGDParamState sgd;
  sgd.momentum_buffer(at::full({3}, 0.125));
  const auto sgd_copy = sgd_adapter().put_together(sgd_adapter().take_apart(sgd));
  CHECK(sgd_adapter().knows(*sgd_copy));
  CHECK(static_cast<SGDParamState&>(*sgd_copy).momentum_buffer().is_same(sgd.momentum_buffer()));
  torch::optim::AdagradParamState adagrad;
  adagrad.step(7).sum(at::full({3}, 0.25));
  const auto adagrad_copy = adagrad_adapter().put_together(adagrad_adapter().take_apart(adagrad));
  CHECK(adagrad_adapter().knows(*adagrad_copy));
  CHECK(static_cast<torch::optim::AdagradParamState&>(*adagrad_copy) == adagrad);

  torch::optim::RMSpropParamState rmsprop;
  rmsprop.step(7).square_avg(at::full({3}, 0.25)).momentum_buffer(at::full({3}, 0.5)).grad_avg(at::full({3}, 0.75));
  const auto rmsprop_copy = rmsprop_adapter().put_together(rmsprop_adapter().take_apart(rmsprop));
  CHECK(rmsprop_adapter().knows(*rmsprop_copy));
  CHECK(static_cast<torch::optim::RMSpropParamState&>(*rmsprop_copy) == rmsprop);

  const auto empty = sgd_adapter().put_together({});
  CHECK_FALSE(static_cast<SGDParamState&>(*empty).momentum_buffer().defined());
}

TEST_CASE("adapters: a tensor of a state may be exchanged", "[optim]") {
  torch::optim::Adam adam({leaf()});
  step_once(adam);
  StateParts parts = adam_adapter().take_apart(only_state(adam));
  const at::Tensor shard = at::zeros({1});
  parts.tensors[1].second = shard;
  const auto state = adam_adapter().put_together(parts);
  CHECK(static_cast<torch::optim::AdamParamState&>(*state).exp_avg_sq().is_same(shard));
  CHECK(static_cast<torch::optim::AdamParamState&>(*state).step() == 1);
}

TEST_CASE("adapters: a part that the state does not have is an error, not dropped", "[optim]") {
  const auto message = [](const Adapter& adapter, const StateParts& parts) {
    try {
      adapter.put_together(parts);
    } catch (const c10::Error& thrown) {
      return std::string(thrown.what_without_backtrace());
    }
    return std::string("accepted");
  };
  CHECK(message(sgd_adapter(), {{{"exp_avg", at::ones({3})}}, {}}) == "SGD state has no tensor 'exp_avg'.");
  CHECK(message(sgd_adapter(), {{}, {{"step", 1}}}) == "SGD state has no scalar 'step'.");
  CHECK(message(adam_adapter(), {{{"momentum_buffer", at::ones({3})}}, {}}) == "Adam state has no tensor 'momentum_buffer'.");
  CHECK(message(adamw_adapter(), {{}, {{"steps", 1}}}) == "AdamW state has no scalar 'steps'.");
  CHECK(message(adagrad_adapter(), {{{"exp_avg", at::ones({3})}}, {}}) == "Adagrad state has no tensor 'exp_avg'.");
  CHECK(message(adagrad_adapter(), {{}, {{"steps", 1}}}) == "Adagrad state has no scalar 'steps'.");
  CHECK(message(rmsprop_adapter(), {{{"sum", at::ones({3})}}, {}}) == "RMSprop state has no tensor 'sum'.");
  CHECK(message(rmsprop_adapter(), {{}, {{"steps", 1}}}) == "RMSprop state has no scalar 'steps'.");
}

}  // namespace
}  // namespace rebind::optim
