#include "lib/comm/launch_environment.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <initializer_list>
#include <vector>

#include "lib/base/error.h"
#include "lib/comm/host_list.h"

namespace rebind::comm {
namespace {

constexpr int64_t kMaxRanks = 1 << 20;

absl::Status invalid(const std::string& what, const std::string& remedy) {
  return error(absl::StatusCode::kInvalidArgument, {.call = "init_process_group"}, what, remedy);
}

class Reader {
 public:
  explicit Reader(const std::function<const char*(const char*)>& get) : get_(get) {}

  // Empty counts as not set.
  std::string text(const char* name) const {
    const char* value = get_(name);
    return value == nullptr ? "" : value;
  }
  bool has(const char* name) const { return !text(name).empty(); }

  // The first of the names that is set; if none is, the last.
  const char* first_set(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (has(name)) return name;
    }
    return *(names.end() - 1);
  }

  absl::StatusOr<int64_t> number(const char* name, int64_t low, int64_t high) const {
    int64_t value = 0;
    if (!absl::SimpleAtoi(text(name), &value) || value < low || value > high) {
      return invalid(absl::StrCat(name, " is '", text(name), "', expected a number from ", low, " to ", high),
                     absl::StrCat("Set ", name, ", or start the program with torchrun"));
    }
    return value;
  }

 private:
  const std::function<const char*(const char*)>& get_;
};

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0; }

// The variables of one launcher. What its versions call differently is looked up before.
struct Variables {
  const char *rank, *size, *local_rank, *local_size;
};

// Fills in rank, world_size and local_rank; all_local as far as the launcher counts the ranks of a host.
absl::Status read_ranks(const Reader& read, const Variables& names, LaunchEnvironment& launch) {
  const bool has_rank = read.has(names.rank), has_size = read.has(names.size);
  if (!has_rank || !has_size) {
    return invalid(absl::StrCat(has_rank ? names.rank : names.size, " is set, ", has_rank ? names.size : names.rank, " is not"),
                   "Set both or none, or start the program with torchrun");
  }
  const auto size = read.number(names.size, 1, kMaxRanks);
  if (!size.ok()) return size.status();
  const auto rank = read.number(names.rank, 0, *size - 1);
  if (!rank.ok()) return rank.status();
  int64_t local_size = *size;
  if (names.local_size != nullptr && read.has(names.local_size)) {
    const auto count = read.number(names.local_size, 1, *size);
    if (!count.ok()) return count.status();
    local_size = *count;
    launch.all_local = *count == *size;
  }
  if (read.has(names.local_rank)) {
    const auto local = read.number(names.local_rank, 0, local_size - 1);
    if (!local.ok()) return local.status();
    launch.local_rank = static_cast<int>(*local);
  }
  launch.world_size = static_cast<int>(*size);
  launch.rank = static_cast<int>(*rank);
  return absl::OkStatus();
}

// Note: Master. `job`: the launcher's id of this job, empty if it gives none.
uint16_t port_of(const std::string& job) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a: the same in every build
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<uint16_t>(10000 + hash % 20000);
}

// MASTER_ADDR and MASTER_PORT, else `address` and the port of `job`, where these are not empty.
absl::Status read_master(const Reader& read, const std::string& address, const std::string& job, const std::string& found,
                         const std::string& remedy, LaunchEnvironment& launch) {
  launch.master_address = read.has("MASTER_ADDR") ? read.text("MASTER_ADDR") : address;
  std::vector<std::string> missing;
  if (launch.master_address.empty()) missing.emplace_back("MASTER_ADDR");
  if (!read.has("MASTER_PORT") && job.empty()) missing.emplace_back("MASTER_PORT");
  if (!missing.empty()) {
    return invalid(
        absl::StrCat(found, ", but ", absl::StrJoin(missing, " and "), missing.size() == 1 ? " is not set" : " are not set"),
        remedy);
  }
  launch.master_port = port_of(job);
  if (read.has("MASTER_PORT")) {
    const auto port = read.number("MASTER_PORT", 1, 65535);
    if (!port.ok()) return port.status();
    launch.master_port = static_cast<uint16_t>(*port);
  }
  launch.all_local = launch.all_local || is_loopback(launch.master_address);
  return absl::OkStatus();
}

std::string found_text(const Variables& names, const LaunchEnvironment& launch) {
  return absl::StrCat(names.rank, " is ", launch.rank, " and ", names.size, " is ", launch.world_size);
}

absl::StatusOr<LaunchEnvironment> torchrun_or_by_hand(const Reader& read) {
  const Variables names{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
  LaunchEnvironment launch;
  if (absl::Status status = read_ranks(read, names, launch); !status.ok()) return status;
  if (read.has("TORCHELASTIC_RUN_ID")) launch.launcher = "torchrun";
  if (launch.world_size == 1) return launch;
  const char* remedy = "Set the address and port of rank 0, or start the program with torchrun";
  if (absl::Status status = read_master(read, "", "", found_text(names, launch), remedy, launch); !status.ok()) return status;
  launch.agent_serves_store = read.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  launch.key_prefix = absl::StrCat("rebind/", read.text("TORCHELASTIC_RUN_ID"), "/", read.text("TORCHELASTIC_RESTART_COUNT"));
  return launch;
}

// Open MPI, MPICH, Intel MPI: they know who shares a host, but not where rank 0 is.
absl::StatusOr<LaunchEnvironment> mpi(const Reader& read, const Variables& names, const std::string& launcher, const char* job_id,
                                      const std::string& option) {
  LaunchEnvironment launch;
  if (absl::Status status = read_ranks(read, names, launch); !status.ok()) return status;
  launch.launcher = launcher;
  if (launch.world_size == 1) return launch;
  const std::string job = read.text(job_id), address = launch.all_local ? "127.0.0.1" : "";
  const std::string remedy = absl::StrCat("Give all ranks the address and a port of rank 0's host, with mpirun ", option);
  if (absl::Status status = read_master(read, address, job, found_text(names, launch), remedy, launch); !status.ok()) return status;
  launch.key_prefix = absl::StrCat("rebind/", launcher, "/", job);
  return launch;
}

// A step is what srun started. Outside one, in the shell of an allocation, there may be a number of tasks, but no rank.
absl::StatusOr<LaunchEnvironment> slurm(const Reader& read, const char* size_name) {
  const Variables names{"SLURM_PROCID", size_name, "SLURM_LOCALID", nullptr};
  LaunchEnvironment launch;
  if (absl::Status status = read_ranks(read, names, launch); !status.ok()) return status;
  launch.launcher = "Slurm";
  // An mpiexec inside a step starts several ranks with the variables of one task.
  for (const auto& [pmi, value] : {std::pair("PMI_RANK", launch.rank), std::pair("PMI_SIZE", launch.world_size)}) {
    if (!read.has(pmi) || read.text(pmi) == absl::StrCat(value)) continue;
    return invalid(
        absl::StrCat(found_text(names, launch), ", but ", pmi, " is ", read.text(pmi)),
        "Two launchers number the ranks differently: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the right one");
  }
  const char* nodes = read.first_set({"SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"});
  launch.all_local = read.text(nodes) == "1";
  const char* list = read.first_set({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"});
  const std::string hosts = read.text(list);
  std::string job = read.text("SLURM_JOB_ID");
  if (!job.empty() && read.has("SLURM_STEP_ID")) absl::StrAppend(&job, ".", read.text("SLURM_STEP_ID"));
  const auto host = first_host(hosts);
  if (!host && !hosts.empty() && !read.has("MASTER_ADDR")) {
    return invalid(absl::StrCat(list, " is '", hosts, "', which is no list of hosts"), "Set MASTER_ADDR to the host of rank 0");
  }
  std::vector<std::string> unset;
  if (!host) unset.emplace_back(list);
  if (job.empty()) unset.emplace_back("SLURM_JOB_ID");
  std::string found = found_text(names, launch);
  if (!unset.empty()) absl::StrAppend(&found, " without ", absl::StrJoin(unset, " and "));
  const char* remedy = "Set the address and port of rank 0, or start the program with srun";
  if (absl::Status status = read_master(read, host.value_or(""), job, found, remedy, launch); !status.ok()) return status;
  launch.key_prefix = absl::StrCat("rebind/Slurm/", job, "/", read.text("SLURM_RESTART_COUNT"));
  return launch;
}

}  // namespace

absl::StatusOr<LaunchEnvironment> read_launch_environment(const std::function<const char*(const char*)>& get) {
  const Reader read(get);
  if (read.has("RANK") || read.has("WORLD_SIZE")) return torchrun_or_by_hand(read);

  if (read.has("OMPI_COMM_WORLD_RANK") || read.has("OMPI_COMM_WORLD_SIZE")) {
    const Variables names{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                          "OMPI_COMM_WORLD_LOCAL_SIZE"};
    const char* job_id = read.first_set({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
    return mpi(read, names, "Open MPI", job_id, "-x MASTER_ADDR=HOST -x MASTER_PORT=29500");
  }

  // The shell of an allocation has a number of tasks and no rank, a batch script rank 0 and perhaps no number.
  const char* tasks = read.first_set({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  const std::string procid = read.text("SLURM_PROCID");
  if (!procid.empty() && (read.has(tasks) || procid != "0")) {
    if (!read.has(tasks)) return slurm(read, tasks);  // says which one is missing
    const auto count = read.number(tasks, 1, kMaxRanks);
    if (!count.ok()) return count.status();
    if (*count > 1) return slurm(read, tasks);
  }

  if (read.has("PMI_RANK") || read.has("PMI_SIZE")) {
    const Variables names{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
    return mpi(read, names, "PMI", "PMI_JOBID", "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500");
  }
  return LaunchEnvironment{};
}

}  // namespace rebind::comm
