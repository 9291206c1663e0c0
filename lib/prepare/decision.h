// One outcome for all ranks: each votes, rank 0 decides, everyone reads the decision.
//
// In: this rank's status and a text that must be equal on all ranks. Out: OK on every rank, or the same error on every rank, in
// bounded time. It uses only the store: a process group may be what is broken.
//
// Note: Decision. The decision is one key, set once by rank 0 after all votes. A rank commits exactly if it reads "yes". A rank
// that cannot read it within the time limit stays as it was and returns Unavailable "undecided"; that rank knows that it does not
// know, the others may have committed. A store operation that fails may have worked: so a rank whose vote was not acknowledged
// still reads the decision, and rank 0 looks whether its own is there.
//
// Note: Causes. One rank's failure makes others fail: they wait for it in a collective. All ranks return the failure of the lowest
// rank that has one of its own; only if nobody has, that of the lowest rank that waited in vain.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lib/base/error.h"

namespace rebind::prepare {

class Decision {
 public:
  // Collective in the sense that every rank makes one for the same call. `call` for messages.
  static absl::StatusOr<Decision> begin(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string call,
                                        std::chrono::milliseconds timeout);

  // Rounds are numbered; every rank goes through the same ones and stops after the first that fails.
  // `fingerprint` is compared; where it differs, `lines` are fetched and the first difference is reported by
  // `difference(rank 0's lines, the other's lines, the other rank)`.
  using Difference = std::function<std::string(const std::vector<std::string>&, const std::vector<std::string>&, int)>;
  absl::Status agree(const absl::Status& own, const std::vector<std::string>& lines, const Difference& difference) {
    return agree(own, Origin::kOwn, lines, difference);
  }
  // `kConsequence`: the error came from another rank, as a collective that failed.
  enum class Origin { kOwn, kConsequence };
  absl::Status agree(const absl::Status& own, Origin origin = Origin::kOwn) { return agree(own, origin, {}, nullptr); }

  // Equal on all ranks, different for each call on this store.
  int64_t number() const { return number_; }

 private:
  Decision(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, std::string call, std::chrono::milliseconds timeout,
           int64_t number);
  struct Vote {
    absl::Status status;
    Origin origin = Origin::kOwn;
    std::string fingerprint;
  };
  static std::string encode(const Vote& vote);
  static Vote decode(const std::string& value);

  absl::Status agree(const absl::Status& own, Origin origin, const std::vector<std::string>& lines, const Difference& difference);
  absl::StatusOr<std::string> read(const std::string& key, const std::string& what, std::chrono::steady_clock::time_point deadline);
  absl::Status write(const std::string& key, const std::string& value);
  absl::Status undecided(const absl::Status& status) const;
  absl::Status read_verdict(const std::string& key, bool* asked_for_lines = nullptr);
  absl::Status decide(const std::string& round, const Vote& own, const std::vector<std::string>& lines,
                      const Difference& difference);

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, world_size_;
  std::string call_;
  std::chrono::milliseconds timeout_;
  int64_t number_;
  int round_ = 0;
};

}  // namespace rebind::prepare
