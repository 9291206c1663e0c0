// The collectives of a Communicator, one at a time on the calling thread.
//
// In: a backend that can send and recv. Out: filled buffers, or a Status; see communicator.h for what calls mean and which errors
// they give. It does not know who waits for it.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "lib/comm/communicator.h"
#include "lib/comm/header.h"
#include "lib/comm/transfer.h"

namespace rebind::comm {

class Communicator::Engine {
 public:
  Engine(c10::intrusive_ptr<c10d::ProcessGroup> group, int channel, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const absl::Status& broken() const { return broken_; }
  void break_with(const absl::Status& status) {
    if (broken_.ok()) broken_ = status;
  }

  absl::Status all_gather(const Identity& identity, void* buffer, int64_t part_bytes);
  absl::StatusOr<Words> reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel,
                                       c10::ScalarType dtype, std::span<const uint64_t> words, double divisor);
  absl::StatusOr<Words> exchange(const Identity& identity, std::span<const uint64_t> words);
  absl::Status broadcast(const Identity& identity, void* buffer, int64_t bytes);

 private:
  struct Parts;
  absl::Status fail(absl::StatusCode code, const Header& header, const std::string& what, const std::string& remedy);
  absl::Status report(const Failures& failures, const Header& header, Clock::time_point begin);
  absl::Status agree(const Header& own, Clock::time_point begin);
  absl::Status move(const Parts& parts, int64_t bytes, const Header& header, Clock::time_point begin);
  absl::StatusOr<Words> everyones_words(const Header& header, std::span<const uint64_t> own, Clock::time_point begin);
  absl::StatusOr<Words> start(const Identity& identity, Kind kind, int64_t bytes, c10::ScalarType type,
                              std::span<const uint64_t> words, Clock::time_point begin, Header& header);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_;  // null at world size 1
  int rank_ = 0, world_size_ = 1, tag_ = 0;
  std::chrono::milliseconds timeout_{0};
  uint64_t position_ = 0;
  absl::Status broken_;

  // Memory that messages point to stands before the messages, so that it outlives them. `parked_`: headers that were still
  // on their way when a peer turned out to be dead; the other peers may need them to learn of it.
  std::vector<Header> headers_;                      // [rank], of the collective under way
  std::vector<uint64_t> sent_ends_, received_ends_;  // [rank], see move()
  std::vector<std::byte> scratch_;                   // parts received by reduce_scatter, kept for the next one
  std::vector<Transfer> parked_;
};

}  // namespace rebind::comm
