// All communication of one sharding: collectives on host memory, one after another, each with an identity.
//
//   comm::Pending gather = communicator.post_all_gather(identity, buffer, part_bytes);   // returns at once
//   ...compute...
//   absl::Status status = communicator.wait(gather);                                     // the parts are in `buffer`
//
// In: a process group whose CPU backend can send and recv, raw buffers. Out: filled buffers, or a Status that says which rank
// did what. It knows bytes and dtypes, nothing of units or parameters beyond the names it is given for messages.
//
// Note: One order. A thread of the communicator runs what was posted, in the order of posting, one at a time. So the order of
// collectives is that of the program on every rank, whatever overlaps with what, and while this rank computes, or sits in a
// collective of the program's own, its peers are served.
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
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace rebind::comm {

enum class Kind : uint32_t { kAllGather = 1, kReduceScatter, kBroadcast, kExchange };

// Words of every rank: [rank][word].
using Words = std::vector<std::vector<uint64_t>>;

// What a collective is for. The same on all ranks, or the collective fails.
struct Identity {
  Kind kind = Kind::kAllGather;
  uint32_t unit = 0;   // index of the unit, and what of it (parameters, gradients, state), as the caller likes
  uint64_t epoch = 0;  // the caller's own count, such as optimizer steps
  std::string name{};  // for messages only: "unit 'block.3'"; not compared
};

// A collective that was posted. A default one was not, and is done.
class Pending {
 public:
  bool valid() const { return job_ != nullptr; }

 private:
  friend class Communicator;
  struct Job;
  std::shared_ptr<Job> job_;
};

// Used by one thread at a time. World size 1: no thread, everything is done when it is posted.
class Communicator {
 public:
  // `channel` keeps the messages of several shardings on one group apart: 0 <= channel < kChannels, equal on all ranks. A group or
  // channel that cannot be used shows as an error of the first call.
  static constexpr int kChannels = 4096;
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, int channel, std::chrono::milliseconds timeout);
  // Waits for what was posted, at most until its time limit.
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

  // post_x returns at once; buffers belong to the collective until it was waited for. x is post_x and wait. A collective that is
  // never waited for still fails the later ones.

  // In place: `buffer` holds world_size parts of part_bytes each; this rank's part is filled in, the others are received.
  Pending post_all_gather(const Identity& identity, void* buffer, int64_t part_bytes);
  absl::Status all_gather(const Identity& identity, void* buffer, int64_t part_bytes);

  // `buffer` holds world_size parts of part_numel elements of `dtype` (kFloat or kDouble, others are Unimplemented). On success
  // `out` (part_numel elements, not overlapping `buffer`) is the sum over the ranks of part [rank], added in rank order, divided by
  // `divisor`. `words`
  // are sent to all peers along with the header; the result holds those of every rank, [rank][word]. All ranks must pass equally
  // many.
  Pending post_reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel, c10::ScalarType dtype,
                              std::vector<uint64_t> words, double divisor = 1);
  absl::StatusOr<Words> reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel,
                                       c10::ScalarType dtype, std::span<const uint64_t> words, double divisor = 1);

  // Everyone's words, [rank][word]; a small all-gather, and a barrier. All ranks must pass equally many. Up to 16 words travel in
  // the header.
  absl::StatusOr<Words> exchange(const Identity& identity, std::span<const uint64_t> words);

  // `buffer` of rank 0 to all. A barrier as well.
  absl::Status broadcast(const Identity& identity, void* buffer, int64_t bytes);

  // Waits until a posted collective is done.
  absl::Status wait(const Pending& pending);
  // Of a reduce_scatter that was waited for with success: every rank's words.
  static const Words& words_of(const Pending& pending);

  // Number of collectives posted so far.
  uint64_t position() const;
  // The error that broke it, or OK. Waits for what was posted.
  absl::Status broken();
  // Wall time that callers spent in wait, in seconds.
  double waited_seconds() const;

  // Called before every collective of every communicator in this process, on the thread that runs it; what it returns other than OK
  // is that rank's failure of that collective. Null: none.
  using Fault = std::function<absl::Status(int rank, const Identity& identity, uint64_t position)>;
  static void set_fault_for_tests(Fault fault);

 private:
  Pending post(const Identity& identity, std::function<void(Pending::Job&)> run);
  absl::StatusOr<Words> wait_for_words(const Pending& pending);

  class Engine;
  struct Thread;
  std::unique_ptr<Engine> engine_;
  Pending last_;
  uint64_t posted_ = 0;
  double waited_seconds_ = 0;
  std::unique_ptr<Thread> thread_;  // last: its destructor finishes what was posted, with the engine
};

}  // namespace rebind::comm
