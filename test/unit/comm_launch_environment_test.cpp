#include <map>
#include <string>
#include <vector>

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

TEST_CASE("launch: several tasks of another launcher are refused by name, never taken for one process", "[comm][launch]") {
  const std::string end =
      "'s own variables are not read yet. Start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.";
  const std::string start = "UNIMPLEMENTED: init_process_group: ";
  const std::string absent = ", but RANK and WORLD_SIZE are not set: ";
  CHECK(line(read({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "2"}})) ==
        start + "OMPI_COMM_WORLD_SIZE is 4 and OMPI_COMM_WORLD_RANK is 2" + absent + "Open MPI" + end);
  CHECK(line(read({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}})) ==
        start + "SLURM_NTASKS is 8 and SLURM_PROCID is 0" + absent + "Slurm" + end);
  CHECK(line(read({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}})) == start + "PMI_SIZE is 2 and PMI_RANK is 1" + absent + "PMI" + end);
  CHECK(
      line(read({{"SLURM_NTASKS", "many"}, {"SLURM_PROCID", "0"}})) ==
      "INVALID_ARGUMENT: init_process_group: SLURM_NTASKS is 'many', expected a number from 1 to 2147483647. Set SLURM_NTASKS, or "
      "start the program with torchrun.");
  // One task, or the allocation of a shell without a task of its own, is one process.
  CHECK(read({{"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}})->world_size == 1);
  CHECK(read({{"SLURM_NTASKS", "8"}})->world_size == 1);
  // RANK and WORLD_SIZE go first.
  CHECK(read(with(kByHand, {{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "5"}}))->rank == 1);
}

}  // namespace
}  // namespace rebind::comm
