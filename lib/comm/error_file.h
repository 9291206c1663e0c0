// For public calls whose error usually ends the program: it reaches the launcher on its way to the caller.
//
//   return comm::told_to_launcher(prepare(...));
#pragma once

#include <absl/status/statusor.h>

#include <utility>

#include "rebind/launch.h"

namespace rebind::comm {

template <class T>
absl::StatusOr<T> told_to_launcher(absl::StatusOr<T> result) {
  if (!result.ok()) write_error_file(result.status());
  return result;
}

}  // namespace rebind::comm
