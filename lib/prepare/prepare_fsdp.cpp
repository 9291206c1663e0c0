// prepare_fsdp: one transaction over all ranks. Check, agree, stage, decide, commit.
#include "rebind/prepare_fsdp.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include "lib/base/error.h"
#include "lib/comm/error_file.h"
#include "lib/plan/census.h"
#include "lib/prepare/decision.h"
#include "lib/prepare/stage.h"

namespace rebind {
namespace {

constexpr int kChannels = 4096;

absl::Status check_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Where& where) {
  if (group->getSize() == 1) return absl::OkStatus();
  try {
    group->getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    return error(absl::StatusCode::kUnimplemented, where, "the process group has no backend for CPU tensors",
                 "Make it with backend 'gloo'");
  }
  return absl::OkStatus();
}

// `body`'s status; what LibTorch or the allocator throws becomes one.
template <class Body>
absl::Status guarded(const Where& where, Body body) {
  try {
    return body();
  } catch (const c10::Error& failure) {
    return error(absl::StatusCode::kInternal, where, failure.what_without_backtrace(), "Nothing was changed");
  } catch (const std::bad_alloc&) {
    return error(absl::StatusCode::kResourceExhausted, where, "out of memory",
                 "Nothing was changed; free memory or use more ranks");
  } catch (const std::exception& failure) {
    return error(absl::StatusCode::kInternal, where, failure.what(), "Nothing was changed");
  }
}

absl::StatusOr<std::unique_ptr<Fsdp>> transaction(const std::vector<NamedModule>& models, const Optimizers& optimizers,
                                                  c10::intrusive_ptr<c10d::ProcessGroup> group, const FsdpOptions& options) {
  if (group == nullptr) {
    return error(absl::StatusCode::kInvalidArgument, {.call = "prepare_fsdp"}, "the process group is null",
                 "Make one with rebind::init_process_group()");
  }
  // Shards are ordinary tensors wherever the call is made: an inference tensor could never be written to by a step.
  c10::InferenceMode ordinary(false);
  const Where where{.call = "prepare_fsdp", .rank = group->getRank()};
  auto decision = prepare::Decision::begin(group, "prepare_fsdp", options.collective_timeout);
  if (!decision.ok()) return decision.status();

  plan::Census census;
  FsdpPlan plan;
  std::vector<std::string> lines;
  const absl::Status checked = guarded(where, [&] {
    if (absl::Status status = check_group(group, where); !status.ok()) return status;
    auto taken = plan::take_census(models, optimizers, where);
    if (!taken.ok()) return taken.status();
    census = *std::move(taken);
    auto made = plan::make_plan(census, group->getRank(), group->getSize(), options, where);
    if (!made.ok()) return made.status();
    plan = *std::move(made);
    lines = plan::agreement_lines(census, plan, options);
    return absl::OkStatus();
  });
  if (absl::Status status = decision->agree(checked, lines, plan::first_difference); !status.ok()) return status;

  // The largest pieces of memory come before the first collective, so that a rank that cannot have them is waited for by nobody.
  prepare::Staged staged;
  std::unique_ptr<Fsdp> fsdp;
  const absl::Status made = guarded(where, [&] {
    auto communicator =
        std::make_unique<comm::Communicator>(group, static_cast<int>(decision->number() % kChannels), options.collective_timeout);
    staged.sharding = runtime::Sharding::make(plan, options, optimizers, std::move(communicator), group);
    // Once the ranks have decided nothing may fail. LibTorch allocates the handle of an operator when it is called for the first
    // time.
    fsdp = std::make_unique<Fsdp>(staged.sharding);
    at::empty({0}).set_data(at::empty({0}));
    return absl::OkStatus();
  });
  if (absl::Status status = decision->agree(made); !status.ok()) return status;

  const absl::Status ready = guarded(where, [&] { return prepare::stage(census, options, staged); });
  using Origin = prepare::Decision::Origin;
  comm::Communicator& communicator = *staged.sharding->communicator;
  const Origin origin = ready.ok() || !communicator.broken().ok() ? Origin::kConsequence : Origin::kOwn;
  // Every rank comes here, also one that failed: peers that wait for it in another collective see that at once.
  const absl::Status met = guarded(where, [&] {
    return communicator.exchange({.kind = comm::Kind::kExchange, .unit = 0, .epoch = 0, .name = "the end of staging"}, {}).status();
  });
  if (absl::Status status = decision->agree(ready.ok() ? met : ready, origin); !status.ok()) return status;

  prepare::commit(staged);
  return fsdp;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Fsdp>> prepare_fsdp(const std::vector<NamedModule>& models, const Optimizers& optimizers,
                                                   c10::intrusive_ptr<c10d::ProcessGroup> group, const FsdpOptions& options) {
  absl::StatusOr<std::unique_ptr<Fsdp>> result = nullptr;
  const absl::Status status = guarded({.call = "prepare_fsdp"}, [&] {
    result = transaction(models, optimizers, std::move(group), options);
    return result.status();
  });
  if (!status.ok()) result = status;
  return comm::told_to_launcher(std::move(result));
}

absl::StatusOr<std::unique_ptr<Fsdp>> prepare_fsdp(torch::nn::Module& model, const Optimizers& optimizers,
                                                   c10::intrusive_ptr<c10d::ProcessGroup> group, const FsdpOptions& options) {
  return prepare_fsdp(std::vector<NamedModule>{{"", &model}}, optimizers, std::move(group), options);
}

}  // namespace rebind
