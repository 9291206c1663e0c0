// A rank whose launcher was killed is told to end, instead of computing on, or waiting for its peers, with nobody to stop it.
//
//   if (absl::Status status = comm::end_with_parent(where); !status.ok()) return status;
//
// Limits: the kernel sends the signal when the *thread* that started this process ends, and forgets the request when the thread
// that made it ends. Children do not inherit it.
#pragma once

#include <absl/status/status.h>

#include "lib/base/error.h"

namespace rebind::comm {

// From now on this process gets SIGTERM when its parent ends. A signal that the program has already asked for stays.
//   Unavailable  the parent has ended before; seen where this process has loaded the library itself, not inherited it by fork
absl::Status end_with_parent(const Where& where);

}  // namespace rebind::comm
