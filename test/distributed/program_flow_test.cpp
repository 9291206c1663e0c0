// Programs that do more than one forward, backward and step: several models, several shardings, exceptions, graphs used again.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/sharded_bag.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using List = std::vector<std::shared_ptr<torch::optim::Optimizer>>;

Setup with_adam() {
  return net_with([](Net& net) { return List{std::make_shared<Adam>(net.parameters(), AdamOptions(1e-2))}; });
}
Setup with_momentum() {
  return net_with([](Net& net) { return List{std::make_shared<SGD>(net.parameters(), SGDOptions(0.1).momentum(0.9))}; });
}

FsdpOptions by_layer() {
  FsdpOptions options;
  options.unit_policy = UnitPolicy::by_module([](const std::string& name, const torch::nn::Module&) { return !name.empty(); });
  return options;
}

at::Tensor loss_on(Setup& setup, int rank, int step) {
  auto [input, target] = rows(rank, step, at::kFloat);
  return at::mse_loss(setup.forward(input), target);
}

void step_and_clear(Setup& setup) {
  for (auto& optimizer : setup.optimizers) optimizer->step();
  for (auto& optimizer : setup.optimizers) optimizer->zero_grad();
}

// The identity, whose backward throws while `armed`.
struct Fragile : torch::autograd::Function<Fragile> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool* armed) {
    context->saved_data["armed"] = reinterpret_cast<int64_t>(armed);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (*reinterpret_cast<bool*>(context->saved_data["armed"].toInt())) throw std::runtime_error("an accident in backward");
    return {gradients[0], at::Tensor()};
  }
};

}  // namespace

TEST_CASE("flow: two models in one prepare, each with its optimizer, stepped in turn", "[programs]") {
  // As a generator and a critic: the critic's loss also gives the generator gradients that are thrown away.
  const auto train = [](Setup& left, Setup& right, int rank, int step) {
    auto [input, target] = rows(rank, step, at::kFloat);
    const auto output = [&, &in = input] { return right.forward(at::constant_pad_nd(left.forward(in), {0, 2})); };
    at::mse_loss(output(), target).backward();
    right.optimizers[0]->step();
    left.optimizers[0]->zero_grad();
    right.optimizers[0]->zero_grad();
    at::mse_loss(output(), -target).backward();
    left.optimizers[0]->step();
    left.model->zero_grad();
    right.model->zero_grad();
  };
  Setup plain_left = with_adam(), plain_right = with_momentum();
  for (int step = 0; step < 4; ++step) train(plain_left, plain_right, 0, step);
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int, Group group) {
      Setup left = with_adam(), right = with_momentum();
      auto fsdp = prepare_fsdp({{"left", left.model.get()}, {"right", right.model.get()}},
                               {left.optimizers[0].get(), right.optimizers[0].get()}, group);
      EXPECT_OK(fsdp);
      // Equal rows on all ranks: the mean of equal gradients is exact.
      for (int step = 0; step < 4; ++step) train(left, right, 0, step);
      for (const auto& [name, setup] : {std::pair{"left.", &plain_left}, {"right.", &plain_right}}) {
        for (const auto& item : setup->model->named_parameters()) {
          auto whole = (*fsdp)->full_parameter(name + item.key());
          EXPECT_OK(whole);
          expect_same(name + item.key(), *whole, item.value().detach());
        }
      }
      EXPECT_OK((*fsdp)->restore());
      expect_same(snapshot(left), snapshot(plain_left));
      expect_same(snapshot(right), snapshot(plain_right));
    });
  }
}

TEST_CASE("flow: two shardings on one group, stepped in turn and in one graph", "[programs]") {
  const auto train = [](Setup& left, Setup& right, int step) {
    for (Setup* setup : {&left, &right}) {
      loss_on(*setup, 0, step).backward();
      step_and_clear(*setup);
    }
    auto [input, target] = rows(0, step + 50, at::kFloat);
    at::mse_loss(left.forward(input), right.forward(input)).backward();
    step_and_clear(left);
    step_and_clear(right);
  };
  Setup plain_left = with_adam(), plain_right = with_momentum();
  for (int step = 0; step < 3; ++step) train(plain_left, plain_right, step);
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int, Group group) {
      Setup left = with_adam(), right = with_momentum();
      auto left_fsdp = prepare_fsdp(*left.model, left.pointers(), group, by_layer());
      EXPECT_OK(left_fsdp);
      auto right_fsdp = prepare_fsdp(*right.model, right.pointers(), group);
      EXPECT_OK(right_fsdp);
      for (int step = 0; step < 3; ++step) train(left, right, step);
      expect_same(snapshot(left, **left_fsdp), snapshot(plain_left));
      expect_same(snapshot(right, **right_fsdp), snapshot(plain_right));
      EXPECT_OK((*left_fsdp)->restore());
      loss_on(right, 0, 9).backward();
      EXPECT_OK((*right_fsdp)->restore());
      expect_same(snapshot(left), snapshot(plain_left));
    });
  }
}

TEST_CASE("flow: an exception inside backward, then zero_grad, then a good iteration", "[programs]") {
  const Program program{.make = with_adam, .steps = 4};
  for (int world_size : {1, 2, 3}) {
    const Snapshot expected = reference_w(program, world_size);
    for (bool layers : {false, true}) {
      for (int place : {0, 1, 2}) {
        for (bool by_model : {false, true}) {
          if (world_size == 3 && by_model == layers) continue;  // enough of them
          CAPTURE(world_size, layers, place, by_model);
          run_ranks(world_size, [&](int rank, Group group) {
            Setup setup = with_adam();
            auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group, layers ? by_layer() : FsdpOptions());
            EXPECT_OK(fsdp);
            auto& net = dynamic_cast<Net&>(*setup.model);
            bool armed = false;
            // The later in forward, the fewer gradients there are when it throws: none, some of a unit, whole units.
            setup.forward = [&](const at::Tensor& input) {
              at::Tensor x = net.first(place == 0 ? Fragile::apply(input.detach().requires_grad_(), &armed) : input);
              if (place == 1) x = Fragile::apply(x, &armed);
              x = net.second(at::tanh(x)) * net.scale;
              return place == 2 ? Fragile::apply(x, &armed) : x;
            };
            for (int step = 0; step < program.steps; ++step) {
              armed = step % 2 == 1;
              if (armed) {
                EXPECT(contains(EXPECT_THROWS(loss_on(setup, rank, 70 + step).backward()), "an accident in backward"));
                by_model ? setup.model->zero_grad() : setup.optimizers[0]->zero_grad();
                armed = false;
              }
              loss_on(setup, rank, step).backward();
              EXPECT_EQ((*fsdp)->stats().live_bytes, 0);
              step_and_clear(setup);
            }
            expect_same(snapshot(setup, **fsdp), expected);
          });
        }
      }
    }
  }
}

TEST_CASE("flow: what an exception in backward left is used as in the plain program", "[programs]") {
  // Gradients that arrived before the accident: read, added to, or stepped with.
  for (int use : {0, 1, 2, 3}) {
    const auto run = [&](Setup& setup) {
      auto& net = dynamic_cast<Net&>(*setup.model);
      bool armed = true;
      setup.forward = [&](const at::Tensor& input) {
        return net.second(Fragile::apply(at::tanh(net.first(input)), &armed)) * net.scale;
      };
      EXPECT_THROWS(loss_on(setup, 0, 0).backward());
      armed = false;
      EXPECT(net.second->weight.grad().defined());
      if (use == 0) loss_on(setup, 0, 1).backward();
      if (use == 1) net.second->weight.mutable_grad().mul_(2);
      if (use == 2) net.second->weight.mutable_grad().narrow(0, 1, 2).zero_();
      step_and_clear(setup);
      loss_on(setup, 0, 2).backward();
      step_and_clear(setup);
    };
    Setup plain = with_adam();
    run(plain);
    for (int world_size : {1, 2}) {
      for (bool layers : {false, true}) {
        CAPTURE(use, world_size, layers);
        run_ranks(world_size, [&](int, Group group) {
          Setup setup = with_adam();
          auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group, layers ? by_layer() : FsdpOptions());
          EXPECT_OK(fsdp);
          run(setup);
          expect_same(snapshot(setup, **fsdp), snapshot(plain));
        });
      }
    }
  }
}

TEST_CASE("flow: one graph, three backwards", "[programs]") {
  const auto run = [](Setup& setup) {
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = loss_on(setup, 0, step);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward({}, true);
      (loss * 2).backward();
      step_and_clear(setup);
    }
  };
  Setup plain = with_momentum();
  run(plain);
  for (int world_size : {1, 2}) {
    for (bool layers : {false, true}) {
      run_ranks(world_size, [&](int, Group group) {
        Setup setup = with_momentum();
        auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group, layers ? by_layer() : FsdpOptions());
        EXPECT_OK(fsdp);
        run(setup);
        expect_same(snapshot(setup, **fsdp), snapshot(plain));
      });
    }
  }
}

TEST_CASE("flow: two graphs made before either backward, taken backwards in the order made", "[programs]") {
  const auto run = [](Setup& setup, int rank) {
    for (int step = 0; step < 4; ++step) {
      const at::Tensor first = loss_on(setup, rank, step), second = loss_on(setup, rank, step + 20);
      first.backward();
      second.backward();
      step_and_clear(setup);
    }
  };
  Setup plain = with_adam();
  run(plain, 0);
  run_ranks(2, [&](int, Group group) {
    Setup setup = with_adam();
    auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group, by_layer());
    EXPECT_OK(fsdp);
    run(setup, 0);
    expect_same(snapshot(setup, **fsdp), snapshot(plain));
  });
}

TEST_CASE("flow: a graph made before prepare is taken backwards after it", "[programs]") {
  Setup plain = with_momentum();
  loss_on(plain, 0, 0).backward();
  step_and_clear(plain);
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](int, Group group) {
      Setup setup = with_momentum();
      const at::Tensor loss = loss_on(setup, 0, 0);
      auto fsdp = prepare_fsdp(*setup.model, setup.pointers(), group);
      EXPECT_OK(fsdp);
      loss.backward();
      step_and_clear(setup);
      expect_same(snapshot(setup, **fsdp), snapshot(plain));
    });
  }
}

TEST_CASE("flow: a gradient seen under another dtype is written element by element, not as a number", "[programs]") {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [](int, Group group) {
      Bag model({{"a", {16}}});
      SGD sgd(model.parameters(), 1);
      auto fsdp = prepare_fsdp(model, {&sgd}, group);
      EXPECT_OK(fsdp);
      model["a"].sum().backward();
      model["a"].grad().view(at::kInt).fill_(0x40400000);  // the bits of 3.0f
      expect_same("a.grad", model["a"].grad().clone(), at::full({16}, 3.0f));
    });
  }
}

TEST_CASE("flow: buffers of every kind survive a prepare on all ranks", "[programs]") {
  for (int world_size : {1, 2}) {
    const auto errors = run_ranks_errors(world_size, [](int rank, Group group) {
      Bag model({{"a", {5}}});
      model.register_buffer("count", at::full({}, rank, at::kLong));
      model.register_buffer("flags", at::full({3}, rank == 0, at::kBool));
      model.register_buffer("empty", at::ones({0}));
      model.register_buffer("transposed", (at::arange(6) + rank).view({2, 3}).t());
      model.register_buffer("expanded", (at::arange(3) + rank).expand({4, 3}));
      auto fsdp = prepare_fsdp(model, Optimizers{}, group);
      EXPECT_OK(fsdp);
      const auto buffers = model.named_buffers();
      EXPECT_EQ(buffers["count"].item<int64_t>(), 0);
      expect_same("flags", buffers["flags"], at::ones({3}, at::kBool));
      expect_same("transposed", buffers["transposed"], at::arange(6).view({2, 3}).t());
      expect_same("expanded", buffers["expanded"], at::arange(3).expand({4, 3}));
    });
    for (const std::string& error : errors) CHECK(error == "");
  }
}

}  // namespace rebind::test
