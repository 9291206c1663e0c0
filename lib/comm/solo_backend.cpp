#include "lib/comm/solo_backend.h"

#include <utility>

namespace rebind::comm {
namespace {

class Done : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> result) : result_(std::move(result)) { finish(); }
  std::vector<at::Tensor> result() override { return result_; }

 private:
  std::vector<at::Tensor> result_;
};

c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> result) { return c10::make_intrusive<Done>(std::move(result)); }

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

c10::intrusive_ptr<c10d::Work> SoloBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
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
