#include "lib/comm/engine.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <cstring>
#include <utility>

#include "lib/base/error.h"
#include "lib/comm/broken_pipe.h"
#include "lib/comm/rank_order_sum.h"

namespace rebind::comm {
namespace {

// Tags are 31 bits. A user's own sends use small ones; ours begin at 2^30 and take two a channel.
constexpr int kFirstTag = 1 << 30;
enum TagUse { kHeaderTag = 0, kDataTag = 1 };

std::string ranks_text(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

// What one rank sends to and receives from each peer.
struct Communicator::Engine::Parts {
  std::vector<const void*> sent;  // [rank]; null: nothing is sent to it
  std::vector<void*> received;    // [rank]; null: nothing comes from it
  explicit Parts(int world_size) : sent(world_size), received(world_size) {}
};

Communicator::Engine::Engine(c10::intrusive_ptr<c10d::ProcessGroup> group, int channel, std::chrono::milliseconds timeout)
    : rank_(group->getRank()), world_size_(group->getSize()), tag_(kFirstTag + 2 * channel), timeout_(timeout) {
  const Where where{.call = "Communicator", .rank = rank_};
  if (channel < 0 || channel >= kChannels) {
    broken_ = error(absl::StatusCode::kInvalidArgument, where,
                    absl::StrCat("channel ", channel, " is not in [0, ", kChannels, ")"), "Too many shardings on one group");
  }
  if (world_size_ > 1) {
    survive_broken_pipes();  // the group may be one that the program made
    try {
      backend_ = group->getBackend(c10::DeviceType::CPU);
    } catch (const c10::Error&) {
      broken_ = error(absl::StatusCode::kFailedPrecondition, where, "the process group has no backend for CPU tensors",
                      "Make it with rebind::init_process_group, or give it a Gloo backend with setBackend");
    }
  }
  group_ = std::move(group);
}

absl::Status Communicator::Engine::fail(absl::StatusCode code, const Header& header, const std::string& what, const std::string& remedy) {
  const std::string name(header.name, strnlen(header.name, Header::kNameBytes));
  broken_ = error(code, {.call = call_text(header.kind, name), .rank = rank_}, what, remedy);
  return broken_;
}

absl::Status Communicator::Engine::report(const Failures& failures, const Header& header, Clock::time_point begin) {
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
  if (!failures.closed.empty()) {
    return fail(absl::StatusCode::kUnavailable, header,
                absl::StrCat("the connection to ", ranks_text(failures.closed), " is closed (after ", waited, " ms of at most ",
                             timeout_.count(), " ms, collective ", header.position, "; ", failures.detail, ")"),
                "That rank has ended or gave up; its output comes first. Restart the job from the last checkpoint");
  }
  return fail(absl::StatusCode::kDeadlineExceeded, header,
              absl::StrCat("no answer from ", ranks_text(failures.silent), " within ", timeout_.count(), " ms (waited ", waited,
                           " ms, collective ", header.position, ")"),
              "That rank has ended, is stuck, or did not come to this point; its output comes first. If it is only slow, raise "
              "collective_timeout");
}

// Sends the header to all peers, receives theirs, and compares. On success headers_[r] is rank r's.
absl::Status Communicator::Engine::agree(const Header& own, Clock::time_point begin) {
  headers_.assign(world_size_, Header{});
  headers_[rank_] = own;
  Transfer transfer(*backend_, tag_ + kHeaderTag);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_) transfer.recv(peer, &headers_[peer], sizeof(Header));
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_) transfer.send(peer, &headers_[rank_], sizeof(Header));
  }
  const Failures failures = transfer.wait(begin + timeout_, /*finish_others=*/false);
  if (failures.any()) {
    parked_.push_back(std::move(transfer));
    return report(failures, own, begin);
  }
  // Compared with rank 0 by everybody, so that all ranks say the same.
  for (int peer = 1; peer < world_size_; ++peer) {
    if (same_collective(headers_[0], headers_[peer])) continue;
    return fail(absl::StatusCode::kFailedPrecondition, own,
                absl::StrCat("the ranks are in different collectives: rank 0 in ", in_words(headers_[0]), ", rank ", peer, " in ",
                             in_words(headers_[peer])),
                "Nothing was exchanged. All ranks must run the same model code in the same order and number of steps");
  }
  return absl::OkStatus();
}

// Moves data between ranks that have agreed. A large message that is cut off in the middle raises no error at its receiver, one
// that has not begun does; so each is followed by a word that is awaited first: when it is here, what precedes it is here.
absl::Status Communicator::Engine::move(const Parts& parts, int64_t bytes, const Header& header, Clock::time_point begin) {
  sent_ends_.assign(world_size_, header.position);
  received_ends_.assign(world_size_, ~uint64_t{0});
  Transfer data(*backend_, tag_ + kDataTag), ends(*backend_, tag_ + kDataTag);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (parts.received[peer] == nullptr || peer == rank_) continue;
    data.recv(peer, parts.received[peer], bytes);
    ends.recv(peer, &received_ends_[peer], sizeof(uint64_t));
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (parts.sent[peer] == nullptr || peer == rank_) continue;
    data.send(peer, parts.sent[peer], bytes);
    ends.send(peer, &sent_ends_[peer], sizeof(uint64_t));
  }
  Failures failures = ends.wait(begin + timeout_, /*finish_others=*/true);
  if (!failures.any()) failures = data.wait(begin + timeout_, /*finish_others=*/true);
  if (failures.any()) return report(failures, header, begin);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (parts.received[peer] == nullptr || peer == rank_ || received_ends_[peer] == header.position) continue;
    return fail(absl::StatusCode::kInternal, header,
                absl::StrCat("the data of rank ", peer, " ends with ", received_ends_[peer], ", expected ", header.position),
                "Another user of the group sends with tags from 2^30; choose smaller ones");
  }
  return absl::OkStatus();
}

absl::StatusOr<Words> Communicator::Engine::everyones_words(const Header& header, std::span<const uint64_t> own, Clock::time_point begin) {
  Words result(world_size_, std::vector<uint64_t>(own.begin(), own.end()));
  if (own.size() <= Header::kInlineWords) {
    for (int r = 0; r < world_size_; ++r) std::copy_n(headers_[r].words, own.size(), result[r].begin());
    return result;
  }
  Parts parts(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    parts.sent[peer] = own.data();
    parts.received[peer] = result[peer].data();
  }
  if (absl::Status status = move(parts, static_cast<int64_t>(own.size_bytes()), header, begin); !status.ok()) return status;
  return result;
}

// Steps every collective begins with. With world size 1 there is nothing to agree on.
absl::StatusOr<Words> Communicator::Engine::start(const Identity& identity, Kind kind, int64_t bytes, c10::ScalarType type,
                            std::span<const uint64_t> words, Clock::time_point begin, Header& header) {
  if (!broken_.ok()) return broken_;
  Identity named = identity;
  named.kind = kind;
  header = make_header(named, position_++, bytes, type, words.size());
  if (world_size_ == 1) return Words{{words.begin(), words.end()}};
  std::copy_n(words.begin(), std::min<size_t>(words.size(), Header::kInlineWords), header.words);
  if (absl::Status status = agree(header, begin); !status.ok()) return status;
  return everyones_words(header, words, begin);
}

absl::Status Communicator::Engine::all_gather(const Identity& identity, void* buffer, int64_t part_bytes) {
  const Clock::time_point begin = Clock::now();
  Header header;
  auto words = start(identity, Kind::kAllGather, part_bytes, c10::ScalarType::Byte, {}, begin, header);
  if (!words.ok()) return words.status();
  if (world_size_ == 1 || part_bytes == 0) return absl::OkStatus();
  auto* bytes = static_cast<std::byte*>(buffer);
  Parts parts(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    parts.sent[peer] = bytes + rank_ * part_bytes;
    parts.received[peer] = bytes + peer * part_bytes;
  }
  return move(parts, part_bytes, header, begin);
}

absl::StatusOr<Words> Communicator::Engine::reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel,
                                                   c10::ScalarType dtype, std::span<const uint64_t> words, double divisor) {
  if (dtype != c10::ScalarType::Float && dtype != c10::ScalarType::Double) {
    return error(absl::StatusCode::kUnimplemented,
                 {.call = call_text(uint64_t(Kind::kReduceScatter), identity.name), .rank = rank_},
                 absl::StrCat("sums of ", c10::toString(dtype)), "Use float32 or float64");
  }
  const auto* bytes = static_cast<const std::byte*>(buffer);
  const int64_t part_bytes = part_numel * static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<const void*> summands(world_size_);
  absl::StatusOr<Words> result;
  {
    const Clock::time_point begin = Clock::now();
    Header header;
    result = start(identity, Kind::kReduceScatter, part_bytes, dtype, words, begin, header);
    if (!result.ok() || part_bytes == 0) return result;
    scratch_.resize(std::max<size_t>(scratch_.size(), (world_size_ - 1) * part_bytes));
    std::byte* free = scratch_.data();
    Parts parts(world_size_);
    for (int peer = 0; peer < world_size_; ++peer) {
      summands[peer] = bytes + rank_ * part_bytes;
      if (peer == rank_) continue;
      parts.sent[peer] = bytes + peer * part_bytes;
      summands[peer] = parts.received[peer] = std::exchange(free, free + part_bytes);
    }
    if (world_size_ > 1) {
      if (absl::Status status = move(parts, part_bytes, header, begin); !status.ok()) return status;
    }
  }
  const auto sum = [&]<class T>(T* sums) {
    std::vector<const T*> typed;
    typed.reserve(summands.size());
    for (const void* summand : summands) typed.push_back(static_cast<const T*>(summand));
    rank_order_sum(sums, typed, part_numel, static_cast<T>(divisor));
  };
  dtype == c10::ScalarType::Float ? sum(static_cast<float*>(out)) : sum(static_cast<double*>(out));
  return result;
}

absl::StatusOr<Words> Communicator::Engine::exchange(const Identity& identity, std::span<const uint64_t> words) {
  const Clock::time_point begin = Clock::now();
  Header header;
  return start(identity, Kind::kExchange, 0, c10::ScalarType::Byte, words, begin, header);
}

absl::Status Communicator::Engine::broadcast(const Identity& identity, void* buffer, int64_t bytes) {
  const Clock::time_point begin = Clock::now();
  Header header;
  auto words = start(identity, Kind::kBroadcast, bytes, c10::ScalarType::Byte, {}, begin, header);
  if (!words.ok()) return words.status();
  if (world_size_ == 1 || bytes == 0) return absl::OkStatus();
  Parts parts(world_size_);
  if (rank_ == 0) {
    for (int peer = 1; peer < world_size_; ++peer) parts.sent[peer] = buffer;
  } else {
    parts.received[0] = buffer;
  }
  return move(parts, bytes, header, begin);
}

}  // namespace rebind::comm
