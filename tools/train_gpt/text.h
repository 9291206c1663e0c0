// A text file as training data: characters become ids, and every (step, rank) has its own reproducible rows.
//
//   auto text = Text::read("book.txt");              // or a .gz file
//   Batch batch = text->batch(/*seed=*/0, /*step=*/7, /*rank=*/1, /*rows=*/8, /*length=*/128);
//
// A batch depends on its arguments alone, not on the number of processes or on the batches drawn before: one process can draw
// what several ranks would draw.
#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <string>

namespace train_gpt {

struct Batch {
  at::Tensor ids, targets;  // [rows, length]; targets are the ids one character later
};
// One batch with the rows of all.
Batch joined(const std::vector<Batch>& batches);

class Text {
 public:
  // A character is a byte. NotFound, InvalidArgument (a directory, an empty file, not a gzip file) with the name of the file.
  static absl::StatusOr<Text> read(const std::string& file);
  // The first of the texts that Debian has, or "" (package jargon-text, else a licence of package base-files).
  static std::string default_file();

  int64_t size() const { return ids_.numel(); }
  int64_t vocabulary() const { return static_cast<int64_t>(characters_.size()); }
  // Needs size() > length.
  Batch batch(uint64_t seed, int64_t step, int rank, int64_t rows, int64_t length) const;
  std::string decode(const at::Tensor& ids) const;  // any shape, integer

 private:
  at::Tensor ids_;          // [size], int64
  std::string characters_;  // [id]
};

}  // namespace train_gpt
