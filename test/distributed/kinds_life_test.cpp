// What else a program does with parameters of every kind: hand them out whole, clip, start from ranks that differ, freeze all.
#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "test/support/catch.h"
#include "test/support/plan_text.h"
#include "test/support/short_forms.h"

namespace rebind::test {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;

at::Tensor bytes(int64_t first) { return (at::arange(first, first + 19, at::kLong) * 37).to(at::kByte); }

// Every kind at once, integers first.
struct Kinds : Bag {
  explicit Kinds(int64_t seed = 1) {
    register_parameter("codes", bytes(seed), /*requires_grad=*/false);
    register_parameter("flags", at::arange(5) % (seed + 1) == 0, false);
    register_parameter("index", at::arange(seed, seed + 7, at::kLong), false);
    register_parameter("frozen", random_tensor({3, 5}, 10 + seed), false);
    register_parameter("turned", random_tensor({5, 3}, 20 + seed).t());
    register_parameter("image", random_tensor({2, 3, 2, 2}, 30 + seed).contiguous(at::MemoryFormat::ChannelsLast));
    register_parameter("double", random_tensor({9}, 40 + seed, at::kDouble));
    register_parameter("half", random_tensor({4, 4}, 50 + seed, at::kBFloat16));
    register_parameter("scalar", random_tensor({}, 60 + seed));
    register_parameter("none", at::zeros({0, 3}));
  }
  std::vector<at::Tensor> trained() {
    return {(*this)["turned"], (*this)["image"], (*this)["double"], (*this)["half"], (*this)["scalar"], (*this)["none"]};
  }
  // Uses all of them.
  at::Tensor loss(double factor) {
    Kinds& m = *this;
    const at::Tensor table = m["codes"].to(at::kFloat).index_select(0, m["index"].remainder(19)).masked_fill(m["flags"].any(), 2);
    at::Tensor sum = (at::linear(table.narrow(0, 0, 5).view({1, 5}), m["frozen"] + m["turned"])).sum().to(at::kDouble);
    for (const char* name : {"turned", "image", "double", "half", "scalar", "none"})
      sum = sum + (m[name].pow(2) * factor).sum().to(at::kDouble);
    return sum;
  }
};

Snapshot values_of(torch::nn::Module& model) {
  Snapshot values;
  for (const auto& item : model.named_parameters()) values[item.key()] = item.value().detach().clone();
  return values;
}

Snapshot values_of(torch::nn::Module& model, Fsdp& fsdp) {
  Snapshot values;
  for (const auto& item : model.named_parameters()) {
    auto whole = fsdp.full_parameter(item.key());
    EXPECT_OK(whole);
    values[item.key()] = *whole;
  }
  return values;
}

}  // namespace

TEST_CASE("kinds: each is the same through the window, whole, in full_parameters and restored", "[kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Kinds model;
      const Snapshot expected = values_of(model);
      SGD sgd(model.trained(), 0.1);
      auto fsdp = prepare(model, {&sgd}, group);
      poison_padding(*fsdp, model);
      expect_same(values_of(model), expected);
      expect_same(values_of(model, *fsdp), expected);
      {
        auto whole = fsdp->full_parameters();
        for (const auto& item : model.named_parameters()) {
          const at::Tensor& tensor = item.value();
          EXPECT(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr);
          expect_same(item.key(), tensor.detach(), expected.at(item.key()));
        }
        EXPECT_OK(whole.close());
      }
      EXPECT_OK(Fsdp::of(model));  // its first parameter is of bytes and has no gradient
      EXPECT_OK(fsdp->restore());
      expect_same(values_of(model), expected);
      EXPECT(!model["codes"].requires_grad() && !model["frozen"].requires_grad() && model["turned"].requires_grad());
    });
  }
}

TEST_CASE("kinds: what is written in full_parameters is kept, of each kind in its own order", "[kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Kinds model(1), other(2);
      const Snapshot expected = values_of(other);
      SGD sgd(model.trained(), 0.1);
      auto fsdp = prepare(model, {&sgd}, group);
      {
        auto whole = fsdp->full_parameters(/*write_back=*/true);
        at::NoGradGuard no_grad;
        for (const auto& item : model.named_parameters()) item.value().copy_(other[item.key()]);
        EXPECT_OK(whole.close());
      }
      expect_same(values_of(model), expected);
      EXPECT_OK(fsdp->restore());
      expect_same(values_of(model), expected);
    });
  }
}

TEST_CASE("kinds: a write to a window of each kind reaches the shards", "[kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      Kinds model(1), other(2);
      const Snapshot expected = values_of(other);
      SGD sgd(model.trained(), 0.1);
      auto fsdp = prepare(model, {&sgd}, group);
      {
        at::NoGradGuard no_grad;
        for (const auto& item : model.named_parameters()) item.value().copy_(other[item.key()]);
      }
      expect_same(values_of(model), expected);
      expect_same(values_of(model, *fsdp), expected);
    });
  }
}

TEST_CASE("kinds: ranks that start from other values become rank 0", "[kinds]") {
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](int rank, Group group) {
      Kinds model(1 + rank), first(1);
      SGD sgd(model.trained(), 0.1);
      auto fsdp = prepare(model, {&sgd}, group);
      expect_same(values_of(model), values_of(first));
    });
  }
}

TEST_CASE("kinds: without synchronisation, bytes that differ are named", "[kinds]") {
  const auto errors = run_ranks_errors(2, [](int rank, Group group) {
    Kinds model;
    if (rank == 1) model["codes"].index_put_({18}, 3);
    SGD sgd(model.trained(), 0.1);
    FsdpOptions options;
    options.sync_from_rank0 = false;
    prepare(model, {&sgd}, group, options);
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, Catch::Contains("parameter 'codes': rank 1 has other values than rank 0"));
}

TEST_CASE("kinds: all at once train as in one process, memory freed after every operator", "[kinds][parity]") {
  for (bool strict : {false, true}) {
    runtime::set_strict_for_tests(strict);
    for (int world_size : {1, 2, 3}) {
      Kinds plain;
      Adam reference(plain.trained(), AdamOptions(1e-2).amsgrad(true));
      for (int step = 0; step < 4; ++step) {
        reference.zero_grad();
        plain.loss(step % 2 == 0 ? 1 : -0.5).backward();  // of every rank: their mean is the same
        reference.step();
      }
      const Snapshot expected = values_of(plain);
      CAPTURE(strict, world_size);
      run_ranks(world_size, [&](int, Group group) {
        Kinds model;
        Adam adam(model.trained(), AdamOptions(1e-2).amsgrad(true));
        std::unique_ptr<Fsdp> fsdp;
        for (int step = 0; step < 4; ++step) {
          if (step == 1) {
            fsdp = prepare(model, {&adam}, group);
            poison_padding(*fsdp, model);
          }
          adam.zero_grad();
          model.loss(step % 2 == 0 ? 1 : -0.5).backward();
          adam.step();
        }
        if (group->getSize() != 3) expect_same(values_of(model, *fsdp), expected);  // a third is not exact
        expect_close(values_of(model, *fsdp), expected, 1e-2);
        EXPECT_OK(fsdp->restore());
        if (group->getSize() != 3) expect_same(values_of(model), expected);
      });
    }
    runtime::set_strict_for_tests(false);
  }
}

TEST_CASE("kinds: gradients of several dtypes and orders are clipped by the norm of all", "[kinds][clip]") {
  const auto give_twos = [](Kinds& model) {
    at::Tensor loss;
    for (const at::Tensor& parameter : model.trained()) {
      const at::Tensor term = (parameter * 2).sum().to(at::kDouble);
      loss = loss.defined() ? loss + term : term;
    }
    loss.backward();
  };
  Kinds plain;
  give_twos(plain);
  // 15 + 24 + 9 + 16 + 1 elements of 2: sqrt(260) = 16.1245...
  const double norm = torch::nn::utils::clip_grad_norm_(plain.trained(), 1.0);
  CHECK(std::abs(norm - 16.124515) < 1e-5);
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](int, Group group) {
      Kinds model;
      SGD sgd(model.trained(), 0.1);
      auto fsdp = prepare(model, {&sgd}, group);
      give_twos(model);
      EXPECT(std::abs(fsdp->clip_grad_norm(1000) - 16.124515) < 1e-5);
      EXPECT_EQ(torch::nn::utils::clip_grad_norm_(model.trained(), 1.0), norm);
      for (const char* name : {"turned", "image", "double", "half", "scalar", "none"}) {
        expect_same(name, *fsdp->full_gradient(name), plain[name].grad());
        expect_same(name, model[name].grad().clone(), plain[name].grad());
      }
      EXPECT(std::abs(fsdp->clip_grad_norm(0.5) - 1) < 1e-2);
      EXPECT(std::abs(model["double"].grad().index({0}).item<double>() - 1 / 16.124515) < 1e-3);
    });
  }
}

TEST_CASE("kinds: a model in which nothing is trained is sharded, used and restored", "[kinds]") {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](int, Group group) {
      torch::nn::Linear model(5, 3), twin(5, 3);
      randomize(*model, 1);
      randomize(*twin, 1);
      for (at::Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
      auto fsdp = prepare(*model, {}, group);
      const at::Tensor input = random_tensor({2, 5}, 3);
      expect_same("output", model->forward(input).detach(), twin->forward(input).detach());
      // The input's gradient goes through the frozen weight.
      const at::Tensor x = input.clone().set_requires_grad(true), y = input.clone().set_requires_grad(true);
      model->forward(x).sum().backward();
      twin->forward(y).sum().backward();
      expect_same("input's gradient", x.grad(), y.grad());
      EXPECT_EQ(fsdp->stats().reduce_scatters, 0);
      EXPECT_OK(fsdp->restore());
      expect_same("weight", model->weight, twin->weight.detach());
    });
  }
}

}  // namespace rebind::test
