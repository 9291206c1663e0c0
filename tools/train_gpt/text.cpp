#include "tools/train_gpt/text.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <absl/cleanup/cleanup.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

namespace train_gpt {
namespace {

// By the program gzip, which every Debian has: one dependency less to build with.
absl::StatusOr<std::string> unzipped(const std::string& file) {
  const std::string quoted = absl::StrCat("'", absl::StrReplaceAll(file, {{"'", "'\\''"}}), "'");
  std::FILE* pipe = ::popen(absl::StrCat("gzip -cd -- ", quoted, " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return absl::InternalError(absl::StrCat("cannot start gzip to read ", file, ": ", std::strerror(errno)));
  std::string bytes;
  std::array<char, 65536> buffer;
  for (size_t count; (count = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) bytes.append(buffer.data(), count);
  if (::pclose(pipe) != 0) return absl::InvalidArgumentError(absl::StrCat(file, " is not a whole gzip file, or gzip is missing"));
  return bytes;
}

absl::StatusOr<std::string> bytes_of(const std::string& file) {
  std::error_code code;
  const auto status = std::filesystem::status(file, code);
  if (!std::filesystem::exists(status)) return absl::NotFoundError(absl::StrCat("there is no text file '", file, "'"));
  if (std::filesystem::is_directory(status))
    return absl::InvalidArgumentError(absl::StrCat("'", file, "' is a directory, not a text"));
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return absl::InvalidArgumentError(absl::StrCat("cannot read '", file, "': ", std::strerror(errno)));
  if (absl::EndsWith(file, ".gz")) return unzipped(file);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

}  // namespace

Batch joined(const std::vector<Batch>& batches) {
  if (batches.size() == 1) return batches[0];
  std::vector<at::Tensor> ids, targets;
  for (const Batch& batch : batches) {
    ids.push_back(batch.ids);
    targets.push_back(batch.targets);
  }
  return {at::cat(ids), at::cat(targets)};
}

absl::StatusOr<Text> Text::read(const std::string& file) {
  absl::StatusOr<std::string> bytes = bytes_of(file);
  if (!bytes.ok()) return bytes.status();
  if (bytes->empty()) return absl::InvalidArgumentError(absl::StrCat("the text file '", file, "' is empty"));
  Text text;
  std::array<int64_t, 256> id_of{};
  for (const unsigned char c : *bytes) id_of[c] = 1;
  for (int c = 0; c < 256; ++c) {
    if (id_of[c] == 0) continue;
    id_of[c] = text.vocabulary();
    text.characters_.push_back(static_cast<char>(c));
  }
  text.ids_ = at::empty({static_cast<int64_t>(bytes->size())}, at::kLong);
  std::transform(bytes->begin(), bytes->end(), text.ids_.data_ptr<int64_t>(),
                 [&](char c) { return id_of[static_cast<unsigned char>(c)]; });
  return text;
}

std::string Text::default_file() {
  for (const char* file : {"/usr/share/doc/jargon-text/jargon.txt.gz", "/usr/share/common-licenses/GPL-3"}) {
    if (std::filesystem::exists(file)) return file;
  }
  return "";
}

Batch Text::batch(uint64_t seed, int64_t step, int rank, int64_t rows, int64_t length) const {
  std::seed_seq sequence{seed, static_cast<uint64_t>(step), static_cast<uint64_t>(rank)};
  std::mt19937_64 random(sequence);
  Batch batch{at::empty({rows, length}, at::kLong), at::empty({rows, length}, at::kLong)};
  for (int64_t row = 0; row < rows; ++row) {
    // A remainder, not std::uniform_int_distribution, whose values differ between standard libraries.
    const auto begin = static_cast<int64_t>(random() % static_cast<uint64_t>(size() - length));
    batch.ids[row].copy_(ids_.narrow(0, begin, length));
    batch.targets[row].copy_(ids_.narrow(0, begin + 1, length));
  }
  return batch;
}

std::string Text::decode(const at::Tensor& ids) const {
  const at::Tensor flat = ids.reshape({-1}).to(at::kLong).contiguous();
  std::string result;
  for (int64_t i = 0; i < flat.numel(); ++i) result.push_back(characters_.at(flat.data_ptr<int64_t>()[i]));
  return result;
}

}  // namespace train_gpt
