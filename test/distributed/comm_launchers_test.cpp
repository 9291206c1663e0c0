// Launchers other than torchrun by their variables, what becomes of ranks whose launcher is killed, and torchrun's error file.
#include <signal.h>
#include <sys/prctl.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "lib/comm/communicator.h"
#include "rebind/rebind.h"
#include "test/support/catch.h"
#include "test/support/processes.h"

namespace rebind::comm {
namespace {

using namespace std::chrono_literals;
using test::Environment;
using test::Finished;
using test::run_process;
using test::this_program;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / ("rebind_" + name + "_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

ProcessGroupOptions options_of_child() {
  ProcessGroupOptions options;
  options.timeout = 20s;
  options.end_with_launcher = std::getenv("KEEP_ALIVE") == nullptr;
  return options;
}

std::string file_in_folder(const std::string& name) { return std::string(std::getenv("TEST_FOLDER")) + "/" + name; }

TEST_CASE("child: a rank of any launcher", "[.child]") {
  const auto group = init_process_group(options_of_child());
  INFO(group.status().ToString());
  REQUIRE(group.ok());
  Communicator comm(*group, 0, 20s);
  const uint64_t own = 5 + (*group)->getRank();
  const auto words = comm.exchange({.name = "the test"}, {&own, 1});
  REQUIRE(words.ok());
  int signal = -1;
  ::prctl(PR_GET_PDEATHSIG, &signal);
  std::printf("line: rank %d of %d has %d ... %d, signal %d\n", comm.rank(), comm.world_size(), int((*words)[0][0]),
              int(words->back()[0]), signal);
}

// The two ranks' output, rank 0's first. "%r" in a value stands for the rank.
std::string two_ranks(const Environment& variables) {
  std::vector<Finished> ranks(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Environment own = variables;
      for (auto& [name, value] : own) {
        if (value == "%r") value = std::to_string(rank);
      }
      ranks[rank] = run_process({this_program(), "child: a rank of any launcher"}, own);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string lines;
  for (const Finished& rank : ranks) {
    INFO(rank.out << rank.err);
    CHECK(rank.exit_code == 0);
    const size_t begin = rank.out.find("line: ");
    REQUIRE(begin != std::string::npos);
    lines += rank.out.substr(begin + 6, rank.out.find('\n', begin) - begin - 5);
  }
  return lines;
}

TEST_CASE("launchers: Open MPI's, Slurm's and PMI's ranks find each other", "[comm][processes]") {
  const std::string expected = "rank 0 of 2 has 5 ... 6, signal 15\nrank 1 of 2 has 5 ... 6, signal 15\n";
  const std::string id = std::to_string(::getpid());  // another port and other keys than a run beside this one
  CHECK(two_ranks({{"OMPI_COMM_WORLD_RANK", "%r"},
                   {"OMPI_COMM_WORLD_SIZE", "2"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "%r"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                   {"PMIX_NAMESPACE", "openmpi" + id}}) == expected);
  CHECK(two_ranks({{"SLURM_PROCID", "%r"},
                   {"SLURM_LOCALID", "%r"},
                   {"SLURM_NTASKS", "2"},
                   {"SLURM_JOB_ID", "slurm" + id},
                   {"SLURM_JOB_NODELIST", "127.0.0.[1-2],elsewhere"}}) == expected);
  CHECK(two_ranks({{"PMI_RANK", "%r"},
                   {"PMI_SIZE", "2"},
                   {"MASTER_ADDR", "127.0.0.1"},
                   {"MASTER_PORT", std::to_string(test::free_port())}}) == expected);
}

TEST_CASE("launchers: no parent-death signal by hand, when turned off, or for one process", "[comm][processes]") {
  const Environment by_hand{
      {"RANK", "%r"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(test::free_port())}};
  CHECK(two_ranks(by_hand) == "rank 0 of 2 has 5 ... 6, signal 0\nrank 1 of 2 has 5 ... 6, signal 0\n");
  const Environment off{{"PMI_RANK", "%r"},
                        {"PMI_SIZE", "2"},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", std::to_string(test::free_port())},
                        {"KEEP_ALIVE", "1"}};
  CHECK(two_ranks(off) == "rank 0 of 2 has 5 ... 6, signal 0\nrank 1 of 2 has 5 ... 6, signal 0\n");
  const std::vector<std::string> child{this_program(), "child: a rank of any launcher"};
  CHECK(contains(run_process(child, {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).out, "rank 0 of 1 has 5 ... 5, signal 0\n"));
}

TEST_CASE("child: a rank that works for long", "[.child]") {
  const auto group = init_process_group(options_of_child());
  REQUIRE(group.ok());
  std::ofstream(file_in_folder("pid" + std::to_string((*group)->getRank()))) << ::getpid() << std::endl;
  std::this_thread::sleep_for(60s);
}

// Starts `launcher` (a shell command), waits for two ranks, kills it alone, and says which ranks live on 3 s later.
std::string kill_launcher(const std::string& launcher, const Environment& variables) {
  const Folder folder("launcher");
  // A rank that has ended may stay as a zombie, which has no program any more.
  const std::string script =
      "(" + launcher +
      ") >/dev/null 2>&1 & launcher=$!\n"
      "n=0; until [ -s pid0 ] && [ -s pid1 ]; do sleep 0.1; n=$((n + 1)); [ $n -lt 400 ] || exit 9; done\n"
      "kill -9 $launcher; sleep 3\n"
      "for r in 0 1; do pid=$(cat pid$r)\n"
      "if readlink /proc/$pid/exe >/dev/null; then echo rank $r lives; kill -9 $pid; else echo rank $r ended; "
      "fi; done\n";
  Environment all = variables;
  all["TEST_FOLDER"] = folder.path();
  all["CHILD"] = this_program();
  all["OMP_NUM_THREADS"] = "1";
  const Finished shell = run_process({"/bin/sh", "-c", "cd \"$TEST_FOLDER\"\n" + script}, all);
  INFO(shell.err);
  CHECK(shell.exit_code == 0);
  return shell.out;
}

// A launcher that starts two ranks and waits for them.
std::string pmi_launcher() {
  const std::string rank = " \"$CHILD\" 'child: a rank that works for long' & ";
  return "PMI_RANK=0" + rank + "PMI_RANK=1" + rank + "wait";
}

Environment pmi_environment() {
  return {{"PMI_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(test::free_port())}};
}

TEST_CASE("launchers: ranks end when their launcher is killed", "[comm][processes]") {
  CHECK(kill_launcher(pmi_launcher(), pmi_environment()) == "rank 0 ended\nrank 1 ended\n");
}

TEST_CASE("launchers: ranks that opted out live on", "[comm][processes]") {
  Environment off = pmi_environment();
  off["KEEP_ALIVE"] = "1";
  CHECK(kill_launcher(pmi_launcher(), off) == "rank 0 lives\nrank 1 lives\n");
}

TEST_CASE("launchers: ranks end when torchrun is killed", "[comm][processes]") {
  const std::string launcher =
      "exec '" + test::torchrun() + "' --standalone --nproc-per-node=2 --no-python \"$CHILD\" 'child: a rank that works for long'";
  CHECK(kill_launcher(launcher, {}) == "rank 0 ended\nrank 1 ended\n");
}

TEST_CASE("child: joins when its parent has ended", "[.child]") {
  const pid_t parent = ::getppid();
  std::ofstream(file_in_folder("ready")) << "ready" << std::endl;
  while (::getppid() == parent) std::this_thread::sleep_for(10ms);
  const auto group = init_process_group(options_of_child());
  std::ofstream(file_in_folder("error.tmp")) << parent << " " << group.status().ToString() << std::endl;
  std::filesystem::rename(file_in_folder("error.tmp"), file_in_folder("error"));
  CHECK_FALSE(group.ok());
}

TEST_CASE("launchers: a launcher that has ended before the rank joins is an error", "[comm][processes]") {
  const Folder folder("orphan");
  const std::string script =
      "cd \"$TEST_FOLDER\"\n"
      "(\"$CHILD\" 'child: joins when its parent has ended' >/dev/null 2>&1 & until [ -s ready ]; do sleep 0.05; done)\n"
      "n=0; until [ -e error ]; do sleep 0.1; n=$((n + 1)); [ $n -lt 300 ] || exit 9; done; cat error\n";
  Environment variables = pmi_environment();
  variables["PMI_RANK"] = "1";
  variables["TEST_FOLDER"] = folder.path();
  variables["CHILD"] = this_program();
  const Finished shell = run_process({"/bin/sh", "-c", script}, variables);
  INFO(shell.out << shell.err);
  CHECK(shell.exit_code == 0);
  const std::string parent = shell.out.substr(0, shell.out.find(' '));
  CHECK(shell.out == parent + " UNAVAILABLE: init_process_group, rank 1: the launcher, process " + parent +
                         ", has ended. Start the job again; a rank that should outlive its launcher sets "
                         "ProcessGroupOptions::end_with_launcher to false.\n");
}

TEST_CASE("child: prepare fails on all ranks", "[.child]") {
  const auto group = init_process_group(options_of_child());
  REQUIRE(group.ok());
  torch::nn::Linear model(4, (*group)->getRank() == 1 ? 5 : 3);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  const auto fsdp = prepare_fsdp(model, sgd, *group);
  CHECK(fsdp.ok());  // fails, so that the rank ends with an error
}

TEST_CASE("child: init fails", "[.child]") {
  ::unsetenv("WORLD_SIZE");
  CHECK(init_process_group(options_of_child()).ok());
}

TEST_CASE("launchers: torchrun shows the errors of prepare_fsdp and init_process_group as the root cause", "[comm][processes]") {
  const auto torchrun = [](const char* child) {
    return run_process({test::torchrun(), "--standalone", "--nproc-per-node=2", "--no-python", this_program(), child});
  };
  const Finished prepare = torchrun("child: prepare fails on all ranks");
  INFO(prepare.out << prepare.err);
  CHECK(prepare.exit_code == 1);
  CHECK(contains(prepare.err, "Root Cause"));
  CHECK(contains(prepare.err, "traceback : prepare_fsdp: the ranks differ: "));
  const Finished init = torchrun("child: init fails");
  INFO(init.out << init.err);
  CHECK(contains(init.err,
                 "traceback : init_process_group: RANK is set, WORLD_SIZE is not. Set both or none, or start the program "
                 "with torchrun."));
}

}  // namespace
}  // namespace rebind::comm
