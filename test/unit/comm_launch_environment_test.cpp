#include <map>
#include <string>
#include <vector>

#include "lib/comm/host_list.h"
#include "lib/comm/launch_environment.h"
#include "test/support/catch.h"

namespace rebind::comm {
namespace {

using Variables = std::map<std::string, std::string>;

absl::StatusOr<LaunchEnvironment> read(const Variables& variables) {
  return read_launch_environment([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

// One line: "rank 1 of 2, local 1, host:29500, agent, here, prefix".
std::string line(const absl::StatusOr<LaunchEnvironment>& launch) {
  if (!launch.ok()) return launch.status().ToString();
  return "rank " + std::to_string(launch->rank) + " of " + std::to_string(launch->world_size) + ", local " +
         std::to_string(launch->local_rank) + ", " + launch->master_address + ":" + std::to_string(launch->master_port) +
         (launch->agent_serves_store ? ", agent" : ", rank 0 serves") + (launch->all_local ? ", one host" : ", any host") + ", '" +
         launch->key_prefix + "'";
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kByHand{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}};

TEST_CASE("launch: an environment without a launcher is one process", "[comm][launch]") {
  CHECK(line(read({})) == "rank 0 of 1, local 0, :0, rank 0 serves, any host, ''");
  CHECK(line(read({{"RANK", ""}, {"WORLD_SIZE", ""}})) == "rank 0 of 1, local 0, :0, rank 0 serves, any host, ''");
  // A master alone starts nothing.
  CHECK(line(read({{"MASTER_ADDR", "node7"}})) == "rank 0 of 1, local 0, :0, rank 0 serves, any host, ''");
}

TEST_CASE("launch: RANK and WORLD_SIZE by hand", "[comm][launch]") {
  CHECK(line(read(kByHand)) == "rank 1 of 4, local 0, node7:29500, rank 0 serves, any host, 'rebind//'");
  CHECK(line(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}})) == "rank 0 of 1, local 0, :0, rank 0 serves, any host, ''");
  for (const char* host : {"localhost", "127.0.0.1", "127.0.1.1", "::1"}) {
    CHECK(read(with(kByHand, {{"MASTER_ADDR", host}}))->all_local);
  }
}

TEST_CASE("launch: under torchrun the agent serves the store, and runs and restarts are told apart", "[comm][launch]") {
  const Variables torchrun = with(kByHand, {{"RANK", "3"},
                                            {"LOCAL_RANK", "1"},
                                            {"LOCAL_WORLD_SIZE", "2"},
                                            {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                            {"TORCHELASTIC_RUN_ID", "job8"},
                                            {"TORCHELASTIC_RESTART_COUNT", "2"}});
  CHECK(line(read(torchrun)) == "rank 3 of 4, local 1, node7:29500, agent, any host, 'rebind/job8/2'");
  CHECK(read(with(torchrun, {{"LOCAL_WORLD_SIZE", "4"}}))->all_local);
  CHECK_FALSE(read(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))->agent_serves_store);
}

struct Bad {
  Variables variables;
  const char* message;
};

TEST_CASE("launch: half-set, non-numeric and contradictory variables are named", "[comm][launch]") {
  const std::string start = "INVALID_ARGUMENT: init_process_group: ";
  const std::vector<Bad> cases{
      {{{"RANK", "0"}}, "RANK is set, WORLD_SIZE is not. Set both or none, or start the program with torchrun."},
      {{{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set, RANK is not. Set both or none, or start the program with torchrun."},
      {with(kByHand, {{"RANK", "two"}}),
       "RANK is 'two', expected a number from 0 to 3. Set RANK, or start the program with torchrun."},
      {with(kByHand, {{"RANK", "4"}}), "RANK is '4', expected a number from 0 to 3. Set RANK, or start the program with torchrun."},
      {with(kByHand, {{"RANK", "-1"}}),
       "RANK is '-1', expected a number from 0 to 3. Set RANK, or start the program with torchrun."},
      {with(kByHand, {{"WORLD_SIZE", "0"}}),
       "WORLD_SIZE is '0', expected a number from 1 to 1048576. Set WORLD_SIZE, or start the program with torchrun."},
      {with(kByHand, {{"WORLD_SIZE", "4x"}}),
       "WORLD_SIZE is '4x', expected a number from 1 to 1048576. Set WORLD_SIZE, or start the program with torchrun."},
      {with(kByHand, {{"LOCAL_RANK", "9"}}),
       "LOCAL_RANK is '9', expected a number from 0 to 3. Set LOCAL_RANK, or start the program with torchrun."},
      {{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "1"}},
       "RANK is 1 and WORLD_SIZE is 4, but MASTER_ADDR is not set. Set the address and port of rank 0, or start the program with "
       "torchrun."},
      {{{"RANK", "1"}, {"WORLD_SIZE", "4"}},
       "RANK is 1 and WORLD_SIZE is 4, but MASTER_ADDR and MASTER_PORT are not set. Set the address and port of rank 0, or start "
       "the "
       "program with torchrun."},
      {with(kByHand, {{"MASTER_PORT", "0"}}),
       "MASTER_PORT is '0', expected a number from 1 to 65535. Set MASTER_PORT, or start the program with torchrun."},
      {with(kByHand, {{"MASTER_PORT", "65536"}}),
       "MASTER_PORT is '65536', expected a number from 1 to 65535. Set MASTER_PORT, or start the program with torchrun."},
  };
  for (const Bad& bad : cases) CHECK(line(read(bad.variables)) == start + bad.message);
}

TEST_CASE("launch: first host of a Slurm node list", "[comm][launch]") {
  const std::map<std::string, std::string> lists{{"gnode[10,20]", "gnode10"},
                                                 {"a[01-03],b7", "a01"},
                                                 {"b7,a[01-03]", "b7"},
                                                 {"n1", "n1"},
                                                 {"rack[2-3]n[05-06]", "rack2n05"},
                                                 {"c[7]-ib,c8-ib", "c7-ib"},
                                                 {"127.0.0.[1-2]", "127.0.0.1"},
                                                 {"node-a.site", "node-a.site"}};
  for (const auto& [list, host] : lists) CHECK(first_host(list) == host);
  for (const char* list : {"", ",a", "a[", "a[1", "a[]", "a[x]", "a[-3]", "a[1-]", "a[1,]", "a]", "a b"}) {
    CAPTURE(list);
    CHECK_FALSE(first_host(list).has_value());
  }
}

const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSlurm{{"SLURM_PROCID", "5"},       {"SLURM_NTASKS", "8"},    {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},       {"SLURM_JOB_ID", "4711"}, {"SLURM_JOB_NODELIST", "gnode[10,20]"},
                       {"SLURM_JOB_NUM_NODES", "2"}};
const Variables kPmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kMaster{{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}};

TEST_CASE("launch: Open MPI", "[comm][launch]") {
  CHECK(line(read(with(kOpenMpi, kMaster))) == "rank 1 of 4, local 1, node7:29500, rank 0 serves, any host, 'rebind/Open MPI/'");
  // On one host the master is there, at a port that the job's id gives.
  const Variables local = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
  const std::string id = "'rebind/Open MPI/12345@1'";
  CHECK(line(read(with(local, {{"PMIX_NAMESPACE", "12345@1"}}))) ==
        "rank 1 of 4, local 1, 127.0.0.1:10795, rank 0 serves, one host, " + id);
  CHECK(line(read(with(local, {{"OMPI_MCA_ess_base_jobid", "12345@1"}}))) ==
        "rank 1 of 4, local 1, 127.0.0.1:10795, rank 0 serves, one host, " + id);
  CHECK(line(read(with(local, {{"PMIX_NAMESPACE", "12345@1"}, {"MASTER_PORT", "7"}}))) ==
        "rank 1 of 4, local 1, 127.0.0.1:7, rank 0 serves, one host, " + id);
  CHECK(read(with(kOpenMpi, kMaster))->launcher == "Open MPI");
}

TEST_CASE("launch: Slurm, whose first host is the master", "[comm][launch]") {
  CHECK(line(read(kSlurm)) == "rank 5 of 8, local 1, gnode10:24354, rank 0 serves, any host, 'rebind/Slurm/4711/'");
  // Two steps of a job, and a job that was started again, are told apart; a step may use other nodes and tasks than its job.
  CHECK(line(read(with(kSlurm, {{"SLURM_STEP_ID", "0"},
                                {"SLURM_STEP_NODELIST", "gnode20"},
                                {"SLURM_STEP_NUM_NODES", "1"},
                                {"SLURM_STEP_NUM_TASKS", "6"},
                                {"SLURM_RESTART_COUNT", "3"}}))) ==
        "rank 5 of 6, local 1, gnode20:17148, rank 0 serves, one host, 'rebind/Slurm/4711.0/3'");
  CHECK(line(read(with(kSlurm, {{"MASTER_PORT", "29500"}}))) ==
        "rank 5 of 8, local 1, gnode10:29500, rank 0 serves, any host, 'rebind/Slurm/4711/'");
  CHECK(line(read(with(kSlurm, {{"MASTER_ADDR", "node7"}, {"SLURM_JOB_NODELIST", "gnode["}}))) ==
        "rank 5 of 8, local 1, node7:24354, rank 0 serves, any host, 'rebind/Slurm/4711/'");
  CHECK(read(kSlurm)->launcher == "Slurm");
}

TEST_CASE("launch: PMI", "[comm][launch]") {
  CHECK(line(read(with(kPmi, kMaster))) == "rank 1 of 2, local 1, node7:29500, rank 0 serves, one host, 'rebind/PMI/'");
  CHECK(line(read(with(kPmi, {{"PMI_JOBID", "501"}}))) ==
        "rank 1 of 2, local 1, 127.0.0.1:28883, rank 0 serves, one host, 'rebind/PMI/501'");
  CHECK(read(with(kPmi, kMaster))->launcher == "PMI");
}

TEST_CASE("launch: the innermost launcher goes first, one task is one process", "[comm][launch]") {
  const auto launcher = [](const Variables& variables) { return read(variables)->launcher; };
  const Variables torchrun{{"TORCHELASTIC_RUN_ID", "none"}};
  CHECK(launcher(with(kByHand, torchrun)) == "torchrun");
  CHECK(launcher(kByHand).empty());
  CHECK(read(with(kByHand, with(kOpenMpi, kSlurm)))->world_size == 4);
  CHECK(launcher(with(with(kByHand, torchrun), with(kSlurm, kPmi))) == "torchrun");
  CHECK(launcher(with(with(kOpenMpi, kMaster), with(kSlurm, kPmi))) == "Open MPI");
  CHECK(launcher(with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}})) == "Slurm");
  CHECK(launcher(with(with(kPmi, kMaster), {{"SLURM_NTASKS", "8"}})) == "PMI");
  CHECK(launcher(with(with(kPmi, kMaster), {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}})) == "PMI");
  // mpirun -n 1 in the script of an allocation; the script itself; its shell.
  CHECK(read(with(kSlurm, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}))->world_size == 1);
  CHECK(read({{"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}})->world_size == 1);
  CHECK(read({{"SLURM_PROCID", "0"}})->world_size == 1);
  CHECK(read({{"SLURM_NTASKS", "8"}})->world_size == 1);
  CHECK(read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})->world_size == 1);
}

TEST_CASE("launch: other launchers' half-set, contradictory and missing variables are named", "[comm][launch]") {
  const std::string start = "INVALID_ARGUMENT: init_process_group: ";
  const std::vector<Bad> cases{
      {{{"OMPI_COMM_WORLD_RANK", "0"}},
       "OMPI_COMM_WORLD_RANK is set, OMPI_COMM_WORLD_SIZE is not. Set both or none, or start the program with torchrun."},
      {{{"PMI_SIZE", "2"}}, "PMI_SIZE is set, PMI_RANK is not. Set both or none, or start the program with torchrun."},
      {{{"SLURM_PROCID", "3"}}, "SLURM_PROCID is set, SLURM_NTASKS is not. Set both or none, or start the program with torchrun."},
      {{{"SLURM_NTASKS", "many"}, {"SLURM_PROCID", "0"}},
       "SLURM_NTASKS is 'many', expected a number from 1 to 1048576. Set SLURM_NTASKS, or start the program with torchrun."},
      {with(kSlurm, {{"SLURM_PROCID", "8"}}),
       "SLURM_PROCID is '8', expected a number from 0 to 7. Set SLURM_PROCID, or start the program with torchrun."},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "5"}}),
       "OMPI_COMM_WORLD_LOCAL_SIZE is '5', expected a number from 1 to 4. Set OMPI_COMM_WORLD_LOCAL_SIZE, or start the program "
       "with "
       "torchrun."},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}),
       "OMPI_COMM_WORLD_LOCAL_RANK is '2', expected a number from 0 to 1. Set OMPI_COMM_WORLD_LOCAL_RANK, or start the program "
       "with "
       "torchrun."},
      {with(kByHand, {{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
       "LOCAL_RANK is '2', expected a number from 0 to 1. Set LOCAL_RANK, or start the program with torchrun."},
      {with(kByHand, {{"LOCAL_WORLD_SIZE", "5"}}),
       "LOCAL_WORLD_SIZE is '5', expected a number from 1 to 4. Set LOCAL_WORLD_SIZE, or start the program with torchrun."},
      {kOpenMpi,
       "OMPI_COMM_WORLD_RANK is 1 and OMPI_COMM_WORLD_SIZE is 4, but MASTER_ADDR and MASTER_PORT are not set. Give all ranks the "
       "address and a port of rank 0's host, with mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500."},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
       "OMPI_COMM_WORLD_RANK is 1 and OMPI_COMM_WORLD_SIZE is 4, but MASTER_PORT is not set. Give all ranks the address and a port "
       "of "
       "rank 0's host, with mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500."},
      {with(kPmi, {{"PMI_SIZE", "3"}}),
       "PMI_RANK is 1 and PMI_SIZE is 3, but MASTER_ADDR and MASTER_PORT are not set. Give all ranks the address and a port of "
       "rank "
       "0's host, with mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500."},
      {with(kSlurm, {{"SLURM_JOB_ID", ""}, {"SLURM_JOB_NODELIST", ""}}),
       "SLURM_PROCID is 5 and SLURM_NTASKS is 8 without SLURM_JOB_NODELIST and SLURM_JOB_ID, but MASTER_ADDR and MASTER_PORT are "
       "not "
       "set. Set the address and port of rank 0, or start the program with srun."},
      {with(kSlurm, {{"SLURM_JOB_NODELIST", "gnode[10"}}),
       "SLURM_JOB_NODELIST is 'gnode[10', which is no list of hosts. Set MASTER_ADDR to the host of rank 0."},
      {with(kSlurm, {{"PMI_RANK", "0"}, {"PMI_SIZE", "8"}}),
       "SLURM_PROCID is 5 and SLURM_NTASKS is 8, but PMI_RANK is 0. Two launchers number the ranks differently: set RANK, "
       "WORLD_SIZE, "
       "MASTER_ADDR and MASTER_PORT from the right one."},
      {with(kSlurm, {{"MASTER_PORT", "0"}}),
       "MASTER_PORT is '0', expected a number from 1 to 65535. Set MASTER_PORT, or start the program with torchrun."},
  };
  for (const Bad& bad : cases) CHECK(line(read(bad.variables)) == start + bad.message);
}

}  // namespace
}  // namespace rebind::comm
