// Runs programs as child processes: real ranks, torchrun, tools with bad input.
//
//   Finished child = run_process({"/bin/sh", "-c", "exit 3"});
//   CHECK(child.exit_code == 3);
//
//   // This test program again, as two ranks under torchrun; the hidden test is the body of a rank.
//   Finished ranks = run_process({torchrun(), "--standalone", "--nproc-per-node=2", "--no-python", this_program(), "child:
//   joins"});
//
// A program that is not done in time is killed (it alone, so give a launcher the time to end its own children).
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace rebind::test {

using Environment = std::map<std::string, std::string>;

struct Finished {
  int exit_code = -1;  // 128 + signal if it was killed by one, as in a shell
  bool timed_out = false;
  double seconds = 0;
  std::string out, err;
};

// The environment is this program's, without the variables of launchers (RANK, TORCHELASTIC_*, ...), with `extra` on top.
Finished run_process(const std::vector<std::string>& command, const Environment& extra = {},
                     std::chrono::seconds limit = std::chrono::seconds(60));

// The same command as `world_size` ranks started by hand, with a free MASTER_PORT on this host.
std::vector<Finished> run_process_ranks(int world_size, const std::vector<std::string>& command, const Environment& extra = {},
                                        std::chrono::seconds limit = std::chrono::seconds(60));

std::string this_program();
// torchrun of the Python environment that LibTorch lies in, else "torchrun" (from PATH).
std::string torchrun();
// A TCP port that nobody listened on a moment ago.
int free_port();

}  // namespace rebind::test
