// Tells the launcher why this process ends.
//
//   int main() {
//     try {
//       auto group = rebind::init_process_group();
//       if (!group.ok()) { std::cerr << group.status() << "\n"; return 2; }   // has told the launcher already
//       ...
//     } catch (const std::exception& error) {
//       rebind::write_error_file(error);                                      // torchrun prints it as the root cause
//       std::cerr << error.what() << "\n";
//       return 1;
//     }
//   }
//
// torchrun ends all ranks when one ends with an error, and shows the file of the rank that wrote first. init_process_group and
// prepare_fsdp write theirs themselves when they return an error. Nothing here throws or blocks, and nothing is collective.
#pragma once

#include <absl/status/status.h>

#include <exception>

namespace rebind {

enum class ErrorFile {
  kWritten,
  kNotAsked,  // TORCHELASTIC_ERROR_FILE is not set (no torchrun), or the status is OK: nothing was done
  kKept,      // there is a file already: the first error is the root cause, what follows are its consequences
  kFailed     // the file system refused
};

// Writes the message to the file that TORCHELASTIC_ERROR_FILE names, whole or not at all, never over another.
ErrorFile write_error_file(const absl::Status& error) noexcept;
// The same for an exception; of c10::Error without LibTorch's stack trace.
ErrorFile write_error_file(const std::exception& error) noexcept;

}  // namespace rebind
