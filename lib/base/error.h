// The one builder of error texts: what was found, where, and what to do about it.
//
//   return error(absl::StatusCode::kInvalidArgument, {.call = "prepare_fsdp", .rank = 2, .parameter = "embed.weight"},
//                "state 'exp_avg' has shape [8, 4], the parameter has [16, 4]", "Erase or rebuild that state, then call again");
//   // prepare_fsdp, rank 2: parameter 'embed.weight': state 'exp_avg' has shape [8, 4], the parameter has [16, 4].
//   // Erase or rebuild that state, then call again.
//
// A Status where our own calls return one, c10::Error (throw_error) where the error must pass through LibTorch.
#pragma once

#include <absl/status/status.h>

#include <string>
#include <string_view>
#include <vector>

namespace rebind {

struct Where {
  std::string call{};     // the public call, or the moment: "forward", "backward", "optimizer.step()"
  int rank = -1;          // -1: not known
  std::string parameter{};  // registered name
  std::string optimizer{};  // type name
  int optimizer_index = -1, group = -1, index = -1;  // optimizers[optimizer_index], group, params()[index]
  std::string unit{};
};

std::string error_text(const Where& where, std::string_view what, std::string_view remedy);
absl::Status error(absl::StatusCode code, const Where& where, std::string_view what, std::string_view remedy);
// Throws c10::Error with that text and no C++ stack trace in what_without_backtrace().
[[noreturn]] void throw_error(const Where& where, std::string_view what, std::string_view remedy);

// "[8, 4]"
std::string shape_text(const std::vector<int64_t>& sizes);

}  // namespace rebind
