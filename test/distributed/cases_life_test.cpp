// The life of a program around the sharding: cases F4 to F9, F15, F16.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/cloneable.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/short_forms.h"
#include "test/support/training.h"

namespace rebind::test {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;

TEST_CASE("F4: a weight used directly, a graph used twice, a loss on a kept intermediate", "[cases]") {
  // A forward that goes around modules: functional calls, views, a transposed weight, a slice.
  const auto make = [] {
    Setup setup = net_with_momentum();
    auto net = std::dynamic_pointer_cast<Net>(setup.model);
    setup.forward = [net](const at::Tensor& input) {
      const at::Tensor hidden = at::tanh(at::linear(input, net->first->weight, net->first->bias));
      const at::Tensor kept = net->second->weight.t().narrow(0, 0, 7);
      const at::Tensor output = at::addmm(net->second->bias, hidden, kept) * net->scale.squeeze() + hidden.slice(1, 0, 3) * 0.1;
      (output.sum() * 0.01).backward({}, /*retain_graph=*/true);
      return output;
    };
    return setup;
  };
  for (int world_size : {1, 2, 3}) {
    const Program program{.make = make, .steps = 4, .prepare_at = 1};
    const Snapshot expected = reference(program, 1);
    if (world_size == 1) {
      run_ranks(1, [&](int rank, Group group) {
        Trained trained = train_sharded(program, rank, group);
        expect_same(snapshot(trained.setup, *trained.fsdp), expected);
      });
      continue;
    }
    // Two backwards a step: REF-W of them adds the ranks' sums, the sharding sums each backward over the ranks. Equal up to rounding.
    const Snapshot expected_w = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_close(snapshot(trained.setup, *trained.fsdp), expected_w, 1e-6);
    });
  }
}

TEST_CASE("F5: a clone is plain, whole and independent", "[cases]") {
  struct Block : torch::nn::Cloneable<Block> {
    Block() { reset(); }
    void reset() override { weight = register_parameter("weight", at::ones({5, 3})); }
    at::Tensor weight;
  };
  run_ranks(2, [](int, Group group) {
    Block model;
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    auto copy = std::dynamic_pointer_cast<Block>(model.clone());
    (model.weight * 2).sum().backward();
    sgd.step();
    expect_same("model", *fsdp->full_parameter("weight"), at::full({5, 3}, -1.0f));
    EXPECT_EQ(copy->weight.data_ptr<float>()[14], 1.0f);
    EXPECT_OK(prepare_fsdp(*copy, Optimizers{}, group));
  });
}

TEST_CASE("F5: Module::to is refused and undone, and the model trains on", "[cases][tripwire]") {
  Program program{.make = net_with_momentum, .steps = 5};
  const Snapshot expected = reference_w(program, 2);
  run_ranks(2, [&](int rank, Group group) {
    Program first = program;
    first.steps = 2;
    Trained trained = train_sharded(first, rank, group);
    Setup& setup = trained.setup;
    const std::string text = EXPECT_THROWS(setup.model->to(at::kHalf));
    EXPECT(contains(text, "parameter 'first.weight': its data was replaced behind the sharding (Module::to, set_data, t_, torch::load, assigning to "
                          "data); the replacement was undone and the sharded values kept. Call fsdp->restore() first"));
    for (const at::Tensor& parameter : setup.model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    setup.model->to(at::kFloat);  // changes nothing, as in the plain program
    for (int step = 2; step < 5; ++step) {
      loss_on(setup, rank, step).backward();
      setup.optimizers[0]->step();
      setup.optimizers[0]->zero_grad();
    }
    expect_same(snapshot(setup, *trained.fsdp), expected);
  });
}

TEST_CASE("F5: data replaced in a model of one parameter is noticed in the next backward", "[cases][tripwire]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {5}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    model["a"].set_data(at::zeros({5}));
    const std::string text = EXPECT_THROWS((model["a"] * 2).sum().backward());
    EXPECT(contains(text, "parameter 'a': its data was replaced behind the sharding"));
    expect_same("a", model["a"].detach().clone(), at::ones({5}));
    model.zero_grad();
    model["a"].set_data(at::zeros({5}));
    EXPECT_OK(fsdp->full_parameter("a"));
    const auto whole = [&] { return fsdp->full_parameters(); };
    EXPECT_THROWS(whole());
  });
}

TEST_CASE("F6: an average kept by hand, and writing it back", "[cases]") {
  for (int world_size : {1, 2, 3}) {
    Program program{.make = net_with_momentum, .steps = 5};
    program.zero_grad = [](Setup& setup, int step) {
      at::NoGradGuard no_grad;
      for (at::Tensor& parameter : setup.model->parameters()) {
        if (step % 2 == 1) parameter.lerp_(at::full_like(parameter, 0.25), 0.5);
        if (step == 3) parameter.copy_(parameter.clone().clamp_(-0.2, 0.2));
      }
      setup.optimizers[0]->zero_grad();
    };
    const Snapshot expected = reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      Trained trained = train_sharded(program, rank, group);
      expect_same(snapshot(trained.setup, *trained.fsdp), expected);
    });
  }
}

TEST_CASE("F6: an exponential average read from the parameters is REF's", "[cases]") {
  for (int world_size : {2, 3}) {
    Program program{.make = net_with_momentum, .steps = 5};
    const auto averaging = [](std::vector<at::Tensor>& average) {
      return [&average](Setup& setup, int) {
        at::NoGradGuard no_grad;
        const auto parameters = setup.model->parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          if (average.size() <= i) average.push_back(at::zeros_like(parameters[i]));
          average[i].mul_(0.9).add_(parameters[i], 0.1);
        }
        setup.optimizers[0]->zero_grad();
      };
    };
    std::vector<at::Tensor> expected;
    program.zero_grad = averaging(expected);
    reference_w(program, world_size);
    run_ranks(world_size, [&](int rank, Group group) {
      std::vector<at::Tensor> average;
      Program mine = program;
      mine.zero_grad = averaging(average);
      Trained trained = train_sharded(mine, rank, group);
      EXPECT_EQ(average.size(), expected.size());
      for (size_t i = 0; i < average.size(); ++i) expect_same("average", average[i], expected[i]);
    });
  }
}

TEST_CASE("F6: a write that differs by rank leaves one value, its owner's", "[cases]") {
  run_ranks(2, [](int rank, Group group) {
    Bag model({{"a", {16}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    {
      at::NoGradGuard no_grad;
      model["a"].fill_(rank + 1);
    }
    at::Tensor expected = at::ones({16});
    expected.narrow(0, 8, 8).fill_(2);
    expect_same("a", model["a"].detach().clone(), expected);
  });
}

TEST_CASE("F7: a second prepare is refused by name, and the model trains on", "[cases]") {
  run_ranks(2, [](int rank, Group group) {
    Setup setup = net_with_momentum();
    auto fsdp = prepare(*setup.model, setup.pointers(), group);
    auto again = prepare_fsdp(*setup.model, setup.pointers(), group);
    EXPECT_EQ(again.status().ToString(), std::string("FAILED_PRECONDITION: prepare_fsdp, rank 0: parameter 'scale': it is sharded already. "
                                                     "Use Fsdp::of(model) to get its handle, or restore() before preparing it again."));
    loss_on(setup, rank, 0).backward();
    setup.optimizers[0]->step();
    EXPECT_EQ(fsdp->stats().reduce_scatters, 1);
  });
}

TEST_CASE("F8: NoGrad evaluation, an early return, an exception in forward, a break: the next iteration is right", "[cases]") {
  Program program{.make = net_with_momentum, .steps = 6, .prepare_at = 1};
  const Snapshot expected = reference_w(program, 2);
  program.zero_grad = [](Setup& setup, int step) {
    setup.optimizers[0]->zero_grad();
    auto net = std::dynamic_pointer_cast<Net>(setup.model);
    auto [input, target] = rows(0, step, at::kFloat);
    {
      at::NoGradGuard no_grad;
      setup.forward(input).sum();
    }
    {
      c10::InferenceMode inference;
      setup.forward(input).sum();
    }
    net->first(input);        // an early return: a graph without a backward
    setup.forward(input);     // the same with a whole graph
    try {
      net->second(net->first(input.narrow(1, 0, 4)));  // throws: wrong size
      fail(__FILE__, __LINE__, "no exception");
    } catch (const c10::Error&) {
    }
  };
  run_ranks(2, [&](int rank, Group group) {
    Program mine = program;
    Trained trained{mine.make(), nullptr};
    trained.fsdp = prepare(*trained.setup.model, trained.setup.pointers(), group);
    for (int step = 0; step < program.steps; ++step) {
      loss_on(trained.setup, rank, step).backward();
      EXPECT_EQ(trained.fsdp->stats().live_bytes, 0);  // the steady state
      trained.setup.optimizers[0]->step();
      program.zero_grad(trained.setup, step);
    }
    expect_same(snapshot(trained.setup, *trained.fsdp), expected);
  });
}

TEST_CASE("F9: a backward through a graph older than the step fails where LibTorch's fails", "[cases]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"a", {5}}, {"b", {1}}});  // b's shard is empty on most ranks
      Adam adam(model.parameters(), AdamOptions(0.1));
      auto fsdp = prepare(model, {&adam}, group);
      const at::Tensor loss = (model["a"] * model["a"]).sum() * (model["b"] * model["b"]).sum();
      loss.backward({}, /*retain_graph=*/true);
      adam.step();
      EXPECT(contains(EXPECT_THROWS(loss.backward()), "modified by an inplace operation"));
    });
    // SGD writes behind LibTorch's version counters: the plain program goes on with the new weights.
    run_ranks(world_size, [](int, Group group) {
      Bag plain({{"a", {5}}}), model({{"a", {5}}});
      SGD plain_sgd(plain.parameters(), 0.1), sgd(model.parameters(), 0.1);
      auto fsdp = prepare(model, {&sgd}, group);
      for (auto& [bag, optimizer] : {std::pair<Bag*, SGD*>{&plain, &plain_sgd}, {&model, &sgd}}) {
        const at::Tensor loss = ((*bag)["a"] * (*bag)["a"]).sum();
        loss.backward({}, true);
        optimizer->step();
        loss.backward();
        optimizer->step();
      }
      expect_same("a", *fsdp->full_parameter("a"), plain["a"].detach());
    });
  }
}

TEST_CASE("F15: an embedding with max_norm is refused by name", "[cases][tripwire]") {
  run_ranks(2, [](int, Group group) {
    Bag model({{"a", {7, 4}}});
    SGD sgd(model.parameters(), 1);
    auto fsdp = prepare(model, {&sgd}, group);
    at::NoGradGuard no_grad;
    const std::string text = EXPECT_THROWS(at::embedding_renorm_(model["a"], at::tensor({1, 2}), 0.5, 2));
    EXPECT(contains(text, "parameter 'a': max_norm renormalises other rows on each rank. Build the embedding without max_norm."));
  });
}

TEST_CASE("F16: torch::load into the model is refused, and right inside full_parameters", "[cases][tripwire]") {
  run_ranks(2, [](int, Group group) {
    auto plain = std::make_shared<Net>();
    randomize(*plain, 77);
    std::stringstream file;
    torch::serialize::OutputArchive out;
    plain->save(out);
    out.save_to(file);
    const std::string bytes = file.str();
    const auto load = [&](Net& net) {
      std::istringstream stream(bytes);
      torch::serialize::InputArchive in;
      in.load_from(stream);
      net.load(in);
    };
    Setup setup = net_with_momentum();
    auto& net = dynamic_cast<Net&>(*setup.model);
    auto fsdp = prepare(net, setup.pointers(), group);
    const Snapshot before = snapshot(setup, *fsdp);
    EXPECT(contains(EXPECT_THROWS(load(net)), "parameter 'scale': it would replace the memory or the shape of a sharded tensor"));
    expect_same(snapshot(setup, *fsdp), before);
    {
      auto whole = fsdp->full_parameters(/*write_back=*/true);
      load(net);
      EXPECT_OK(whole.close());
    }
    for (const auto& item : plain->named_parameters()) {
      expect_same(item.key(), *fsdp->full_parameter(item.key()), item.value().detach());
      expect_same(item.key(), net.named_parameters()[item.key()].detach().clone(), item.value().detach());
    }
  });
}

}  // namespace rebind::test
