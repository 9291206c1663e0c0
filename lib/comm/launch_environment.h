// Who this process is, from the variables its launcher set. Pure: a getter in, a value or an error out.
//
//   auto launch = comm::read_launch_environment([](const char* name) { return std::getenv(name); });
//
// The first of these that speaks decides:
//   RANK, WORLD_SIZE                              torchrun, or a start by hand
//   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE    Open MPI
//   SLURM_PROCID, SLURM_NTASKS > 1                Slurm (srun)
//   PMI_RANK, PMI_SIZE                            MPICH, Intel MPI
//   none                                          one process
//
// Note: Master. Rank 0 has to be found by the others at one address and port. MASTER_ADDR and MASTER_PORT go first. Without them:
// Slurm's ranks meet on the first host of the step's node list; ranks of Open MPI and PMI that all run on one host meet at
// 127.0.0.1; and the port, from 10000 to 29999, is a hash of the launcher's job id, so that all ranks of a job find the same one
// and two jobs on a host seldom do. What has no deterministic answer is an error that names the variables: a guess would show as
// a time-out only.
#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace rebind::comm {

struct LaunchEnvironment {
  std::string launcher;  // "torchrun", "Open MPI", "Slurm", "PMI"; empty: none, or RANK and WORLD_SIZE set by hand
  int rank = 0, world_size = 1, local_rank = 0;
  std::string master_address;  // empty at world size 1
  uint16_t master_port = 0;
  bool agent_serves_store = false;  // torchrun's agent, else rank 0
  bool all_local = false;           // every rank is on this host
  std::string key_prefix;           // keeps the keys of runs and restarts that meet in one store apart

  bool operator==(const LaunchEnvironment&) const = default;
};

// InvalidArgument: half-set, non-numeric or contradictory variables, or no master. Messages name the variables.
absl::StatusOr<LaunchEnvironment> read_launch_environment(const std::function<const char*(const char*)>& get);

}  // namespace rebind::comm
