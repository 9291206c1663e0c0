#include "lib/runtime/replicas.h"

#include <ATen/Functions.h>
#include <absl/strings/str_cat.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "lib/comm/rank_order_sum.h"
#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

void put_back(Replica& replica) {
  if (std::exchange(replica.is_aside, false)) replica.tensor.mutable_grad() = std::exchange(replica.older, at::Tensor());
}

void set_aside(const std::shared_ptr<Sharding>& sharding, Replica& replica) {
  const at::Tensor& tensor = replica.tensor;
  const KeyedStorage* storage = tensor.grad().defined() ? KeyedStorage::of(tensor.grad()) : nullptr;
  if (storage != nullptr) storage->throw_message();
  replica.older = tensor.grad();
  replica.is_aside = true;
  tensor.mutable_grad().reset();
  // autograd::grad runs this hook and accumulates nothing; an exception may end the backward before it does.
  std::shared_ptr<void> end(nullptr, [weak = std::weak_ptr(sharding), &replica](void*) {
    const std::shared_ptr<Sharding> alive = weak.lock();
    if (alive == nullptr) return;
    std::lock_guard lock(alive->mutex);
    put_back(replica);
  });
  torch::autograd::Engine::get_default_engine().queue_callback([end] {});
}

class AfterHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  // The tensor may outlive the sharding: then it is an ordinary one again.
  AfterHook(std::weak_ptr<Sharding> sharding, Replica& replica) : sharding_(std::move(sharding)), replica_(&replica) {}

  void operator()(const at::Tensor& tensor) override {
    const std::shared_ptr<Sharding> sharding = sharding_.lock();
    if (sharding == nullptr || sharding->restored) return;
    std::lock_guard lock(sharding->mutex);
    // A tensor that was frozen at prepare, where it had no gradient: all of this one is new.
    if (!replica_->hook) add_replica_hook(sharding, *replica_);
    const bool is_new = tensor.grad().defined() && !(replica_->is_aside && tensor.grad().is_same(replica_->older));
    at::Tensor gradient = is_new ? std::exchange(tensor.mutable_grad(), at::Tensor()) : at::Tensor();
    put_back(*replica_);
    if (gradient.defined()) sharding->replica_fired(*replica_, std::move(gradient));
  }

 private:
  const std::weak_ptr<Sharding> sharding_;
  Replica* const replica_;
};

}  // namespace

void add_replica_hook(const std::shared_ptr<Sharding>& sharding, Replica& replica) {
  if (!replica.tensor.requires_grad()) return;
  replica.hook = replica.tensor.register_hook([weak = std::weak_ptr(sharding), &replica](const at::Tensor&) {
    const std::shared_ptr<Sharding> alive = weak.lock();
    if (alive == nullptr || alive->restored || !alive->replicas_watched) return;
    std::lock_guard lock(alive->mutex);
    if (!replica.is_aside) set_aside(alive, replica);
  });
}

std::unique_ptr<torch::autograd::PostAccumulateGradHook> make_replica_hook(const std::shared_ptr<Sharding>& sharding, Replica& replica) {
  return std::make_unique<AfterHook>(sharding, replica);
}

void remove_replica_hooks(Replica& replica) {
  if (replica.hook) replica.tensor.remove_hook(*std::exchange(replica.hook, std::nullopt));
  if (torch::autograd::impl::get_autograd_meta(replica.tensor) == nullptr) return;
  const auto& after = torch::autograd::impl::post_acc_grad_hooks(replica.tensor);
  if (dynamic_cast<const AfterHook*>(after.get()) != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(replica.tensor, nullptr);
}

void Sharding::replica_fired(Replica& replica, at::Tensor gradient) {
  if (c10::GradMode::is_enabled()) {
    throw_error(where("backward(create_graph=true)"), absl::StrCat(replica.name, ": a gradient that has a graph cannot be averaged over the ranks"),
                "Use torch::autograd::grad for gradients of gradients");
  }
  if (gradient.layout() != at::kStrided) {
    throw_error(where("backward"), absl::StrCat(replica.name, ": its gradient is sparse, which cannot be averaged"),
                "Use the dense gradient (an embedding's sparse option off)");
  }
  begin_task();
  replica.pending = replica.pending.defined() ? replica.pending + gradient : std::move(gradient);
}

void Sharding::interrupt(Replica& replica) {
  if (!replica.pending.defined()) return;
  replica.pending.reset();
  replica.tensor.mutable_grad() = make_interrupted(
      replica.tensor, absl::StrCat("rank ", rank(), ": the gradient of ", replica.name,
                                   " is not averaged over the ranks: backward was interrupted. Call zero_grad() before going on."));
}

void Sharding::average(Replica& replica, int index) {
  at::NoGradGuard no_grad;
  const at::Tensor& tensor = replica.tensor;
  const at::Tensor gradient = std::exchange(replica.pending, at::Tensor());
  const at::ScalarType dtype = reduce_dtype(tensor.scalar_type());
  const int64_t numel = tensor.numel();
  at::Tensor all = at::zeros({world_size(), numel}, at::TensorOptions().dtype(dtype));
  if (gradient.defined()) all[rank()].copy_(gradient.reshape({-1}));
  const absl::Status status = communicator->all_gather(
      {.kind = comm::Kind::kAllGather, .unit = static_cast<uint32_t>(index) * 4 + 3, .epoch = epoch_,
       .name = absl::StrCat("gradient of ", replica.name)},
      all.data_ptr(), numel * static_cast<int64_t>(all.element_size()));
  if (!status.ok()) throw c10::Error(std::string(status.message()), nullptr);
  if (world_size() > 1) ++counts.all_reduces;
  at::Tensor mean = at::empty({numel}, all.options());
  const auto add_up = [&]<class T>(T divisor) {
    std::vector<const T*> parts;
    for (int r = 0; r < world_size(); ++r) parts.push_back(all.const_data_ptr<T>() + r * numel);
    comm::rank_order_sum(mean.mutable_data_ptr<T>(), parts, numel, divisor);
  };
  dtype == at::kDouble ? add_up(divide_factor) : add_up(static_cast<float>(divide_factor));
  mean = mean.view(tensor.sizes()).to(tensor.scalar_type());
  if (tensor.grad().defined()) {
    tensor.mutable_grad().add_(mean);
  } else {
    tensor.mutable_grad() = at::empty_like(tensor, tensor.options().requires_grad(false)).copy_(mean);
  }
}

}  // namespace rebind::runtime
