// The process group that a sharded model communicates over.
//
//   auto group = rebind::init_process_group();       // torchrun's environment; one process without it
//   if (!group.ok()) { std::cerr << group.status() << "\n"; return 2; }
//
// A group of more than one rank ignores SIGPIPE in this process, as Python does, unless the program has a handler for it: a peer
// that died is an error with its rank then, not the end of this process.
//
// Ranks that are threads of one process (tests) share a c10d::HashStore and call make_process_group.
#pragma once

#include <absl/status/statusor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace rebind {

struct ProcessGroupOptions {
  // "gloo" (CPU tensors), "nccl" (CUDA tensors, if rebind was built with REBIND_NCCL) or "auto": gloo.
  std::string backend = "auto";
  // The longest that joining the group, or one collective of it, may take.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

// Collective, blocking: joins the ranks that the launcher's environment names.
//   RANK and WORLD_SIZE (torchrun)   that rank; the store is at MASTER_ADDR:MASTER_PORT
//   none of them                     a group of one process, no sockets
// Errors:
//   InvalidArgument   half-set, non-numeric or contradictory variables (the message names them); an unknown backend
//   Unimplemented     a backend that is not built in; a launcher other than torchrun
//   Unavailable, DeadlineExceeded   the master or a rank did not answer within `timeout` (the message names it)
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> init_process_group(const ProcessGroupOptions& options = {});

// Collective, blocking: a group over a store that the caller made. Every rank calls it with its own 0 <= rank < world_size.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> make_process_group(c10::intrusive_ptr<c10d::Store> store, int rank,
                                                                          int world_size,
                                                                          const ProcessGroupOptions& options = {});

}  // namespace rebind
