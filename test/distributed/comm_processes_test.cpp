// Real processes: torchrun's environment, a master that is not there, a rank that is killed.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "lib/comm/communicator.h"
#include "lib/comm/master_store.h"
#include "rebind/process_group.h"
#include "test/support/catch.h"
#include "test/support/processes.h"

namespace rebind::comm {
namespace {

using namespace std::chrono_literals;
using test::Finished;
using test::run_process;
using test::run_process_ranks;
using test::this_program;
using Clock = std::chrono::steady_clock;

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

bool contains(const std::string& text, const std::string& part) { return count(text, part) > 0; }

// The body of a rank. Hidden tests are run only by name.
TEST_CASE("child: joins and gathers", "[.child]") {
  ProcessGroupOptions options;
  options.timeout = 20s;
  const auto group = init_process_group(options);
  REQUIRE(group.ok());
  Communicator comm(*group, 0, 20s);
  const uint64_t own = 5 + (*group)->getRank();
  const auto words = comm.exchange({.name = "the test"}, {&own, 1});
  REQUIRE(words.ok());
  std::string text;
  for (const auto& of_rank : *words) text += " " + std::to_string(of_rank[0]);
  std::printf("rank %d of %d has%s\n", comm.rank(), comm.world_size(), text.c_str());
}

TEST_CASE("processes: init_process_group joins the ranks that torchrun started", "[comm][processes]") {
  const Finished ranks = run_process(
      {test::torchrun(), "--standalone", "--nproc-per-node=3", "--no-python", this_program(), "child: joins and gathers"});
  INFO(ranks.out << ranks.err);
  CHECK(ranks.exit_code == 0);
  for (const char* line : {"rank 0 of 3 has 5 6 7\n", "rank 1 of 3 has 5 6 7\n", "rank 2 of 3 has 5 6 7\n"}) {
    CHECK(count(ranks.out, line) == 1);
  }
}

TEST_CASE("processes: ranks started by hand find rank 0's store, one process needs nothing", "[comm][processes]") {
  for (const Finished& rank : run_process_ranks(2, {this_program(), "child: joins and gathers"})) {
    INFO(rank.out << rank.err);
    CHECK(rank.exit_code == 0);
    CHECK(contains(rank.out, "of 2 has 5 6\n"));
  }
  const Finished alone = run_process({this_program(), "child: joins and gathers"});
  INFO(alone.out << alone.err);
  CHECK(alone.exit_code == 0);
  CHECK(contains(alone.out, "rank 0 of 1 has 5\n"));
}

TEST_CASE("child: joins with a short time-out and prints the error", "[.child]") {
  ProcessGroupOptions options;
  options.timeout = 1s;
  const auto group = init_process_group(options);
  CHECK_FALSE(group.ok());
  std::printf("%s\n", group.status().ToString().c_str());
}

TEST_CASE("processes: environment errors reach the caller", "[comm][processes]") {
  const std::vector<std::string> child{this_program(), "child: joins with a short time-out and prints the error"};
  CHECK(contains(run_process(child, {{"RANK", "0"}}).out,
                 "INVALID_ARGUMENT: init_process_group: RANK is set, WORLD_SIZE is not. Set both or none"));
  const std::string port = std::to_string(test::free_port());
  const Finished alone =
      run_process(child, {{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  CHECK(contains(alone.out, "DEADLINE_EXCEEDED: init_process_group, rank 0: ranks 1, 2 of 3 did not arrive within 1000 ms."));
  CHECK(alone.seconds < 8);
}

TEST_CASE("processes: GLOO_SOCKET_IFNAME chooses the interface", "[comm][processes]") {
  for (const Finished& rank : run_process_ranks(2, {this_program(), "child: joins and gathers"}, {{"GLOO_SOCKET_IFNAME", "lo"}})) {
    INFO(rank.out << rank.err);
    CHECK(rank.exit_code == 0);
  }
  const std::vector<std::string> child{this_program(), "child: joins with a short time-out and prints the error"};
  bool named = false;
  for (const Finished& rank : run_process_ranks(2, child, {{"GLOO_SOCKET_IFNAME", "nosuch0"}})) {
    INFO(rank.out << rank.err);
    CHECK(contains(rank.out, "UNAVAILABLE: init_process_group, rank "));
    CHECK(contains(rank.out, ": the ranks could not be connected ("));
    CHECK(contains(rank.out, "name the right interface in GLOO_SOCKET_IFNAME."));
    named = named || contains(rank.out, "nosuch0");
  }
  CHECK(named);  // a rank whose peer has ended first may see only that
}

LaunchEnvironment rank_1_of_2(const std::string& host, int port) {
  LaunchEnvironment launch;
  launch.rank = 1;
  launch.world_size = 2;
  launch.master_address = host;
  launch.master_port = static_cast<uint16_t>(port);
  launch.key_prefix = "test";
  return launch;
}

// Milliseconds that connect_master_store took, and its error.
std::pair<int64_t, std::string> connect(const LaunchEnvironment& launch, std::chrono::milliseconds timeout) {
  const auto begin = Clock::now();
  const auto store = connect_master_store(launch, timeout);
  return {std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count(), store.status().ToString()};
}

TEST_CASE("master: nobody at the address is an error within the time-out that names it", "[comm][processes]") {
  const int port = test::free_port();
  const auto [waited, text] = connect(rank_1_of_2("127.0.0.1", port), 1500ms);
  CHECK(waited >= 900);
  CHECK(waited < 3000);
  CHECK(text ==
        "DEADLINE_EXCEEDED: init_process_group, rank 1: no answer from the master at 127.0.0.1:" + std::to_string(port) +
            " within 1500 ms (Connection refused). Check MASTER_ADDR and MASTER_PORT, and that rank 0 (or torchrun) runs there "
            "and can be reached.");
}

TEST_CASE("master: a host name that means nothing is an error within the time-out", "[comm][processes]") {
  const auto [waited, text] = connect(rank_1_of_2("no-such-host.invalid", 29500), 1000ms);
  CHECK(waited < 8000);  // the resolver has time-outs of its own
  CHECK(contains(text, "init_process_group, rank 1: no answer from the master at no-such-host.invalid:29500 within 1000 ms ("));
}

class Listener {
 public:
  Listener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    REQUIRE(::bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0);
    REQUIRE(::listen(fd_, 16) == 0);
    REQUIRE(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    port = ntohs(address.sin_port);
  }
  ~Listener() { ::close(fd_); }
  int port = 0;

 private:
  int fd_;
};

TEST_CASE("master: rank 0 whose port is taken says so", "[comm][processes]") {
  const Listener taken;
  LaunchEnvironment launch = rank_1_of_2("127.0.0.1", taken.port);
  launch.rank = 0;
  const auto [waited, text] = connect(launch, 2000ms);
  CHECK(waited < 3000);
  CHECK(
      contains(text, "UNAVAILABLE: init_process_group, rank 0: cannot serve the store at 127.0.0.1:" + std::to_string(taken.port)));
  CHECK(contains(text, "Choose another MASTER_PORT"));
}

TEST_CASE("master: something else that listens and never answers is an error within the time-out", "[comm][processes]") {
  const Listener silent;
  const auto [waited, text] = connect(rank_1_of_2("127.0.0.1", silent.port), 1500ms);
  CHECK(waited < 3500);
  CHECK(contains(text, "init_process_group, rank 1: the store did not answer at 127.0.0.1:" + std::to_string(silent.port)));
}

TEST_CASE("child: rank 1 is killed in the middle of a large gather", "[.child]") {
  const auto group = init_process_group();
  REQUIRE(group.ok());
  Communicator comm(*group, 0, 50s);
  const int64_t part_bytes = int64_t{256} << 20;
  std::vector<char> parts(2 * part_bytes, 'x');
  REQUIRE(comm.exchange({}, {}).ok());
  std::thread killer;
  if (comm.rank() == 1) {
    killer = std::thread([] {
      std::this_thread::sleep_for(30ms);
      ::kill(::getpid(), SIGKILL);
    });
  }
  const absl::Status status = comm.all_gather({.unit = 2, .name = "unit 'block.2'"}, parts.data(), part_bytes);
  std::printf("%s\n", status.ToString().c_str());
  std::fflush(stdout);
  if (killer.joinable()) killer.join();
  CHECK_FALSE(status.ok());
}

TEST_CASE("processes: the death of a rank in the middle of a message is noticed at once", "[comm][processes]") {
  const std::vector<Finished> ranks =
      run_process_ranks(2, {this_program(), "child: rank 1 is killed in the middle of a large gather"});
  INFO(ranks[0].out << ranks[0].err);
  CHECK(ranks[1].exit_code == 128 + SIGKILL);
  CHECK(ranks[0].exit_code == 0);
  CHECK(contains(ranks[0].out, "UNAVAILABLE: all_gather for unit 'block.2', rank 0: the connection to rank 1 is closed (after "));
  CHECK(ranks[0].seconds < 15);  // far from the 50 s that the gather may take
}

}  // namespace
}  // namespace rebind::comm
