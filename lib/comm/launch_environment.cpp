#include "lib/comm/launch_environment.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <optional>
#include <vector>

#include "lib/base/error.h"

namespace rebind::comm {
namespace {

const Where kWhere{.call = "init_process_group"};

class Reader {
 public:
  explicit Reader(const std::function<const char*(const char*)>& get) : get_(get) {}

  // Empty counts as not set.
  std::string text(const char* name) const {
    const char* value = get_(name);
    return value == nullptr ? "" : value;
  }
  bool has(const char* name) const { return !text(name).empty(); }

  absl::StatusOr<int64_t> number(const char* name, int64_t low, int64_t high) const {
    int64_t value = 0;
    if (!absl::SimpleAtoi(text(name), &value) || value < low || value > high) {
      return error(absl::StatusCode::kInvalidArgument, kWhere,
                   absl::StrCat(name, " is '", text(name), "', expected a number from ", low, " to ", high),
                   absl::StrCat("Set ", name, ", or start the program with torchrun"));
    }
    return value;
  }

 private:
  const std::function<const char*(const char*)>& get_;
};

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0; }

// The number of tasks another launcher started, where it says so.
std::optional<absl::Status> other_launcher(const Reader& read) {
  struct Launcher {
    const char *name, *size, *rank;
  };
  for (const Launcher& launcher : {Launcher{"Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                   Launcher{"Slurm", "SLURM_NTASKS", "SLURM_PROCID"}, Launcher{"PMI", "PMI_SIZE", "PMI_RANK"}}) {
    if (!read.has(launcher.size) || !read.has(launcher.rank)) continue;
    const auto tasks = read.number(launcher.size, 1, INT32_MAX);
    if (!tasks.ok()) return tasks.status();
    if (*tasks == 1) continue;
    return error(absl::StatusCode::kUnimplemented, kWhere,
                 absl::StrCat(launcher.size, " is ", *tasks, " and ", launcher.rank, " is ", read.text(launcher.rank),
                              ", but RANK and WORLD_SIZE are not set: ", launcher.name, "'s own variables are not read yet"),
                 "Start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<LaunchEnvironment> read_launch_environment(const std::function<const char*(const char*)>& get) {
  const Reader read(get);
  LaunchEnvironment launch;
  const bool has_rank = read.has("RANK"), has_size = read.has("WORLD_SIZE");
  if (!has_rank && !has_size) {
    if (auto refused = other_launcher(read)) return *refused;
    return launch;
  }
  if (!has_rank || !has_size) {
    return error(absl::StatusCode::kInvalidArgument, kWhere,
                 absl::StrCat(has_rank ? "RANK" : "WORLD_SIZE", " is set, ", has_rank ? "WORLD_SIZE" : "RANK", " is not"),
                 "Set both or none, or start the program with torchrun");
  }

  const auto size = read.number("WORLD_SIZE", 1, 1 << 20);
  if (!size.ok()) return size.status();
  const auto rank = read.number("RANK", 0, *size - 1);
  if (!rank.ok()) return rank.status();
  launch.world_size = static_cast<int>(*size);
  launch.rank = static_cast<int>(*rank);
  if (read.has("LOCAL_RANK")) {
    const auto local = read.number("LOCAL_RANK", 0, *size - 1);
    if (!local.ok()) return local.status();
    launch.local_rank = static_cast<int>(*local);
  }
  if (launch.world_size == 1) return launch;

  std::vector<std::string> missing;
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (!read.has(name)) missing.emplace_back(name);
  }
  if (!missing.empty()) {
    return error(absl::StatusCode::kInvalidArgument, kWhere,
                 absl::StrCat("RANK is ", *rank, " and WORLD_SIZE is ", *size, ", but ", absl::StrJoin(missing, " and "),
                              missing.size() == 1 ? " is not set" : " are not set"),
                 "Set the address and port of rank 0, or start the program with torchrun");
  }
  const auto port = read.number("MASTER_PORT", 1, 65535);
  if (!port.ok()) return port.status();
  launch.master_address = read.text("MASTER_ADDR");
  launch.master_port = static_cast<uint16_t>(*port);
  launch.agent_serves_store = read.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  launch.all_local = is_loopback(launch.master_address) || read.text("LOCAL_WORLD_SIZE") == read.text("WORLD_SIZE");
  launch.key_prefix = absl::StrCat("rebind/", read.text("TORCHELASTIC_RUN_ID"), "/", read.text("TORCHELASTIC_RESTART_COUNT"));
  return launch;
}

}  // namespace rebind::comm
