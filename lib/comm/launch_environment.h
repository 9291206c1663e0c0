// Who this process is, from the variables its launcher set. Pure: a getter in, a value or an error out.
//
//   auto launch = comm::read_launch_environment([](const char* name) { return std::getenv(name); });
//
// Understood: torchrun, and by-hand starts with its RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Other launchers with more than
// one task are refused by name, never taken for a single process.
#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace rebind::comm {

struct LaunchEnvironment {
  int rank = 0, world_size = 1, local_rank = 0;
  std::string master_address;  // empty at world size 1
  uint16_t master_port = 0;
  bool agent_serves_store = false;  // torchrun's agent, else rank 0
  bool all_local = false;           // every rank is on this host
  std::string key_prefix;           // keeps the keys of runs and restarts that meet in one store apart

  bool operator==(const LaunchEnvironment&) const = default;
};

// InvalidArgument: half-set, non-numeric or contradictory variables; Unimplemented: another launcher. Messages name the variables.
absl::StatusOr<LaunchEnvironment> read_launch_environment(const std::function<const char*(const char*)>& get);

}  // namespace rebind::comm
