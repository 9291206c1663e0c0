// What lib/runtime takes for granted about LibTorch, asserted against the installed one. A newer LibTorch that changes one of these
// fails here and not in a user's run.
#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "lib/runtime/operator_info.h"
#include "test/support/catch.h"

namespace rebind {
namespace {

at::Tensor leaf(std::vector<int64_t> sizes) { return at::ones(sizes).set_requires_grad(true); }

// Owns a storage that tells when it dies, like KeyedStorage.
struct TellingStorage final : c10::StorageImpl {
  TellingStorage(int64_t bytes, int* deaths) : c10::StorageImpl(use_byte_size_t(), bytes, at::getCPUAllocator()->allocate(bytes), nullptr, false), deaths_(deaths) {}
  ~TellingStorage() override { ++*deaths_; }
  int* deaths_;
};

at::Tensor telling_tensor(std::vector<int64_t> sizes, int* deaths) {
  const int64_t numel = c10::multiply_integers(sizes);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(c10::make_intrusive<TellingStorage>(numel * 4, deaths))),
      c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(at::kFloat));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(std::vector<std::string>* log) : log_(log) {}
  void operator()(const at::Tensor& tensor) override {
    log_->push_back(std::string(tensor.grad().defined() ? "grad" : "none") + (c10::GradMode::is_enabled() ? " create_graph" : "") +
                    (torch::autograd::get_current_graph_task_id() >= 0 ? "" : " outside"));
  }
  std::vector<std::string>* log_;
};

}  // namespace

TEST_CASE("facts: a storage's destructor runs inside zero_grad of optimizer and module", "[facts]") {
  int deaths = 0;
  torch::nn::Linear model(torch::nn::LinearOptions(5, 1).bias(false));
  torch::optim::SGD sgd(model->parameters(), 0.1);
  at::Tensor& grad = model->weight.mutable_grad();
  grad = telling_tensor({1, 5}, &deaths);
  sgd.zero_grad();
  CHECK(deaths == 1);
  grad = telling_tensor({1, 5}, &deaths);
  model->zero_grad();
  CHECK(deaths == 2);
  grad = telling_tensor({1, 5}, &deaths);
  sgd.zero_grad(/*set_to_none=*/false);
  model->zero_grad(/*set_to_none=*/false);
  CHECK(deaths == 2);
}

TEST_CASE("facts: a storage that throws on raw access keeps its size, and views of it can be made", "[facts]") {
  at::Tensor tensor = at::ones({4, 3});
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_("this is gone");
  CHECK_THROWS_WITH(tensor.data_ptr<float>(), Catch::Contains("this is gone"));
  CHECK_THROWS_WITH(tensor.data_ptr(), Catch::Contains("this is gone"));
  CHECK_THROWS_WITH(tensor.storage().data(), Catch::Contains("this is gone"));
  CHECK(storage->nbytes() == 48);
  CHECK(tensor.t().narrow(0, 1, 2).sizes() == at::IntArrayRef({2, 4}));
}

TEST_CASE("facts: set_data keeps the tensor, its version, its hooks, its requires_grad and its gradient", "[facts]") {
  at::Tensor weight = leaf({3});
  std::vector<std::string> log;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountingHook>(&log));
  weight.mutable_grad() = at::ones({3});
  {
    at::NoGradGuard no_grad;
    weight.add_(1);
  }
  const auto version = weight._version();
  const c10::TensorImpl* impl = weight.unsafeGetTensorImpl();
  weight.set_data(at::zeros({3}));
  CHECK(weight.unsafeGetTensorImpl() == impl);
  CHECK(weight._version() == version);
  CHECK(weight.requires_grad());
  CHECK(weight.grad().defined());
  (weight * 2).sum().backward();
  CHECK(log == std::vector<std::string>{"grad"});
}

TEST_CASE("facts: post-accumulate hooks fire once a backward, also without a gradient, never under autograd::grad", "[facts]") {
  at::Tensor weight = leaf({3}), other = leaf({3});
  std::vector<std::string> log;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountingHook>(&log));
  (weight * weight + weight).sum().backward();
  CHECK(log == std::vector<std::string>{"grad"});
  log.clear();
  torch::autograd::grad({(weight * 2).sum()}, {weight});
  CHECK(log.empty());
  (weight * weight).sum().backward({}, false, /*create_graph=*/true);
  CHECK(log == std::vector<std::string>{"grad create_graph"});
  weight.mutable_grad().reset();  // it holds the graph, which holds weight
}

TEST_CASE("facts: queue_callback runs at the end of backward and passes its exception on", "[facts]") {
  struct Queueing final : torch::autograd::PostAccumulateGradHook {
    std::vector<std::string>* log;
    explicit Queueing(std::vector<std::string>* to) : log(to) {}
    void operator()(const at::Tensor&) override {
      log->push_back("hook");
      torch::autograd::Engine::get_default_engine().queue_callback([to = log] {
        to->push_back("end");
        TORCH_CHECK(to->size() < 4, "from the callback");
      });
    }
  };
  at::Tensor weight = leaf({3});
  std::vector<std::string> log;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Queueing>(&log));
  (weight * 2).sum().backward();
  CHECK(log == std::vector<std::string>{"hook", "end"});
  CHECK_THROWS_WITH((weight * 2).sum().backward(), Catch::Contains("from the callback"));
  CHECK_THROWS(torch::autograd::Engine::get_default_engine().queue_callback([] {}));
}

TEST_CASE("facts: while autograd accumulates, the current node is the parameter's AccumulateGrad", "[facts]") {
  struct Looking final : torch::autograd::PostAccumulateGradHook {
    bool* same;
    explicit Looking(bool* to) : same(to) {}
    void operator()(const at::Tensor& tensor) override {
      const auto node = torch::autograd::get_current_node();
      const auto* accumulate = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
      *same = accumulate != nullptr && accumulate->variable.is_same(tensor);
    }
  };
  at::Tensor weight = leaf({3});
  bool same = false;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Looking>(&same));
  (weight * 2).sum().backward();
  CHECK(same);
  CHECK(torch::autograd::get_current_graph_task_id() == -1);
}

TEST_CASE("facts: p, detach and views share a version counter, data() does not", "[facts]") {
  at::Tensor weight = leaf({3});
  const auto moved = [&](const at::Tensor& through) {
    const auto before = weight._version();
    through.unsafeGetTensorImpl()->bump_version();
    return weight._version() != before;
  };
  CHECK(moved(weight));
  CHECK(moved(weight.detach()));
  CHECK(moved(weight.detach().view({3, 1})));
  CHECK_FALSE(moved(weight.data()));
}

TEST_CASE("facts: schemas say what an operator writes", "[facts]") {
  const auto info = [](const char* name, const char* overload) {
    return runtime::info_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
  };
  CHECK(info("aten::add_", "Tensor").writes == 1);
  CHECK(info("aten::addcdiv_", "").writes == 1);
  CHECK(info("aten::mm", "").writes == 0);
  CHECK(info("aten::mm", "out").writes == 4);
  CHECK(info("aten::_foreach_add_", "Scalar").writes == 1);
  CHECK(info("aten::set_", "source_Tensor").special == runtime::Special::kReplace);
  CHECK(info("aten::t_", "").special == runtime::Special::kReplace);
  CHECK(info("aten::resize_", "").special == runtime::Special::kReplace);
  CHECK(info("aten::detach_", "").special == runtime::Special::kNone);
  CHECK(info("aten::sum", "").reduction);
  CHECK(info("aten::linalg_vector_norm", "").reduction);
  CHECK(info("aten::max", "").reduction);
  CHECK(info("aten::dot", "").reduction);
  CHECK_FALSE(info("aten::mul", "Tensor").reduction);
  CHECK_FALSE(info("aten::addcmul_", "").reduction);
}

TEST_CASE("facts: a step skips a parameter without a gradient, and takes one of zero elements", "[facts]") {
  at::Tensor weight = leaf({1}), empty = leaf({0});
  torch::optim::Adam adam({weight, empty}, torch::optim::AdamOptions(0.1));
  empty.mutable_grad() = at::zeros({0});
  adam.step();
  CHECK(weight.item<float>() == 1.0f);
  CHECK(adam.state().size() == 1);
  CHECK(static_cast<torch::optim::AdamParamState&>(*adam.state().begin()->second).step() == 1);
}

TEST_CASE("facts: the infinity norm of an empty gradient throws in LibTorch's clipping", "[facts]") {
  at::Tensor empty = leaf({0});
  empty.mutable_grad() = at::zeros({0});
  CHECK_THROWS(torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{empty}, 1, std::numeric_limits<double>::infinity()));
}

TEST_CASE("facts: no operator of LibTorch has a kernel of its own for the key of the fallback", "[facts]") {
  int kernels = 0;
  for (const char* name : {"aten::mm", "aten::add_", "aten::native_layer_norm", "aten::embedding", "aten::_softmax"}) {
    for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
      if (op.name != name) continue;
      const auto handle = c10::Dispatcher::singleton().findOp(op);
      kernels += handle->hasKernelForDispatchKey(c10::DispatchKey::Fake);
    }
  }
  CHECK(kernels == 0);
}

}  // namespace rebind
