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

constexpr std::chrono::milliseconds kLookAgain{2000};
// Rank 0's word that the ranks differ, and that it wants to see how.
const std::string kAskForLines = "lines";
const std::string kYes = "yes";

// Ranks run one binary, so the standard library's hash of a text is the same on all of them.
std::string fingerprint_of(const std::vector<std::string>& lines) {
  return absl::StrCat(lines.size(), "-", std::hash<std::string>()(absl::StrJoin(lines, "\n")));
}

}  // namespace

// One store value: "<code> <origin> <text>"; the text of OK is the fingerprint.
std::string Decision::encode(const Vote& vote) {
  return absl::StrCat(static_cast<int>(vote.status.code()), vote.origin == Origin::kOwn ? " o " : " c ",
                      vote.status.ok() ? absl::string_view(vote.fingerprint) : vote.status.message());
}

Decision::Vote Decision::decode(const std::string& value) {
  const std::vector<std::string> parts = absl::StrSplit(value, absl::MaxSplits(' ', 2));
  int code = 0;
  Vote vote;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &code)) {
    vote.status = absl::InternalError(absl::StrCat("malformed vote: ", value));
    return vote;
  }
  vote.origin = parts[1] == "o" ? Origin::kOwn : Origin::kConsequence;
  if (code == 0) {
    vote.fingerprint = parts[2];
  } else {
    vote.status = absl::Status(static_cast<absl::StatusCode>(code), parts[2]);
  }
  return vote;
}

Decision::Decision(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, std::string call,
                   std::chrono::milliseconds timeout, int64_t number)
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
      return error(absl::StatusCode::kUnavailable, where, "the store of the process group does not answer",
                   "Check that rank 0 is alive");
    }
  }
  return Decision(std::move(store), group->getRank(), group->getSize(), std::move(call), timeout, number);
}

absl::StatusOr<std::string> Decision::read(const std::string& key, const std::string& what, Clock::time_point deadline) {
  const Where where{.call = call_, .rank = rank_};
  // Rounded up, so that a wait that ends too late does so after the deadline.
  const auto left = std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1));
  try {
    store_->wait({key}, left);
    const std::vector<uint8_t> bytes = store_->get(key);
    return std::string(bytes.begin(), bytes.end());
  } catch (const std::exception& failure) {
    if (Clock::now() >= deadline) return error(absl::StatusCode::kDeadlineExceeded, where, what, "Every rank must make this call");
    return error(absl::StatusCode::kUnavailable, where, absl::StrCat("the store failed (", what, ")"),
                 "Check that rank 0 is alive");
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

absl::Status Decision::undecided(const absl::Status& status) const {
  return error(absl::StatusCode::kUnavailable, {.call = call_, .rank = rank_},
               absl::StrCat("undecided: no decision of rank 0 came (", status.message(), ")"),
               "This rank stays as it was; the others may have gone on, so stop the job");
}

// Rank 0 waits at most timeout_ for votes, and as long for lines. Nothing is allocated once a "yes" was read.
absl::Status Decision::read_verdict(const std::string& key, bool* asked_for_lines) {
  const auto verdict = read(key, "rank 0 has not decided", Clock::now() + 2 * timeout_);
  if (!verdict.ok()) return undecided(verdict.status());
  if (*verdict == kYes) return absl::OkStatus();
  if (asked_for_lines != nullptr && *verdict == kAskForLines) {
    *asked_for_lines = true;
    return absl::OkStatus();
  }
  return decode(*verdict).status;
}

absl::Status Decision::agree(const absl::Status& own, Origin origin, const std::vector<std::string>& lines,
                             const Difference& difference) {
  if (world_size_ == 1) return own;
  const std::string round = absl::StrCat("rebind/", call_, "/", number_, "/", round_++, "/");
  const Vote vote{own, origin, fingerprint_of(lines)};
  if (rank_ == 0) return decide(round, vote, lines, difference);

  // Whether a vote that was not acknowledged has arrived shows in the decision.
  write(absl::StrCat(round, "vote/", rank_), encode(vote)).IgnoreError();
  bool asked_for_lines = false;
  absl::Status verdict = read_verdict(absl::StrCat(round, "verdict"), &asked_for_lines);
  if (!asked_for_lines) return verdict;
  write(absl::StrCat(round, "lines/", rank_), absl::StrJoin(lines, "\n")).IgnoreError();
  return read_verdict(absl::StrCat(round, "verdict2"));
}

absl::Status Decision::decide(const std::string& round, const Vote& own, const std::vector<std::string>& lines,
                              const Difference& difference) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  absl::Status cause = own.origin == Origin::kOwn ? own.status : absl::OkStatus();
  absl::Status consequence = own.origin == Origin::kOwn ? absl::OkStatus() : own.status;
  int different = -1;
  std::vector<int> missing;
  for (int r = 1; r < world_size_; ++r) {
    const auto text = read(absl::StrCat(round, "vote/", r), absl::StrCat("for the vote of rank ", r), deadline);
    if (!text.ok()) {
      // Without an answer in time: that rank. Without a store: nobody.
      if (text.status().code() == absl::StatusCode::kDeadlineExceeded)
        missing.push_back(r);
      else if (consequence.ok())
        consequence = text.status();
      continue;
    }
    const Vote vote = decode(*text);
    absl::Status& kind = vote.origin == Origin::kOwn ? cause : consequence;
    if (kind.ok()) kind = vote.status;
    if (vote.status.ok() && own.status.ok() && vote.fingerprint != own.fingerprint && different < 0) different = r;
  }
  absl::Status result = !cause.ok() ? cause : consequence;
  if (result.ok() && !missing.empty()) {
    result = error(absl::StatusCode::kDeadlineExceeded, {.call = call_, .rank = 0},
                   absl::StrCat(missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "),
                                " did not make the call within ", timeout_.count(), " ms"),
                   "Every rank must call it at the same point; nothing was changed");
  }
  std::string verdict_key = absl::StrCat(round, "verdict");
  if (result.ok() && different >= 0) {
    write(verdict_key, kAskForLines).IgnoreError();  // whoever does not see it says nothing, and stays undecided
    verdict_key = absl::StrCat(round, "verdict2");
    const auto theirs = read(absl::StrCat(round, "lines/", different), absl::StrCat("rank ", different, " did not say what it has"),
                             Clock::now() + timeout_);
    result = theirs.ok()
                 ? error(absl::StatusCode::kInvalidArgument, {.call = call_},
                         absl::StrCat("the ranks differ: ",
                                      difference(lines, std::vector<std::string>(absl::StrSplit(*theirs, '\n')), different)),
                         "Build the same model, optimizers and options on every rank; nothing was changed")
                 : theirs.status();
  }
  const absl::Status written = write(verdict_key, result.ok() ? kYes : encode({result, Origin::kOwn, ""}));
  if (written.ok() || !result.ok()) return result;
  // The others commit exactly if the "yes" is there.
  const auto there = read(verdict_key, "its own decision cannot be read", Clock::now() + std::min(timeout_, kLookAgain));
  return there.ok() ? result : undecided(written);
}

}  // namespace rebind::prepare
