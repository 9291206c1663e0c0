// Corners of prepare and restore that no case reaches: each test fails without one line of lib/prepare.
#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <future>

#include "lib/prepare/decision.h"
#include "test/support/catch.h"
#include "test/support/sharded_bag.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

}  // namespace

TEST_CASE("gaps: each round of each decision is decided anew", "[gaps]") {
  run_ranks(3, [](int rank, Group group) {
    for (int call = 0; call < 2; ++call) {
      auto decision = prepare::Decision::begin(group, "trial", std::chrono::seconds(5));
      EXPECT_OK(decision);
      EXPECT_OK(decision->agree(absl::OkStatus()));
      // Only the last rank fails, only in the second round.
      const absl::Status own = rank == 2 ? absl::AbortedError("rank 2 cannot") : absl::OkStatus();
      EXPECT_EQ(decision->agree(own).ToString(), std::string("ABORTED: rank 2 cannot"));
    }
    auto decision = prepare::Decision::begin(group, "trial", std::chrono::seconds(5));
    EXPECT_OK(decision);
    const absl::Status own = rank == 1 ? absl::AbortedError("rank 1 cannot") : absl::OkStatus();
    EXPECT_EQ(decision->agree(own).ToString(), std::string("ABORTED: rank 1 cannot"));
  });
}

TEST_CASE("gaps: a process group without a backend for CPU tensors is refused on all ranks", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    Bag model({{"a", {16}}});
    auto empty = c10::make_intrusive<c10d::ProcessGroup>(group->getStore(), rank, 2);
    EXPECT_EQ(prepare_fsdp(model, Optimizers{}, empty).status().ToString(),
              std::string("UNIMPLEMENTED: prepare_fsdp, rank 0: the process group has no backend for CPU tensors. "
                          "Make it with backend 'gloo'."));
  });
}

TEST_CASE("gaps: a group's order is the optimizer's own, not the model's", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"a", {16}}, {"b", {32}}, {"c", {48}}});
      const std::vector<at::Tensor> order{model["c"], model["a"], model["b"]};
      SGD sgd(order, 1);
      auto fsdp = prepare(model, {&sgd}, group, one_tensor_each());
      const auto sharding = runtime::Sharding::of(model["a"]);
      const auto& params = sgd.param_groups()[0].params();
      EXPECT_EQ(params.size(), size_t{3});
      for (size_t i = 0; i < 3; ++i) EXPECT(params[i].is_same(sharding->parameters[i == 0 ? 2 : i - 1]->singles.front()->tensor));
      EXPECT_OK(fsdp->restore());
      for (size_t i = 0; i < 3; ++i) EXPECT(params[i].is_same(order[i]));
    });
  }
}

TEST_CASE("gaps: a group that the program changed keeps its change through restore", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {16}}, {"b", {16}}}), other({{"x", {4}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group, one_tensor_each());
    {
      auto& params = sgd.param_groups()[0].params();
      params.erase(params.begin());
      params.push_back(other["x"]);
    }
    std::vector<at::Tensor> added{other["x"]};
    sgd.param_groups().push_back(torch::optim::OptimizerParamGroup(added, std::make_unique<SGDOptions>(2)));
    EXPECT_OK(fsdp->restore());
    const auto& params = sgd.param_groups()[0].params();
    EXPECT_EQ(params.size(), size_t{2});
    EXPECT(params[0].is_same(model["b"]));
    EXPECT(params[1].is_same(other["x"]));
    EXPECT(sgd.param_groups()[1].params()[0].is_same(other["x"]));
  });
}

TEST_CASE("gaps: state of a tensor that is in no group stays where it is", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {16}}});
    SGD sgd(model.parameters(), SGDOptions(1).momentum(0.5));
    const at::Tensor foreign = at::ones({3});
    auto state = std::make_unique<SGDParamState>();
    state->momentum_buffer(at::full({3}, 5.0f));
    sgd.state()[foreign.unsafeGetTensorImpl()] = std::move(state);
    const auto expect_there = [&] {
      const auto found = sgd.state().find(foreign.unsafeGetTensorImpl());
      EXPECT(found != sgd.state().end());
      EXPECT(found->second != nullptr);
      expect_same("foreign", static_cast<SGDParamState&>(*found->second).momentum_buffer(), at::full({3}, 5.0f));
    };
    auto fsdp = prepare(model, {&sgd}, group);
    expect_there();
    give(model["a"], at::ones({16}));
    sgd.step();
    EXPECT_OK(fsdp->restore());
    expect_there();
    EXPECT_EQ(sgd.state().size(), size_t{2});
  });
}

TEST_CASE("gaps: a state that is one number stays one number on every rank", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"a", {16}}});
      SGD sgd(model.parameters(), SGDOptions(1).momentum(0.5));
      auto state = std::make_unique<SGDParamState>();
      state->momentum_buffer(at::scalar_tensor(5.0f));
      sgd.state()[model["a"].unsafeGetTensorImpl()] = std::move(state);
      auto fsdp = prepare(model, {&sgd}, group);
      auto number = fsdp->full_state(sgd, "a", "momentum_buffer");
      EXPECT_OK(number);
      expect_same("momentum_buffer", *number, at::scalar_tensor(5.0f));
      EXPECT_OK(fsdp->restore());
      const auto& restored = static_cast<SGDParamState&>(*sgd.state().at(model["a"].unsafeGetTensorImpl()));
      expect_same("momentum_buffer", restored.momentum_buffer(), at::scalar_tensor(5.0f));
    });
  }
}

TEST_CASE("gaps: ranks that use different shardings of one group never get each other's values", "[gaps]") {
  const auto errors = run_ranks_errors(2, [](int rank, Group group) {
    Bag left({{"w", {16}}}), right({{"w", {16}}});
    FsdpOptions options;
    options.collective_timeout = std::chrono::milliseconds(500);
    auto left_fsdp = prepare_fsdp(left, Optimizers{}, group, options);
    EXPECT_OK(left_fsdp);
    auto right_fsdp = prepare_fsdp(right, Optimizers{}, group, options);
    EXPECT_OK(right_fsdp);
    EXPECT_THROWS((rank == 0 ? left : right)["w"].sum());
  });
  for (const std::string& error : errors) CHECK(error == "");
}

TEST_CASE("gaps: two shardings of one group, each trained by a thread of its own", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    std::vector<Sharded> both;
    both.push_back(sharded(group, {{"a", {16}}}));
    both.push_back(sharded(group, {{"a", {16}}}));
    std::vector<std::future<void>> threads;
    for (int k : {0, 1}) {
      threads.push_back(std::async(std::launch::async, [&both, rank, k] {
        for (int step = 0; step < 5; ++step) {
          give(both[k]["a"], at::full({16}, (rank + 1.0f) * (k + 1)));
          both[k].sgd->step();
          both[k].sgd->zero_grad();
        }
        expect_same("a", both[k]["a"].detach().clone(), at::full({16}, 1 - 5 * 1.5f * (k + 1)));
      }));
    }
    for (auto& thread : threads) thread.get();
  });
}

TEST_CASE("gaps: buffers that are equal are not written, others become rank 0's whatever they are made of", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    Bag model({{"a", {5}}});
    at::Tensor made_in_inference;
    {
      c10::InferenceMode inference;
      made_in_inference = at::full({3}, static_cast<float>(rank));
    }
    const at::Tensor mask = model.register_buffer("mask", at::ones({5}));
    const at::Tensor complex = at::complex(at::full({3}, 1.0f), at::full({3}, static_cast<float>(rank)));
    model.register_buffer("inference", made_in_inference);
    model.register_buffer("conjugate", complex.conj());
    const at::Tensor loss = (model["a"] * mask).sum();
    auto fsdp = prepare(model, {}, group);
    loss.backward();  // the mask that it saved is as it was
    const auto buffers = model.named_buffers();
    EXPECT(buffers["inference"].is_inference());
    expect_same("inference", buffers["inference"], at::zeros({3}));
    EXPECT(at::equal(buffers["conjugate"].resolve_conj(), at::complex(at::full({3}, 1.0f), at::zeros({3}))));
  });
}

TEST_CASE("gaps: after restore every call says so, and nothing of the sharding stays", "[gaps][restore]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"a", {16}}, {"b", {2}}});
      Adam adam(model.parameters(), AdamOptions(0.1));
      auto fsdp = prepare(model, {&adam}, group);
      give(model["a"], at::ones({16}));
      adam.step();
      const at::Tensor view = model["a"].detach(), gradient = model["a"].grad();
      const auto sharding = runtime::Sharding::of(model["a"]);
      model["a"].sum();
      EXPECT_OK(fsdp->restore());
      EXPECT_EQ(fsdp->stats().live_bytes, 0);
      for (const auto& unit : sharding->units) EXPECT(!unit->flat_shard.defined());
      for (const auto& parameter : sharding->parameters) EXPECT(!parameter->singles.front()->tensor.defined());
      for (const auto& status : {fsdp->full_parameter("a").status(), fsdp->full_gradient("a").status(),
                                 fsdp->full_state(adam, "a", "exp_avg").status(), fsdp->restore()}) {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
        EXPECT(contains(std::string(status.message()), "restored"));
      }
      EXPECT(contains(EXPECT_THROWS(fsdp->clip_grad_norm(1)), "the model was restored"));
      EXPECT(contains(EXPECT_THROWS((void)fsdp->full_parameters()), "the model was restored"));
      EXPECT(contains(EXPECT_THROWS(view.sum()), "the model was restored since this view, gradient or graph was made"));
      EXPECT(contains(EXPECT_THROWS(gradient.sum()), "the model was restored since this view, gradient or graph was made"));
      expect_same("gradient", model["a"].grad(), at::ones({16}));
      // Its hooks are gone as well: gradients stay local and whole.
      give(model["a"], at::full({16}, 2.0f));
      expect_same("gradient", model["a"].grad(), at::full({16}, 3.0f));
    });
  }
}

TEST_CASE("gaps: restore is refused on all ranks when one rank's model was moved, and can be called again", "[gaps][restore]") {
  run_ranks(2, [](int rank, Group group) {
    Bag model({{"a", {16}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    if (rank == 1) model["a"].set_data(at::zeros({16}));
    const absl::Status status = fsdp->restore();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT(contains(std::string(status.message()), "parameter 'a': its data was replaced behind the sharding"));
    EXPECT_OK(Fsdp::of(model));
    expect_same("a", model["a"].detach().clone(), at::ones({16}));
    EXPECT_OK(fsdp->restore());
    expect_same("a", model["a"].detach(), at::ones({16}));
  });
}

TEST_CASE("gaps: a gradient that an exception left unreduced is restored averaged", "[gaps][restore]") {
  run_ranks(2, [](int rank, Group group) {
    Bag model({{"a", {16}}, {"b", {16}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    give_and_break(model["a"], at::full({16}, rank + 1.0f), model["b"]);
    EXPECT_OK(fsdp->restore());
    expect_same("a", model["a"].grad(), at::full({16}, 1.5f));
    EXPECT(!model["b"].grad().defined());
  });
}

TEST_CASE("gaps: a gradient that outlives its model is an error by name, a shard is not", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    auto model = std::make_unique<Bag>(std::initializer_list<std::pair<const char*, std::vector<int64_t>>>{{"a", {16}}});
    SGD sgd(model->parameters(), 1);
    auto fsdp = prepare(*model, {&sgd}, group);
    give((*model)["a"], at::ones({16}));
    const at::Tensor gradient = (*model)["a"].grad();
    fsdp.reset();
    model.reset();
    EXPECT(contains(EXPECT_THROWS(gradient.sum()), "a gradient was used after its sharded model was destroyed. Clone it earlier."));
    sgd.step();
    EXPECT_EQ(sgd.param_groups()[0].params()[0].sum().item<float>(), 0.0f);
  });
}

}  // namespace rebind::test
