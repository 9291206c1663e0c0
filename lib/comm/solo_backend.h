// The backend of a group of one rank: no sockets, no threads. A sum over one rank is the tensor itself.
//
// It serves a user's own collectives (averaging a loss for display), so that a program runs unchanged with one process.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace rebind::comm {

class SoloBackend : public c10d::Backend {
 public:
  SoloBackend() : Backend(/*rank=*/0, /*size=*/1) {}
  // NOLINTNEXTLINE(readability-const-return-type): the base class's
  const std::string getBackendName() const override { return "rebind_solo"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;
};

}  // namespace rebind::comm
