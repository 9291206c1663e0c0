#include "lib/comm/communicator.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <cstring>
#include <utility>

#include "lib/base/error.h"
#include "lib/comm/broken_pipe.h"
#include "lib/comm/header.h"
#include "lib/comm/rank_order_sum.h"
#include "lib/comm/transfer.h"

namespace rebind::comm {
namespace {

using Words = std::vector<std::vector<uint64_t>>;

// Tags are 31 bits. A user's own sends use small ones; ours begin at 2^30 and take two a channel.
constexpr int kFirstTag = 1 << 30;
enum TagUse { kHeaderTag = 0, kDataTag = 1 };

// What one rank sends to and receives from each peer.
struct Parts {
  std::vector<const void*> sent;  // [rank]; null: nothing is sent to it
  std::vector<void*> received;    // [rank]; null: nothing comes from it
  explicit Parts(int world_size) : sent(world_size), received(world_size) {}
};

std::string ranks_text(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

struct Communicator::Impl {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::Backend> backend;  // null at world size 1
  int rank = 0, world_size = 1, tag = 0;
  std::chrono::milliseconds timeout{0};
  uint64_t position = 0;
  absl::Status broken;
  double waited_seconds = 0;

  // Memory that messages point to stands before the messages, so that it outlives them. `parked`: headers that were still
  // on their way when a peer turned out to be dead; the other peers may need them to learn of it.
  std::vector<Header> headers;                     // [rank], of the collective under way
  std::vector<uint64_t> sent_ends, received_ends;  // [rank], see move()
  std::vector<std::byte> scratch;                  // parts received by reduce_scatter, kept for the next one
  std::vector<Transfer> parked;

  absl::Status fail(absl::StatusCode code, const Header& header, const std::string& what, const std::string& remedy) {
    const std::string name(header.name, strnlen(header.name, Header::kNameBytes));
    broken = error(code, {.call = call_text(header.kind, name), .rank = rank}, what, remedy);
    return broken;
  }

  absl::Status report(const Failures& failures, const Header& header, Clock::time_point begin) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    if (!failures.closed.empty()) {
      return fail(absl::StatusCode::kUnavailable, header,
                  absl::StrCat("the connection to ", ranks_text(failures.closed), " is closed (after ", waited, " ms of at most ",
                               timeout.count(), " ms, collective ", header.position, "; ", failures.detail, ")"),
                  "That rank has ended or gave up; its output comes first. Restart the job from the last checkpoint");
    }
    return fail(absl::StatusCode::kDeadlineExceeded, header,
                absl::StrCat("no answer from ", ranks_text(failures.silent), " within ", timeout.count(), " ms (waited ", waited,
                             " ms, collective ", header.position, ")"),
                "That rank has ended, is stuck, or did not come to this point; its output comes first. If it is only slow, raise "
                "collective_timeout");
  }

  // Sends the header to all peers, receives theirs, and compares. On success headers[r] is rank r's.
  absl::Status agree(const Header& own, Clock::time_point begin) {
    headers.assign(world_size, Header{});
    headers[rank] = own;
    Transfer transfer(*backend, tag + kHeaderTag);
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) transfer.recv(peer, &headers[peer], sizeof(Header));
    }
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) transfer.send(peer, &headers[rank], sizeof(Header));
    }
    const Failures failures = transfer.wait(begin + timeout, /*finish_others=*/false);
    if (failures.any()) {
      parked.push_back(std::move(transfer));
      return report(failures, own, begin);
    }
    // Compared with rank 0 by everybody, so that all ranks say the same.
    for (int peer = 1; peer < world_size; ++peer) {
      if (same_collective(headers[0], headers[peer])) continue;
      return fail(absl::StatusCode::kFailedPrecondition, own,
                  absl::StrCat("the ranks are in different collectives: rank 0 in ", in_words(headers[0]), ", rank ", peer, " in ",
                               in_words(headers[peer])),
                  "Nothing was exchanged. All ranks must run the same model code in the same order and number of steps");
    }
    return absl::OkStatus();
  }

  // Moves data between ranks that have agreed. A large message that is cut off in the middle raises no error at its receiver, one
  // that has not begun does; so each is followed by a word that is awaited first: when it is here, what precedes it is here.
  absl::Status move(const Parts& parts, int64_t bytes, const Header& header, Clock::time_point begin) {
    sent_ends.assign(world_size, header.position);
    received_ends.assign(world_size, ~uint64_t{0});
    Transfer data(*backend, tag + kDataTag), ends(*backend, tag + kDataTag);
    for (int peer = 0; peer < world_size; ++peer) {
      if (parts.received[peer] == nullptr || peer == rank) continue;
      data.recv(peer, parts.received[peer], bytes);
      ends.recv(peer, &received_ends[peer], sizeof(uint64_t));
    }
    for (int peer = 0; peer < world_size; ++peer) {
      if (parts.sent[peer] == nullptr || peer == rank) continue;
      data.send(peer, parts.sent[peer], bytes);
      ends.send(peer, &sent_ends[peer], sizeof(uint64_t));
    }
    Failures failures = ends.wait(begin + timeout, /*finish_others=*/true);
    if (!failures.any()) failures = data.wait(begin + timeout, /*finish_others=*/true);
    if (failures.any()) return report(failures, header, begin);
    for (int peer = 0; peer < world_size; ++peer) {
      if (parts.received[peer] == nullptr || peer == rank || received_ends[peer] == header.position) continue;
      return fail(absl::StatusCode::kInternal, header,
                  absl::StrCat("the data of rank ", peer, " ends with ", received_ends[peer], ", expected ", header.position),
                  "Another user of the group sends with tags from 2^30; choose smaller ones");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Words> everyones_words(const Header& header, std::span<const uint64_t> own, Clock::time_point begin) {
    Words result(world_size, std::vector<uint64_t>(own.begin(), own.end()));
    if (own.size() <= Header::kInlineWords) {
      for (int r = 0; r < world_size; ++r) std::copy_n(headers[r].words, own.size(), result[r].begin());
      return result;
    }
    Parts parts(world_size);
    for (int peer = 0; peer < world_size; ++peer) {
      parts.sent[peer] = own.data();
      parts.received[peer] = result[peer].data();
    }
    if (absl::Status status = move(parts, static_cast<int64_t>(own.size_bytes()), header, begin); !status.ok()) return status;
    return result;
  }

  // Steps every collective begins with. With world size 1 there is nothing to agree on.
  absl::StatusOr<Words> start(const Identity& identity, Kind kind, int64_t bytes, c10::ScalarType type,
                              std::span<const uint64_t> words, Clock::time_point begin, Header& header) {
    if (!broken.ok()) return broken;
    Identity named = identity;
    named.kind = kind;
    header = make_header(named, position++, bytes, type, words.size());
    if (world_size == 1) return Words{{words.begin(), words.end()}};
    std::copy_n(words.begin(), std::min<size_t>(words.size(), Header::kInlineWords), header.words);
    if (absl::Status status = agree(header, begin); !status.ok()) return status;
    return everyones_words(header, words, begin);
  }
};

namespace {

// Adds the life of this object to a sum of seconds.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin).count(); }
  const Clock::time_point begin = Clock::now();

 private:
  double& seconds_;
};

}  // namespace

Communicator::Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, int channel, std::chrono::milliseconds timeout)
    : impl_(std::make_unique<Impl>()) {
  impl_->rank = group->getRank();
  impl_->world_size = group->getSize();
  impl_->timeout = timeout;
  impl_->tag = kFirstTag + 2 * channel;
  const Where where{.call = "Communicator", .rank = impl_->rank};
  if (channel < 0 || channel >= kChannels) {
    impl_->broken = error(absl::StatusCode::kInvalidArgument, where,
                          absl::StrCat("channel ", channel, " is not in [0, ", kChannels, ")"), "Too many shardings on one group");
  }
  if (impl_->world_size > 1) {
    survive_broken_pipes();  // the group may be one that the program made
    try {
      impl_->backend = group->getBackend(c10::DeviceType::CPU);
    } catch (const c10::Error&) {
      impl_->broken = error(absl::StatusCode::kFailedPrecondition, where, "the process group has no backend for CPU tensors",
                            "Make it with rebind::init_process_group, or give it a Gloo backend with setBackend");
    }
  }
  impl_->group = std::move(group);
}

Communicator::~Communicator() = default;

int Communicator::rank() const { return impl_->rank; }
int Communicator::world_size() const { return impl_->world_size; }
uint64_t Communicator::position() const { return impl_->position; }
absl::Status Communicator::broken() const { return impl_->broken; }
double Communicator::waited_seconds() const { return impl_->waited_seconds; }

absl::Status Communicator::all_gather(const Identity& identity, void* buffer, int64_t part_bytes) {
  Stopwatch watch(impl_->waited_seconds);
  Header header;
  auto words = impl_->start(identity, Kind::kAllGather, part_bytes, c10::ScalarType::Byte, {}, watch.begin, header);
  if (!words.ok()) return words.status();
  if (impl_->world_size == 1 || part_bytes == 0) return absl::OkStatus();
  auto* bytes = static_cast<std::byte*>(buffer);
  Parts parts(impl_->world_size);
  for (int peer = 0; peer < impl_->world_size; ++peer) {
    parts.sent[peer] = bytes + impl_->rank * part_bytes;
    parts.received[peer] = bytes + peer * part_bytes;
  }
  return impl_->move(parts, part_bytes, header, watch.begin);
}

absl::StatusOr<Words> Communicator::reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel,
                                                   c10::ScalarType dtype, std::span<const uint64_t> words) {
  if (dtype != c10::ScalarType::Float && dtype != c10::ScalarType::Double) {
    return error(absl::StatusCode::kUnimplemented,
                 {.call = call_text(uint64_t(Kind::kReduceScatter), identity.name), .rank = rank()},
                 absl::StrCat("sums of ", c10::toString(dtype)), "Use float32 or float64");
  }
  const auto* bytes = static_cast<const std::byte*>(buffer);
  const int64_t part_bytes = part_numel * static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<const void*> summands(world_size());
  absl::StatusOr<Words> result;
  {
    Stopwatch watch(impl_->waited_seconds);
    Header header;
    result = impl_->start(identity, Kind::kReduceScatter, part_bytes, dtype, words, watch.begin, header);
    if (!result.ok() || part_bytes == 0) return result;
    impl_->scratch.resize(std::max<size_t>(impl_->scratch.size(), (world_size() - 1) * part_bytes));
    std::byte* free = impl_->scratch.data();
    Parts parts(world_size());
    for (int peer = 0; peer < world_size(); ++peer) {
      summands[peer] = bytes + rank() * part_bytes;
      if (peer == rank()) continue;
      parts.sent[peer] = bytes + peer * part_bytes;
      summands[peer] = parts.received[peer] = std::exchange(free, free + part_bytes);
    }
    if (world_size() > 1) {
      if (absl::Status status = impl_->move(parts, part_bytes, header, watch.begin); !status.ok()) return status;
    }
  }
  const auto sum = [&]<class T>(T* sums) {
    std::vector<const T*> typed;
    typed.reserve(summands.size());
    for (const void* summand : summands) typed.push_back(static_cast<const T*>(summand));
    rank_order_sum(sums, typed, part_numel);
  };
  dtype == c10::ScalarType::Float ? sum(static_cast<float*>(out)) : sum(static_cast<double*>(out));
  return result;
}

absl::StatusOr<Words> Communicator::exchange(const Identity& identity, std::span<const uint64_t> words) {
  Stopwatch watch(impl_->waited_seconds);
  Header header;
  return impl_->start(identity, Kind::kExchange, 0, c10::ScalarType::Byte, words, watch.begin, header);
}

absl::Status Communicator::broadcast(const Identity& identity, void* buffer, int64_t bytes) {
  Stopwatch watch(impl_->waited_seconds);
  Header header;
  auto words = impl_->start(identity, Kind::kBroadcast, bytes, c10::ScalarType::Byte, {}, watch.begin, header);
  if (!words.ok()) return words.status();
  if (impl_->world_size == 1 || bytes == 0) return absl::OkStatus();
  Parts parts(impl_->world_size);
  if (impl_->rank == 0) {
    for (int peer = 1; peer < impl_->world_size; ++peer) parts.sent[peer] = buffer;
  } else {
    parts.received[0] = buffer;
  }
  return impl_->move(parts, bytes, header, watch.begin);
}

}  // namespace rebind::comm
