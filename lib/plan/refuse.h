// What is not supported yet, or is a mistake: each is refused by name before anything is touched.
//
// In: options, a census. Out: OK, or the first refusal in the order of registration, with the value that was found and the way out.
// Every kind of tensor that is let through here is one that the runtime handles; whoever adds one there relaxes it here.
#pragma once

#include <absl/status/status.h>

#include "lib/plan/census.h"

namespace rebind::plan {

//   InvalidArgument  a value out of range
//   Unimplemented    a field that rebind/options.h marks so
absl::Status check_options(const FsdpOptions& options, const Where& where);

// Unimplemented: complex or another unknown dtype, not on the CPU, not strided, elements that overlap or leave gaps, not a leaf,
// with a post-accumulate hook, sharing its storage with another parameter or a buffer; a gradient of another kind, or of a frozen
// parameter; a tensor of no model that is not floating; a buffer that is not dense CPU memory.
absl::Status check_tensors(const Census& census, const Where& where);

// Unimplemented: a state tensor that is neither shaped like its parameter nor 0-dim, or is not dense CPU memory.
absl::Status check_state(const Census& census, const Where& where);

}  // namespace rebind::plan
