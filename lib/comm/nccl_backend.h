// NCCL as a c10d backend, where it is built in (REBIND_HAS_NCCL).
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace rebind::comm {

#ifdef REBIND_HAS_NCCL
constexpr bool has_nccl_backend() { return true; }
#else
constexpr bool has_nccl_backend() { return false; }
#endif

// Collective, blocking. Throws what NCCL throws; without NCCL a c10::Error (ask has_nccl_backend first).
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                                    std::chrono::milliseconds timeout);

#ifndef REBIND_HAS_NCCL
inline c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                           std::chrono::milliseconds) {
  TORCH_CHECK(false, "rebind was built without NCCL");
}
#endif

}  // namespace rebind::comm
