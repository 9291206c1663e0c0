// The key-value store of a launch, at MASTER_ADDR:MASTER_PORT, within a deadline.
#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lib/comm/launch_environment.h"

namespace rebind::comm {

// Blocking. Rank 0 serves the store unless an agent does; the others connect, and try again until `timeout` if nobody listens yet.
//   Unavailable        the address cannot be resolved, or rank 0 cannot listen there
//   DeadlineExceeded   nobody answers there
absl::StatusOr<c10::intrusive_ptr<c10d::Store>> connect_master_store(const LaunchEnvironment& launch,
                                                                     std::chrono::milliseconds timeout);

}  // namespace rebind::comm
