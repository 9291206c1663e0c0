// Corners of the runtime that no case and no whole program reaches: each test fails without one line of lib/runtime.
#include <ATen/Functions.h>
#include <torch/library.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/sharded_bag.h"

namespace rebind::test {
namespace {

using torch::optim::SGD;

// Operators of the program's own, as another library registers them. `captured` is a parameter that is no argument.
at::Tensor& captured() {
  thread_local at::Tensor tensor;
  return tensor;
}
void write_raw(const at::Tensor& x) {
  for (int64_t i = 0; i < x.numel(); ++i) x.data_ptr<float>()[i] = 7;
}
void write_raw_and_throw(const at::Tensor& x) {
  write_raw(x);
  throw std::runtime_error("thrown by the operator");
}
double sum_with_captured(const at::Tensor& x) {
  const double both = (x.sum() + captured().sum()).item<double>();
  double raw = 0;
  for (int64_t i = 0; i < x.numel(); ++i) raw += x.const_data_ptr<float>()[i];
  return both + raw;
}

TORCH_LIBRARY(rebind_gaps, library) {
  library.def("write_raw(Tensor x) -> ()", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(write_raw)));
  library.def("write_raw_and_throw(Tensor x) -> ()", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(write_raw_and_throw)));
  library.def("sum_with_captured(Tensor x) -> float", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(sum_with_captured)));
}

template <class Signature>
auto own_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

TEST_CASE("gaps: a shard written by an operator that reads the window is fresh afterwards", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    at::NoGradGuard no_grad;
    s.shard().add_(s["a"].narrow(0, 8 * rank, 8));  // written first in the list, while the window is still in use
    expect_same("a", s["a"].clone(), at::full({16}, 2.0f));
  });
}

TEST_CASE("gaps: one operator uses two units of equal size", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    torch::nn::Module model;
    auto left = std::make_shared<Bag>(), right = std::make_shared<Bag>();
    left->register_parameter("w", at::arange(16).to(at::kFloat));
    right->register_parameter("w", at::full({16}, 2.0f));
    model.register_module("left", left);
    model.register_module("right", right);
    FsdpOptions options;
    options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
    auto fsdp = prepare_fsdp(model, Optimizers{}, group, options);
    EXPECT_OK(fsdp);
    at::NoGradGuard no_grad;
    expect_same("product", (*left)["w"] * (*right)["w"], at::arange(16).to(at::kFloat) * 2);
    expect_same("cat", at::cat({(*left)["w"], (*right)["w"]}), at::cat({at::arange(16).to(at::kFloat), at::full({16}, 2.0f)}));
    at::_foreach_add_({(*left)["w"], (*right)["w"]}, 1);
    expect_same("left", *(*fsdp)->full_parameter("left.w"), at::arange(16).to(at::kFloat) + 1);
    expect_same("right", *(*fsdp)->full_parameter("right.w"), at::full({16}, 3.0f));
  });
}

TEST_CASE("gaps: in strict mode nothing stays gathered after an operator", "[gaps]") {
  runtime::set_strict_for_tests(true);
  run_ranks(2, [](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    s["a"].sum();
    EXPECT_EQ(s.fsdp->stats().live_bytes, 0);
  });
  runtime::set_strict_for_tests(false);
}

TEST_CASE("gaps: after a failed gather the next use is an error too, not what was received", "[gaps]") {
  const auto errors = run_ranks_errors(2, [](int rank, Group group) {
    Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
    give(s["a"], at::ones({16}));
    if (rank == 0) EXPECT_THROWS(s["a"].sum());
    if (rank == 1) EXPECT_THROWS(s["a"].grad().sum());
    EXPECT_EQ(s.fsdp->stats().live_bytes, 0);
    EXPECT_THROWS(s["a"].sum());
    EXPECT_THROWS(s["a"].grad().sum());
    EXPECT(!s.fsdp->restore().ok());
  });
  for (const std::string& error : errors) CHECK(error == "");
}

TEST_CASE("gaps: a gradient is read while another of its unit is left unreduced by an exception", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int rank, Group group) {
      Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}, {"c", {16}}});
      give(s["a"], at::full({16}, 2.0f));
      give_and_break(s["b"], at::full({16}, rank * 2.0f), s["c"]);
      expect_same("a", s["a"].grad().clone(), at::full({16}, 2.0f));
      expect_same("b", *s.fsdp->full_gradient("b"), at::full({16}, group->getSize() - 1.0f));
      EXPECT_EQ(s.fsdp->clip_grad_norm(1e9, 1.0), 32.0 + (group->getSize() - 1) * 16);
      EXPECT(!s["c"].grad().defined());
    });
  }
}

TEST_CASE("gaps: a gradient that is gathered is read anew after a later backward was broken off", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
    const at::Tensor two = at::full({16}, 2.0f);
    const at::Tensor broken = Broken::apply(s["b"] * 1).sum();
    const at::Tensor good = (s["a"] * two).sum(), bad = (s["a"] * two).sum() + broken;
    good.backward();
    expect_same("a", s["a"].grad().clone(), two);
    EXPECT_THROWS(bad.backward());  // gathers nothing
    expect_same("a", s["a"].grad().clone(), two * 2);
  });
}

TEST_CASE("gaps: two parameters share one gradient tensor through an exception and a further backward", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}, {"c", {16}}});
      const at::Tensor weights = at::arange(16).to(at::kFloat);
      const auto backward = [&](bool breaks) {
        const at::Tensor broken = breaks ? Broken::apply(s["c"] * 1).sum() : s["c"].sum();
        const at::Tensor loss = ((s["a"] + s["b"]) * weights).sum() + broken;
        breaks ? static_cast<void>(EXPECT_THROWS(loss.backward())) : loss.backward();
      };
      backward(false);
      backward(true);
      give(s["a"], at::ones({16}));
      expect_same("a", s["a"].grad().clone(), weights * 2 + 1);
      expect_same("b", s["b"].grad().clone(), weights * 2);
    });
  }
}

TEST_CASE("gaps: a gradient that is a view of another parameter arrives", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {4, 4}}, {"b", {16}}});
      s["a"].view({16}).backward(s["b"].detach());
      expect_same("a", *s.fsdp->full_gradient("a"), at::ones({4, 4}));
      expect_same("a", s["a"].grad().clone(), at::ones({4, 4}));
    });
  }
}

TEST_CASE("gaps: a unit's gradients are reduced as soon as the last one is there", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = net_with([](Net& net) {
      return std::vector<std::shared_ptr<torch::optim::Optimizer>>{std::make_shared<SGD>(net.parameters(), 0.1)};
    });
    FsdpOptions options;
    options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
    auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group, options);
    EXPECT_OK(fsdp);
    int64_t before = -1;
    setup.model->named_parameters()["first.weight"].register_hook(
        [&](const at::Tensor&) { before = (*fsdp)->stats().reduce_scatters; });
    for (int step = 0; step < 2; ++step) {
      auto [input, target] = rows(rank, step, at::kFloat);
      // A backward that breaks off when `second` and half of `first` have arrived leaves no count behind.
      const at::Tensor broken = Broken::apply(setup.model->named_parameters()["first.weight"] * 1).sum();
      EXPECT_THROWS((broken + setup.forward(input).sum()).backward());
      setup.optimizers[0]->zero_grad();
      (*fsdp)->reset_stats();
      at::mse_loss(setup.forward(input), target).backward();
      EXPECT_EQ(before, int64_t{1});  // second's
      EXPECT_EQ((*fsdp)->stats().reduce_scatters, 3);
    }
  });
}

TEST_CASE("gaps: a unit in which one rank alone has a gradient is reduced on all", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    torch::nn::Module model;
    auto left = std::make_shared<Bag>(), right = std::make_shared<Bag>();
    left->register_parameter("w", at::ones({16}));
    right->register_parameter("w", at::ones({16}));
    right->register_parameter("idle", at::ones({16}));
    model.register_module("left", left);
    model.register_module("right", right);
    FsdpOptions options;
    options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
    auto fsdp = prepare_fsdp(model, Optimizers{}, group, options);
    EXPECT_OK(fsdp);
    const at::Tensor loss = (*left)["w"].sum(), more = ((*right)["w"] * 4).sum();
    (rank == 0 ? loss : loss + more).backward();
    expect_same("right.w", (*right)["w"].grad().clone(), at::full({16}, 2.0f));
    EXPECT(!(*right)["idle"].grad().defined());
  });
}

TEST_CASE("gaps: half-precision gradients are averaged in single precision", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}}, at::kHalf);
    give(s["a"], at::full({16}, 60000.0, at::kHalf));  // the sum is no half any more
    expect_same("a", s["a"].grad().clone(), at::full({16}, 60000.0, at::kHalf));
  });
}

TEST_CASE("gaps: a sparse gradient is refused by name", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {7, 4}}});
      const at::Tensor rows = at::embedding(s["a"], at::tensor({1, 2}), -1, false, /*sparse=*/true);
      EXPECT(contains(EXPECT_THROWS(rows.sum().backward()),
                      "parameter 'a': its gradient is sparse, which cannot be sharded. "
                      "Use the dense gradient (an embedding's sparse option off)."));
      EXPECT(!s["a"].grad().defined());
    });
  }
}

TEST_CASE("gaps: a collective of the program's own on a sharded tensor is refused by name", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    give(s["a"], at::ones({16}));
    for (const at::Tensor& tensor : {s["a"].detach(), s["a"].grad(), s.shard().detach(), s.shard().grad()}) {
      std::vector<at::Tensor> tensors{tensor};
      EXPECT(contains(EXPECT_THROWS(group->allreduce(tensors)),
                      "parameter 'a': a collective of the program's own on a sharded tensor. "
                      "Clone the tensor and use the copy."));
    }
  });
}

TEST_CASE("gaps: operators of other libraries: what they write, use or throw", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
      at::NoGradGuard no_grad;
      captured() = s["b"];
      EXPECT_EQ(own_operator<double(const at::Tensor&)>("rebind_gaps::sum_with_captured").call(s["a"]), 48.0);
      captured() = s["a"];
      EXPECT_EQ(own_operator<double(const at::Tensor&)>("rebind_gaps::sum_with_captured").call(s["a"]), 48.0);
      captured().reset();
      own_operator<void(const at::Tensor&)>("rebind_gaps::write_raw").call(s["a"]);
      expect_same("a", *s.fsdp->full_parameter("a"), at::full({16}, 7.0f));
      expect_same("a", s["a"].clone(), at::full({16}, 7.0f));
      EXPECT_THROWS(own_operator<void(const at::Tensor&)>("rebind_gaps::write_raw_and_throw").call(s["b"]));
      expect_same("b", *s.fsdp->full_parameter("b"), at::full({16}, 7.0f));
    });
  }
}

}  // namespace rebind::test
