#include "rebind/process_group.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "lib/base/error.h"
#include "lib/comm/error_file.h"
#include "lib/comm/gloo_backend.h"
#include "lib/comm/launch_environment.h"
#include "lib/comm/master_store.h"
#include "lib/comm/nccl_backend.h"
#include "lib/comm/parent_death.h"
#include "lib/comm/solo_backend.h"

namespace rebind {
namespace {

using std::chrono::milliseconds;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::string first_line(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  const std::string text = error != nullptr ? error->what_without_backtrace() : e.what();
  return text.substr(0, text.find('\n'));
}

absl::Status check(const ProcessGroupOptions& options, int rank, int world_size, const Where& where) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return error(absl::StatusCode::kInvalidArgument, where,
                 absl::StrCat("rank ", rank, " of ", world_size, ", expected 0 <= rank < world size"),
                 "Pass each rank its own number");
  }
  if (options.timeout <= milliseconds(0)) {
    return error(absl::StatusCode::kInvalidArgument, where,
                 absl::StrCat("ProcessGroupOptions::timeout is ", options.timeout.count(), " ms"), "Use a positive one");
  }
  if (options.backend == "nccl" && !comm::has_nccl_backend()) {
    return error(absl::StatusCode::kUnimplemented, where, "rebind was built without the backend 'nccl'",
                 "Use 'gloo', or build with REBIND_NCCL=ON and a CUDA LibTorch");
  }
  if (options.backend != "auto" && options.backend != "gloo" && options.backend != "nccl") {
    return error(absl::StatusCode::kInvalidArgument, where, absl::StrCat("backend '", options.backend, "' is not known"),
                 "Use 'auto', 'gloo' or 'nccl'");
  }
  return absl::OkStatus();
}

Group solo_group(c10::intrusive_ptr<c10d::Store> store) {
  if (!store) store = c10::make_intrusive<c10d::HashStore>();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(std::move(store), /*rank=*/0, /*size=*/1);
  const auto backend = c10::make_intrusive<comm::SoloBackend>();
  for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    group->setBackend(device, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

// Waits until all ranks are here, which names those that are not; Gloo's own connecting names nobody.
absl::Status meet(c10d::Store& store, int rank, int world_size, milliseconds timeout, const Where& where) {
  std::vector<std::string> keys;
  keys.reserve(world_size);
  for (int r = 0; r < world_size; ++r) keys.push_back(absl::StrCat("here/", r));
  store.set(keys[rank], "1");
  try {
    store.wait(keys, timeout);
    return absl::OkStatus();
  } catch (const std::exception& e) {
    std::vector<int> missing;
    for (int r = 0; r < world_size; ++r) {
      if (!store.check({keys[r]})) missing.push_back(r);
    }
    if (missing.empty()) throw;
    return error(absl::StatusCode::kDeadlineExceeded, where,
                 absl::StrCat(missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "), " of ", world_size,
                              " did not arrive within ", timeout.count(), " ms"),
                 "Start all ranks, with the same WORLD_SIZE and master; look at the output of the missing ones first");
  }
}

absl::StatusOr<Group> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                              const ProcessGroupOptions& options, comm::Reach reach, const Where& where) {
  const char* remedy = "If the host has several networks, name the right interface in GLOO_SOCKET_IFNAME";
  try {
    // The n-th group that this rank makes over the store meets the n-th of the others.
    const int64_t number = store->add(absl::StrCat("groups/", rank), 1);
    const auto own = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("group", number), store);
    if (absl::Status status = meet(*own, rank, world_size, options.timeout, where); !status.ok()) return status;

    auto group = c10::make_intrusive<c10d::ProcessGroup>(own, rank, world_size);
    const auto gloo =
        comm::make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo", own), rank, world_size, options.timeout, reach);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    if (options.backend == "nccl") {
      remedy = "NCCL needs a GPU for each rank; use the backend 'gloo' for tensors on the CPU";
      const auto nccl =
          comm::make_nccl_backend(c10::make_intrusive<c10d::PrefixStore>("nccl", own), rank, world_size, options.timeout);
      group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, nccl);
      group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
    }
    return group;
  } catch (const std::exception& e) {
    return error(absl::StatusCode::kUnavailable, where, absl::StrCat("the ranks could not be connected (", first_line(e), ")"),
                 remedy);
  }
}

absl::StatusOr<Group> join(const ProcessGroupOptions& options) {
  const auto launch = comm::read_launch_environment([](const char* name) { return std::getenv(name); });
  if (!launch.ok()) return launch.status();
  const Where where{.call = "init_process_group", .rank = launch->rank};
  if (absl::Status status = check(options, launch->rank, launch->world_size, where); !status.ok()) return status;
  if (launch->world_size == 1) return solo_group(nullptr);
  if (options.end_with_launcher && !launch->launcher.empty()) {
    if (absl::Status status = comm::end_with_parent(where); !status.ok()) return status;
  }
  auto store = comm::connect_master_store(*launch, options.timeout);
  if (!store.ok()) return store.status();
  return connect(*store, launch->rank, launch->world_size, options,
                 launch->all_local ? comm::Reach::kThisHost : comm::Reach::kAnyHost, where);
}

}  // namespace

absl::StatusOr<Group> make_process_group(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                                         const ProcessGroupOptions& options) {
  const Where where{.call = "make_process_group", .rank = rank};
  if (absl::Status status = check(options, rank, world_size, where); !status.ok()) return status;
  if (world_size == 1) return solo_group(std::move(store));
  if (!store) {
    return error(absl::StatusCode::kInvalidArgument, where, "the store is null", "Pass one that all ranks share");
  }
  // A HashStore lives in this process, so all ranks do.
  c10::intrusive_ptr<c10d::Store> innermost = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) innermost = prefixed->getUnderlyingNonPrefixStore();
  const bool here = dynamic_cast<c10d::HashStore*>(innermost.get()) != nullptr;
  return connect(store, rank, world_size, options, here ? comm::Reach::kThisHost : comm::Reach::kAnyHost, where);
}

absl::StatusOr<Group> init_process_group(const ProcessGroupOptions& options) { return comm::told_to_launcher(join(options)); }

}  // namespace rebind
