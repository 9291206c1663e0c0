// The process group that a sharded model communicates over.
//
//   auto group = rebind::init_process_group();       // the launcher's environment; one process without it
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
  // init_process_group alone, at more than one rank, under torchrun, Open MPI, Slurm or PMI: when the launcher is killed, so that
  // it cannot end its ranks, the kernel sends this process SIGTERM (PR_SET_PDEATHSIG). Otherwise ranks go on, or wait for a peer
  // until their time-out, holding memory and ports. The parent counts as the launcher: turn it off for a rank that is started
  // through something that ends before the rank does, or that should outlive its launcher. It lasts as long as the thread that
  // made the call. A parent-death signal that the program has set itself stays as it is.
  bool end_with_launcher = true;
};

// Collective, blocking: joins the ranks that the launcher's environment names. The first of these that is set decides:
//   RANK and WORLD_SIZE                             torchrun, or a start by hand
//   OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE   Open MPI
//   SLURM_PROCID and SLURM_NTASKS, if more than 1   Slurm
//   PMI_RANK and PMI_SIZE                           MPICH, Intel MPI
//   none of them                                    a group of one process, no sockets
// The ranks meet at MASTER_ADDR:MASTER_PORT. Without these, Slurm's meet on the first host of the step; those of Open MPI and PMI
// on 127.0.0.1 if all run on one host; at a port that follows from the launcher's job id.
// Errors (also written to torchrun's error file, see rebind/launch.h):
//   InvalidArgument   half-set, non-numeric or contradictory variables, no master (the message names them); an unknown backend
//   Unimplemented     a backend that is not built in
//   Unavailable, DeadlineExceeded   the master or a rank did not answer within `timeout` (the message names it); the launcher has
//                     ended
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> init_process_group(const ProcessGroupOptions& options = {});

// Collective, blocking: a group over a store that the caller made. Every rank calls it with its own 0 <= rank < world_size.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> make_process_group(c10::intrusive_ptr<c10d::Store> store, int rank,
                                                                          int world_size, const ProcessGroupOptions& options = {});

}  // namespace rebind
