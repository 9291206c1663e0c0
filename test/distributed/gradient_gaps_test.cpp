// Corners of the gradient facade and of the tripwires that no case reaches: each test fails without one line of lib/runtime.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "test/support/catch.h"
#include "test/support/sharded_bag.h"

namespace rebind::test {
namespace {

using torch::optim::SGD;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("gaps: a scalar factor reaches the shards without a gather, a tensor factor as a whole", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {4, 4}}, {"scale", {}}});
      give(s["a"], at::full({4, 4}, 2.0f));
      at::NoGradGuard no_grad;
      s["a"].grad().mul_(2);
      EXPECT_EQ(s.fsdp->stats().service_gathers, 0);
      const at::Tensor mask = at::arange(16).view({4, 4}).to(at::kFloat);
      s["a"].grad().mul_(mask);
      expect_same("masked", s["a"].grad().clone(), mask * 4);
      s["a"].grad().mul_(at::arange(4));  // broadcast
      expect_same("broadcast", s["a"].grad().clone(), mask * 4 * at::arange(4));
      s["scale"].fill_(0.5);
      s["a"].grad().mul_(s["scale"]);  // a factor that is a parameter
      expect_same("scaled", s["a"].grad().clone(), mask * 2 * at::arange(4));
      s["a"].grad().detach_();
      s.shard().grad().mul_(2);  // behind a gathered copy
      expect_same("by the shard", s["a"].grad().clone(), mask * 4 * at::arange(4));
    });
  }
}

TEST_CASE("gaps: what a hook adds to another parameter's gradient during backward is kept", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
      give(s["a"], at::ones({16}));
      s["b"].register_hook([&](const at::Tensor&) {
        at::NoGradGuard no_grad;
        s["a"].mutable_grad().add_(at::ones({16}), 2);
      });
      give(s["b"], at::ones({16}));
      expect_same("a", s["a"].grad().clone(), at::full({16}, 3.0f));
    });
  }
}

TEST_CASE("gaps: a gradient cleared through the optimizer is gone for everyone, whoever keeps a handle", "[gaps]") {
  for (int world_size : {1, 2}) {
    for (int way : {0, 1, 2, 3, 4}) {
      CAPTURE(world_size, way);
      run_ranks(world_size, [&](int, Group group) {
        Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
        give(s["a"], at::ones({16}));
        give(s["b"], at::ones({16}));
        const at::Tensor of_shard = way == 4 ? at::Tensor() : s.shard().grad();
        const at::Tensor of_window = way == 4 ? s["a"].grad() : at::Tensor();
        way == 4 ? s.model->zero_grad() : s.sgd->zero_grad();
        if (way == 0) EXPECT(contains(EXPECT_THROWS(s["a"].grad().sum()), "it was cleared (zero_grad) and is kept by a handle"));
        if (way == 1) EXPECT(contains(EXPECT_THROWS(s["a"].grad().mul_(2)), "it was cleared (zero_grad) and is kept by a handle"));
        if (way >= 2) EXPECT_EQ(s.fsdp->clip_grad_norm(1e9), 0.0);
        EXPECT_EQ(s.fsdp->full_gradient("a").status().code(), absl::StatusCode::kNotFound);
        EXPECT(!s["a"].grad().defined());
        EXPECT(!s.shard().grad().defined());
        if (way == 3) EXPECT_OK(s.fsdp->restore());
        give(s["a"], at::full({16}, 2.0f));
        expect_same("a", s["a"].grad().clone(), at::full({16}, 2.0f));
      });
    }
  }
}

TEST_CASE("gaps: a write to a gradient that differs by rank leaves its owner's", "[gaps]") {
  run_ranks(2, [](int rank, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    give(s["a"], at::ones({16}));
    s["a"].grad().copy_(at::full({16}, rank + 1.0f));
    expect_same("a", s["a"].grad().clone(), at::cat({at::ones({8}), at::full({8}, 2.0f)}));
  });
}

TEST_CASE("gaps: a refused create_graph backward leaves the gradient that was there", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}});
      give(s["a"], at::ones({16}));
      EXPECT_THROWS((s["a"] * s["a"]).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true));
      expect_same("a", s["a"].grad().clone(), at::ones({16}));
    });
  }
}

TEST_CASE("gaps: a handle that is dropped late takes no newer gradient with it", "[gaps]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}});
      for (bool by_model : {false, true}) {
        give(s["a"], at::ones({16}));
        at::Tensor of_window = s["a"].grad(), of_shard = s.shard().grad();
        by_model ? s.model->zero_grad() : s.sgd->zero_grad();
        // What the optimizer cleared stays readable by the handle, as in the plain program.
        for (int read = 0; read < 2 && !by_model; ++read) expect_same("kept", of_shard.clone(), at::ones_like(of_shard));
        give(s["a"], at::full({16}, 2.0f));
        of_window.reset();
        of_shard.reset();
        EXPECT(s["a"].grad().defined());
        EXPECT(s.shard().grad().defined());
        expect_same("a", s["a"].grad().clone(), at::full({16}, 2.0f));
        s.sgd->zero_grad();
      }
    });
  }
}

TEST_CASE("gaps: zero_grad with handles kept drops what an exception left, too", "[gaps]") {
  for (int world_size : {1, 2}) {
    for (bool by_model : {false, true}) {
      run_ranks(world_size, [&](int, Group group) {
        Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
        give_and_break(s["a"], at::full({16}, 4.0f), s["b"]);
        const at::Tensor kept = by_model ? s["a"].grad() : s.shard().grad();
        by_model ? s.model->zero_grad() : s.sgd->zero_grad();
        give(s["a"], at::ones({16}));
        expect_same("a", *s.fsdp->full_gradient("a"), at::ones({16}));
      });
    }
  }
}

TEST_CASE("gaps: what an exception left does not come back after zero_grad with another parameter's backward", "[gaps]") {
  for (int world_size : {1, 2}) {
    for (bool by_model : {false, true}) {
      run_ranks(world_size, [&](int, Group group) {
        Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
        give_and_break(s["a"], at::full({16}, 4.0f), s["b"]);
        by_model ? s.model->zero_grad() : s.sgd->zero_grad();
        give(s["b"], at::ones({16}));
        EXPECT(!s["a"].grad().defined());
        EXPECT(!s.shard().grad().defined());
      });
    }
  }
}

TEST_CASE("gaps: zero_grad is noticed while somebody holds a weak reference to the memory", "[gaps]") {
  run_ranks(2, [](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    give(s["a"], at::ones({16}));
    const c10::weak_intrusive_ptr<c10::StorageImpl> weak(s.shard().grad().storage().getWeakStorageImpl());
    s.sgd->zero_grad();
    EXPECT(!s["a"].grad().defined());
  });
}

TEST_CASE("gaps: a window that was exchanged for anything is noticed at its next use and undone", "[gaps][tripwire]") {
  using Exchange = std::function<void(Sharded&)>;
  const Exchange exchanges[] = {
      [](Sharded& s) {
        s["a"].set_data(at::zeros({4, 4}));
      },
      [](Sharded& s) { s["a"].set_data(s["b"].detach()); },
      [](Sharded& s) { s["a"].set_data(s["a"].grad()); },
      [](Sharded& s) { s["a"].set_data(s["a"].detach().t()); },
      [](Sharded& s) { s["a"].set_data(s["a"].detach().view({16})); },
      [](Sharded& s) { s["a"].set_data(s["a"].detach().narrow(1, 0, 3)); },
  };
  const Exchange uses[] = {
      [](Sharded& s) { s.sgd->step(); },
      [](Sharded& s) { give(s["a"], at::ones(s["a"].sizes())); },
      [](Sharded& s) { const auto whole = s.fsdp->full_parameters(); },
  };
  for (size_t i = 0; i < std::size(exchanges); ++i) {
    for (size_t use = 0; use <= std::size(uses); ++use) {
      CAPTURE(i, use);
      run_ranks(2, [&](int, Group group) {
        Sharded s = sharded(group, {{"a", {4, 4}}, {"b", {4, 4}}});
        give(s["a"], at::ones({4, 4}));
        const at::Tensor view = s["a"].detach();  // keeps the first memory, so that nothing tells of its end
        exchanges[i](s);
        const std::string text = use == std::size(uses) ? EXPECT_THROWS((s["b"] * view).sum()) : EXPECT_THROWS(uses[use](s));
        EXPECT(contains(text, "parameter 'a': its data was replaced behind the sharding"));
        expect_same("a", s["a"].detach().clone(), at::ones({4, 4}));
        EXPECT_THROWS(s["b"].data_ptr());  // what the operator had made present is hidden again
      });
    }
  }
}

TEST_CASE("gaps: moved data is noticed by any use of the model and by its gradients", "[gaps][tripwire]") {
  for (int use : {0, 1}) {
    run_ranks(2, [&](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
      give(s["b"], at::ones({16}));
      s["a"].set_data(at::zeros({16}));
      EXPECT_OK(Fsdp::of(*s.model));
      EXPECT_EQ(prepare_fsdp(*s.model, {s.sgd.get()}, group).status().code(), absl::StatusCode::kFailedPrecondition);
      const std::string text = use == 0 ? EXPECT_THROWS(s["b"].sum()) : EXPECT_THROWS(s["b"].grad().sum());
      EXPECT(contains(text, "parameter 'a': its data was replaced behind the sharding"));
      expect_same("a", s["a"].detach().clone(), at::ones({16}));
    });
  }
  run_ranks(2, [&](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    s["a"].set_data(at::zeros({16}));
    EXPECT_OK(Fsdp::of(*s.model));  // nothing but its hook tells
    EXPECT_THROWS((s["a"] * 2).sum().backward());
    EXPECT(!s["a"].grad().defined());  // the gradient of the data that was undone
  });
}

TEST_CASE("gaps: a window whose elements were renamed to another dtype of their size is noticed", "[gaps][tripwire]") {
  run_ranks(2, [](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}}, at::kHalf);
    s["a"].set_data(s["a"].detach().view(at::kBFloat16));
    EXPECT(contains(EXPECT_THROWS(s["a"].sum()), "parameter 'a': its data was replaced behind the sharding"));
    expect_same("a", s["a"].detach().clone(), at::ones({16}, at::kHalf));
  });
}

TEST_CASE("gaps: what is refused on a shard", "[gaps][tripwire]") {
  run_ranks(2, [&](int, Group group) {
    Sharded s = sharded(group, {{"a", {16}}});
    give(s["a"], at::ones({16}));
    const at::Tensor gradient = s.shard().grad();
    EXPECT(contains(EXPECT_THROWS(gradient.dot(gradient)), "its reduction is not the parameter's"));
    EXPECT(contains(EXPECT_THROWS(at::linalg_vector_norm(gradient, 2, {0})), "the norm of a piece of a shard"));
    EXPECT_EQ(at::linalg_vector_norm(gradient, 2).item<float>(), 4.0f);
    {
      auto whole = s.fsdp->full_parameters();
      EXPECT_EQ(s.fsdp->stats().live_bytes, 0);
      EXPECT(contains(EXPECT_THROWS(s.sgd->step()), "an optimizer step inside full_parameters() would be lost"));
    }
    {
      auto whole = s.fsdp->full_parameters(/*write_back=*/true);
      s["a"].set_data(at::zeros({16}, at::kDouble));
      EXPECT(contains(std::string(whole.close().message()), "was replaced by a Double tensor"));
    }
    expect_same("a", s["a"].detach().clone(), at::ones({16}));
    EXPECT_EQ(s["a"].detach().unsqueeze_(0).dim(), 2);  // a view of the program's own may change its shape
  });
}

TEST_CASE("gaps: clip_grad_norm with NaN, bad arguments, and a gathered gradient", "[gaps][clip]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](int, Group group) {
      Sharded s = sharded(group, {{"a", {16}}, {"b", {16}}});
      EXPECT_THROWS(s.fsdp->clip_grad_norm(1, 0));
      EXPECT_THROWS(s.fsdp->clip_grad_norm(1, -1));
      EXPECT_THROWS(s.fsdp->clip_grad_norm(-1));
      EXPECT_THROWS(s.fsdp->clip_grad_norm(std::numeric_limits<double>::quiet_NaN()));
      EXPECT_EQ(s.fsdp->clip_grad_norm(1), 0.0);
      give(s["a"], at::full({16}, 2.0f));
      expect_same("a", s["a"].grad().clone(), at::full({16}, 2.0f));
      EXPECT_EQ(s.fsdp->clip_grad_norm(4), 8.0);
      EXPECT(at::allclose(s["a"].grad().clone(), at::ones({16})));
      for (int64_t place : {0, 15}) {
        s.sgd->zero_grad();
        at::Tensor gradient = at::ones({16});
        gradient[place] = std::numeric_limits<float>::quiet_NaN();
        give(s["a"], gradient);
        give(s["b"], at::ones({16}));
        EXPECT(std::isnan(s.fsdp->clip_grad_norm(100, kInfinity)));
      }
    });
  }
}

}  // namespace rebind::test
