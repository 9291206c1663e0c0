#include "lib/prepare/decision.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <functional>
#include <string_view>

namespace rebind::prepare {
namespace {

using Clock = std::chrono::steady_clock;

// A status as one store value: "<code> <text>"; the text of OK is the vote's fingerprint.
std::string encode(const absl::Status& status, const std::string& fingerprint) {
  if (status.ok()) return absl::StrCat("0 ", fingerprint);
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

absl::Status decode(const std::string& value, std::string* text) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(value, absl::MaxSplits(' ', 1));
  int code = 0;
  if (!absl::SimpleAtoi(parts.first, &code)) return absl::InternalError(absl::StrCat("malformed vote: ", value));
  if (text != nullptr) *text = parts.second;
  return code == 0 ? absl::OkStatus() : absl::Status(static_cast<absl::StatusCode>(code), parts.second);
}

// Ranks run one binary, so the standard library's hash of a text is the same on all of them.
std::string fingerprint_of(const std::vector<std::string>& lines) {
  return absl::StrCat(lines.size(), "-", std::hash<std::string>()(absl::StrJoin(lines, "\n")));
}

}  // namespace

Decision::Decision(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, std::string call, std::chrono::milliseconds timeout,
                   int64_t number)
    : store_(std::move(store)), rank_(rank), world_size_(world_size), call_(std::move(call)), timeout_(timeout), number_(number) {}

absl::StatusOr<Decision> Decision::begin(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string call,
                                         std::chrono::milliseconds timeout) {
  const Where where{.call = call, .rank = group->getRank()};
  c10::intrusive_ptr<c10d::Store> store;
  int64_t number = 0;
  if (group->getSize() > 1) {
    try {
      store = group->getStore();
      if (store == nullptr) {
        return error(absl::StatusCode::kInvalidArgument, where, "the process group has no store, over which ranks agree",
                     "Make the group with init_process_group or make_process_group");
      }
      // Each rank counts its own calls; ranks that make the same calls count alike.
      number = store->add(absl::StrCat("rebind/calls/", group->getRank()), 1);
    } catch (const std::exception& failure) {
      return error(absl::StatusCode::kUnavailable, where, "the store of the process group does not answer", "Check that rank 0 is alive");
    }
  }
  return Decision(std::move(store), group->getRank(), group->getSize(), std::move(call), timeout, number);
}

absl::StatusOr<std::string> Decision::read(const std::string& key, const std::string& what, Clock::time_point deadline) {
  const Where where{.call = call_, .rank = rank_};
  const auto left = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1));
  try {
    store_->wait({key}, left);
    const std::vector<uint8_t> bytes = store_->get(key);
    return std::string(bytes.begin(), bytes.end());
  } catch (const std::exception& failure) {
    if (Clock::now() >= deadline) return error(absl::StatusCode::kDeadlineExceeded, where, what, "Every rank must make this call");
    return error(absl::StatusCode::kUnavailable, where, absl::StrCat("the store failed (", what, ")"), "Check that rank 0 is alive");
  }
}

absl::Status Decision::write(const std::string& key, const std::string& value) {
  try {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
    return absl::OkStatus();
  } catch (const std::exception& failure) {
    return error(absl::StatusCode::kUnavailable, {.call = call_, .rank = rank_}, "the store of the process group does not answer",
                 "Check that rank 0 is alive");
  }
}

absl::Status Decision::agree(const absl::Status& own, const std::vector<std::string>& lines, const Difference& difference) {
  if (world_size_ == 1) return own;
  const std::string round = absl::StrCat("rebind/", call_, "/", number_, "/", round_++, "/");
  const std::string vote = encode(own, fingerprint_of(lines));
  if (absl::Status status = write(absl::StrCat(round, "vote/", rank_), vote); !status.ok()) return status;
  if (rank_ == 0) return decide(round, Clock::now() + timeout_, lines, difference);

  // Rank 0 waits at most timeout_ for votes, twice if it asks for lines.
  const auto undecided = [&](const absl::Status& status) {
    return error(absl::StatusCode::kUnavailable, {.call = call_, .rank = rank_},
                 absl::StrCat("undecided: no decision of rank 0 came (", status.message(), ")"),
                 "This rank stays as it was; the others may have gone on, so stop the job");
  };
  auto verdict = read(absl::StrCat(round, "verdict"), "rank 0 has not decided", Clock::now() + 2 * timeout_);
  if (!verdict.ok()) return undecided(verdict.status());
  if (*verdict == "lines") {
    if (absl::Status status = write(absl::StrCat(round, "lines/", rank_), absl::StrJoin(lines, "\n")); !status.ok()) return status;
    verdict = read(absl::StrCat(round, "verdict2"), "rank 0 has not decided", Clock::now() + 2 * timeout_);
    if (!verdict.ok()) return undecided(verdict.status());
  }
  return decode(*verdict, nullptr);
}

absl::Status Decision::decide(const std::string& round, Clock::time_point deadline, const std::vector<std::string>& lines,
                              const Difference& difference) {
  absl::Status result;
  std::string own_fingerprint;
  int different = -1;
  std::vector<int> missing;
  for (int r = 0; r < world_size_; ++r) {
    const auto vote = read(absl::StrCat(round, "vote/", r), "", deadline);
    if (!vote.ok()) {
      missing.push_back(r);
      continue;
    }
    std::string fingerprint;
    const absl::Status status = decode(*vote, &fingerprint);
    if (result.ok() && !status.ok()) result = status;
    if (r == 0) own_fingerprint = fingerprint;
    if (status.ok() && result.ok() && fingerprint != own_fingerprint && different < 0) different = r;
  }
  if (result.ok() && !missing.empty()) {
    result = error(absl::StatusCode::kDeadlineExceeded, {.call = call_, .rank = 0},
                   absl::StrCat(missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "), " did not make the call within ",
                                timeout_.count(), " ms"),
                   "Every rank must call it at the same point; nothing was changed");
  }
  std::string verdict_key = absl::StrCat(round, "verdict");
  if (result.ok() && different >= 0) {
    if (absl::Status status = write(verdict_key, "lines"); !status.ok()) return status;
    verdict_key = absl::StrCat(round, "verdict2");
    const auto theirs = read(absl::StrCat(round, "lines/", different), absl::StrCat("rank ", different, " did not say what it has"),
                             Clock::now() + timeout_);
    result = theirs.ok() ? error(absl::StatusCode::kInvalidArgument, {.call = call_},
                                 absl::StrCat("the ranks differ: ",
                                              difference(lines, std::vector<std::string>(absl::StrSplit(*theirs, '\n')), different)),
                                 "Build the same model, optimizers and options on every rank; nothing was changed")
                         : theirs.status();
  }
  if (absl::Status status = write(verdict_key, encode(result, "yes")); !status.ok()) return status;
  return result;
}

}  // namespace rebind::prepare
