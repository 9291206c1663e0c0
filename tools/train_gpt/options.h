// What the command line says, checked as far as it can be checked without the text and the other ranks.
#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "tools/train_gpt/gpt.h"

namespace train_gpt {

struct Options {
  std::string text_file, losses_file;
  GptOptions gpt;  // without the vocabulary
  int64_t batch = 8, steps = 200, prepare_at = 0, log_every = 10, sample = 0;
  int emulate_ranks = 0;  // 0: not given
  bool by_rank = false, print_plan = false, help = false;
  uint64_t seed = 0;
  double lr = 1e-3, weight_decay = 0.1, lr_decay = 0.5;
  int64_t lr_step = 100;
  std::chrono::milliseconds timeout{0};
};

// InvalidArgument, in one line: an unknown flag, a value that is no number or out of range, sizes that fit no memory.
absl::StatusOr<Options> parse_options(int argc, char** argv);
// The flags with their defaults and meaning.
std::string usage();

}  // namespace train_gpt
