#include "lib/comm/solo_backend.h"

#include <ATen/core/ivalue_inl.h>

#include <utility>

namespace rebind::comm {
namespace {

c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> result) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::move(result)));
  return c10d::Work::create_from_future(future);
}

}  // namespace

c10::intrusive_ptr<c10d::Work> SoloBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) {
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> SoloBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) {
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> SoloBackend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions&) {
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> SoloBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                      std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) {
  for (size_t i = 0; i < inputs.size(); ++i) outputs.at(i).at(0).copy_(inputs[i]);
  return done(inputs);
}

c10::intrusive_ptr<c10d::Work> SoloBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions&) {
  output.view_as(input).copy_(input);
  return done({output});
}

c10::intrusive_ptr<c10d::Work> SoloBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions&) {
  output.view_as(input).copy_(input);
  return done({output});
}

c10::intrusive_ptr<c10d::Work> SoloBackend::barrier(const c10d::BarrierOptions&) { return done({}); }

}  // namespace rebind::comm
