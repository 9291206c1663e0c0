// All communication of one sharding: blocking collectives on host memory, one after another, each with an identity.
//
// In: a process group whose CPU backend can send and recv, raw buffers. Out: filled buffers, or a Status that says which rank
// did what. It knows bytes and dtypes, nothing of units or parameters beyond the names it is given for messages.
//
// Note: Identity. Two equal-sized collectives that get out of step would hand over each other's data with success (and Gloo
// gives a wrong sum with success when sizes differ). So ranks exchange a small header (position in this queue, kind, unit, epoch,
// bytes, and a few payload words) before any data is received, and compare it with all peers. A mismatch is a FailedPrecondition
// that names both sides; afterwards the communicator is broken and every call returns that error.
//
// Note: Rank order. Sums are own code: everything is received and added in rank order, so at every world size the bits are those
// of one process that adds the ranks' values in that order.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace rebind::comm {

enum class Kind : uint32_t { kAllGather = 1, kReduceScatter, kBroadcast, kExchange };

// What a collective is for. The same on all ranks, or the collective fails.
struct Identity {
  Kind kind = Kind::kAllGather;
  uint32_t unit = 0;   // index of the unit, and what of it (parameters, gradients, state), as the caller likes
  uint64_t epoch = 0;  // the caller's own count, such as optimizer steps
  std::string name{};  // for messages only: "unit 'block.3'"; not compared
};

// Used by one thread at a time. Holds no socket and no thread of its own.
class Communicator {
 public:
  // `channel` keeps the messages of several shardings on one group apart: 0 <= channel < kChannels, equal on all ranks. A group or
  // channel that cannot be used shows as an error of the first call.
  static constexpr int kChannels = 4096;
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, int channel, std::chrono::milliseconds timeout);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int world_size() const;

  // Errors of the calls below, each of which breaks the communicator on this rank:
  //   FailedPrecondition  a peer is in another collective; nothing was received into any buffer. The same text on all ranks
  //   DeadlineExceeded    a peer did not answer within `timeout`; the message names all such peers. With Gloo this closes the
  //                       connections of the whole group, as every time-out of a c10d collective does
  //   Unavailable         a peer has ended or closed the connection. One that dies after it has sent all its data and before it has
  //                       received ours shows as DeadlineExceeded
  // After an error the buffers passed in are not touched any more; a buffer that was to be filled has no defined content, except
  // after FailedPrecondition.

  // In place: `buffer` holds world_size parts of part_bytes each; this rank's part is filled in, the others are received.
  absl::Status all_gather(const Identity& identity, void* buffer, int64_t part_bytes);

  // `buffer` holds world_size parts of part_numel elements of `dtype` (kFloat or kDouble, others are Unimplemented). On success
  // `out` (part_numel elements, not overlapping `buffer`) is the sum over the ranks of part [rank], added in rank order. `words`
  // are sent to all peers along with the header; the result holds those of every rank, [rank][word]. All ranks must pass equally
  // many.
  absl::StatusOr<std::vector<std::vector<uint64_t>>> reduce_scatter(const Identity& identity, const void* buffer, void* out,
                                                                    int64_t part_numel, c10::ScalarType dtype,
                                                                    std::span<const uint64_t> words);

  // Everyone's words, [rank][word]; a small all-gather, and a barrier. All ranks must pass equally many. Up to 16 words travel in
  // the header.
  absl::StatusOr<std::vector<std::vector<uint64_t>>> exchange(const Identity& identity, std::span<const uint64_t> words);

  // `buffer` of rank 0 to all. A barrier as well.
  absl::Status broadcast(const Identity& identity, void* buffer, int64_t bytes);

  // Number of collectives issued so far.
  uint64_t position() const;
  // The error that broke it, or OK.
  absl::Status broken() const;
  // Wall time spent waiting in the calls above, in seconds.
  double waited_seconds() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace rebind::comm
