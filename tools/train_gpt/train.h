// The training program: built, trained plainly, sharded by one call, trained on.
#pragma once

#include <absl/status/status.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tools/train_gpt/options.h"
#include "tools/train_gpt/text.h"

namespace train_gpt {

// Collective. Rank 0 prints to stdout. Before prepare_fsdp every rank runs the whole plain program on the rows of all ranks, so
// that its losses are those of one process (--emulate-ranks); afterwards each takes its own rows, and losses are means over the
// ranks. An error that passes through LibTorch is thrown.
absl::Status train(const Options& options, const Text& text, const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace train_gpt
