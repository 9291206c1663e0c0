// The program train_gpt from outside: the losses of a sharded run, and one clear line for every bad input.
#include <signal.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "test/support/catch.h"
#include "test/support/processes.h"

namespace rebind::test {
namespace {

const std::string kProgram = REBIND_BINARY_DIR "/tools/train_gpt";

// A folder that goes with the test, with a text of 4000 characters, 40 of them distinct.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / ("train_gpt_test_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
    std::string text;
    for (unsigned i = 0, x = 1; i < 4000; ++i, x = x * 1103515245 + 12345) text.push_back(static_cast<char>('0' + (x >> 16) % 40));
    write("text", text);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  void write(const std::string& name, const std::string& content) const { std::ofstream(file(name)) << content; }
  std::string read(const std::string& name) const {
    std::ifstream stream(file(name));
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::vector<double> numbers(const std::string& name) const {
    std::ifstream stream(file(name));
    return {std::istream_iterator<double>(stream), {}};
  }

 private:
  std::filesystem::path path_;
};

using Arguments = std::vector<std::string>;

Arguments command(const Arguments& more) {
  Arguments all{kProgram};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// A model of 2 blocks, small enough for a test, with `more` on top.
Arguments small(const Folder& folder, const Arguments& more) {
  Arguments all = command({"--text", folder.file("text"), "--layers=2", "--dim=64", "--context=16", "--batch=3", "--steps=8",
                           "--lr-step=3", "--log-every=4"});
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("train_gpt: sharded over two and three ranks, before or in mid-training, the losses are the plain program's",
          "[tools][train_gpt]") {
  const Folder folder;
  for (const int world_size : {2, 3}) {
    const std::string ranks = std::to_string(world_size);
    for (const bool by_rank : {true, false}) {
      const std::string how = by_rank ? "--by-rank" : "--noby-rank";
      const Finished plain =
          run_process(small(folder, {"--prepare-at=-1", "--emulate-ranks", ranks, how, "--losses", folder.file("plain")}),
                      {{"OMP_NUM_THREADS", "1"}});
      INFO(plain.out << plain.err);
      REQUIRE(plain.exit_code == 0);
      const std::vector<double> expected = folder.numbers("plain");
      REQUIRE(expected.size() == 8);
      CHECK(std::abs(expected[0] - 3.9) < 0.4);  // near ln 40 = 3.69
      for (const std::string at : {"0", "4"}) {
        for (const Finished& rank :
             run_process_ranks(world_size, small(folder, {"--prepare-at", at, how, "--losses", folder.file("sharded")}))) {
          INFO(rank.out << rank.err);
          CHECK(rank.exit_code == 0);
          CHECK(rank.err.empty());
        }
        CAPTURE(world_size, at, by_rank, folder.read("plain"), folder.read("sharded"));
        if (by_rank) CHECK(folder.read("sharded") == folder.read("plain"));
        const std::vector<double> got = folder.numbers("sharded");
        REQUIRE(got.size() == 8);
        for (size_t i = 0; i < 8; ++i) CHECK(std::abs(got[i] - expected[i]) < 2e-4);
      }
    }
  }
}

TEST_CASE("train_gpt: ranks draw different rows", "[tools][train_gpt]") {
  const Folder folder;
  for (const std::string ranks : {"1", "2"}) {
    const Finished run = run_process(small(folder, {"--prepare-at=-1", "--emulate-ranks", ranks, "--losses", folder.file(ranks)}));
    REQUIRE(run.exit_code == 0);
  }
  CHECK(folder.numbers("1")[0] != folder.numbers("2")[0]);
}

TEST_CASE("train_gpt: progress shows speed and memory, and only rank 0 speaks", "[tools][train_gpt]") {
  const Folder folder;
  const std::vector<Finished> ranks = run_process_ranks(2, small(folder, {"--prepare-at=4", "--plan", "--sample=20"}));
  INFO(ranks[0].out << ranks[0].err);
  CHECK(ranks[0].exit_code == 0);
  CHECK(contains(ranks[0].out, "4000 characters, 40 distinct; 106240 parameters; 2 ranks, 3 rows of 16 characters each\n"));
  CHECK(std::regex_search(ranks[0].out, std::regex("step     4/8  loss [0-9.]+ +[0-9]+ tokens/s  plain  resident [0-9]+ MiB\n")));
  CHECK(contains(ranks[0].out, "step     4: sharded over 2 ranks\n"));
  CHECK(contains(ranks[0].out, "rank 0 of 2: 106,240 elements in 29 parameters, 3 units\n"));
  // Between steps nothing is gathered; the largest unit is a block of 49,984 fp32.
  CHECK(std::regex_search(ranks[0].out, std::regex("step     8/8  loss [0-9.]+ +[0-9]+ tokens/s  gathered 0.0 MiB, peak 0.4 MiB  "
                                                   "resident [0-9]+ MiB\n\n[0-W]{20}\n$")));
  CHECK(ranks[1].exit_code == 0);
  CHECK(ranks[1].out.empty());
  CHECK(ranks[1].err.empty());
}

TEST_CASE("train_gpt: one process can shard over itself, and torchrun starts it as it is", "[tools][train_gpt]") {
  const Folder folder;
  const Finished alone = run_process(small(folder, {"--losses", folder.file("alone")}));
  INFO(alone.out << alone.err);
  CHECK(alone.exit_code == 0);
  CHECK(contains(alone.out, "step     0: sharded over 1 rank\n"));
  const Finished plain = run_process(small(folder, {"--prepare-at=-1", "--losses", folder.file("plain")}));
  CHECK(plain.exit_code == 0);
  CHECK(folder.read("alone") == folder.read("plain"));
  Arguments under{torchrun(), "--standalone", "--nproc-per-node=2", "--no-python"};
  const Arguments program = small(folder, {"--prepare-at=4"});
  under.insert(under.end(), program.begin(), program.end());
  const Finished both = run_process(under);
  INFO(both.out << both.err);
  CHECK(both.exit_code == 0);
  CHECK(contains(both.out, "step     4: sharded over 2 ranks\n"));
}

TEST_CASE("train_gpt: a gzip file is read as what is in it", "[tools][train_gpt]") {
  const Folder folder;
  REQUIRE(run_process({"gzip", "--keep", folder.file("text")}).exit_code == 0);
  for (const std::string name : {"text", "text.gz"}) {
    const Finished run =
        run_process(small(folder, {"--text", folder.file(name), "--prepare-at=-1", "--losses", folder.file(name + ".losses")}));
    INFO(run.out << run.err);
    CHECK(run.exit_code == 0);
  }
  CHECK(folder.read("text.losses").size() > 8);
  CHECK(folder.read("text.losses") == folder.read("text.gz.losses"));
}

struct Bad {
  Arguments arguments;
  std::string message;
};

TEST_CASE("train_gpt: bad input is one line on stderr and exit code 2", "[tools][train_gpt]") {
  const Folder folder;
  folder.write("empty", "");
  folder.write("short", "abc");
  folder.write("no.gz", "not gzip");
  const std::string text = folder.file("text");
  const std::vector<Bad> cases{
      {{"--txt=x"}, "there is no flag --txt; see --help"},
      {{"text.txt"}, "'text.txt' is not a flag; see --help"},
      {{"--steps"}, "--steps needs a value"},
      {{"--steps=many"}, "--steps cannot be 'many'; its default is 200"},
      {{"--noseed"}, "there is no flag --noseed; see --help"},
      {{"--steps=0"}, "--steps is 0, expected 1 to 1000000000"},
      {{"--layers", "-3"}, "--layers is -3, expected 1 to 10000"},
      {{"--dim=96"}, "--dim is 96, expected a multiple of 64"},
      {{"--dim=0"}, "--dim is 0, expected 64 to 1048576"},
      {{"--batch=0"}, "--batch is 0, expected 1 to 1048576"},
      {{"--context=0"}, "--context is 0, expected 1 to 1048576"},
      {{"--steps=5", "--prepare-at=6"}, "--prepare-at is 6, expected -1 to 5"},
      {{"--prepare_at=-2"}, "--prepare-at is -2, expected -1 to 200"},
      {{"--lr=0"}, "--lr is 0, expected a positive number"},
      {{"--lr=nan"}, "--lr is nan, expected a positive number"},
      {{"--timeout=0"}, "--timeout must be at least 0.001 seconds"},
      {{"--text", folder.file("none")}, "there is no text file '" + folder.file("none") + "'"},
      {{"--text", folder.file("")}, "'" + folder.file("") + "' is a directory, not a text"},
      {{"--text", folder.file("empty")}, "the text file '" + folder.file("empty") + "' is empty"},
      {{"--text", folder.file("no.gz")}, folder.file("no.gz") + " is not a whole gzip file, or gzip is missing"},
      {{"--text", folder.file("short"), "--context=3"},
       "'" + folder.file("short") + "' has 3 characters, a row of --context 3 needs at least 4"},
      {{"--text", text, "--prepare-at=-1", "--losses=/no/such/folder/losses"},
       "cannot write the losses to '/no/such/folder/losses'"},
      {{"--text", text, "--emulate-ranks=2"}, "--emulate-ranks is for the plain program: one process, and --prepare-at=-1"},
  };
  for (const Bad& bad : cases) {
    const Finished run = run_process(command(bad.arguments));
    CHECK(run.err == "train_gpt: " + bad.message + "\n");
    CHECK(run.exit_code == 2);
    CHECK(run.out.empty());
  }
}

TEST_CASE("train_gpt: a model that fits no memory is refused before it is made", "[tools][train_gpt]") {
  const Finished run = run_process(command({"--dim=1048576", "--layers=10000"}));
  CHECK(run.exit_code == 2);
  CHECK(std::regex_match(run.err, std::regex("train_gpt: a model of 131941531784314880 parameters with 8 rows of 128 needs about "
                                             "[0-9]+ MiB before it is sharded, this host has [0-9]+ MiB; choose smaller --layers, "
                                             "--dim, --batch or --context\n")));
  CHECK(run.seconds < 5);
}

TEST_CASE("train_gpt: environments that start no group are one line and exit code 2", "[tools][train_gpt]") {
  const Folder folder;
  const Finished half = run_process(small(folder, {}), {{"RANK", "0"}});
  CHECK(half.err ==
        "train_gpt: init_process_group: RANK is set, WORLD_SIZE is not. Set both or none, or start the program with torchrun.\n");
  CHECK(half.exit_code == 2);

  const std::string port = std::to_string(free_port());
  const Environment rank1{{"RANK", "1"},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "127.0.0.1"},
                          {"MASTER_PORT", port},
                          {"TORCHELASTIC_ERROR_FILE", folder.file("error.json")}};
  const Finished alone = run_process(small(folder, {"--timeout=1"}), rank1);
  const std::string message = "init_process_group, rank 1: no answer from the master at 127.0.0.1:" + port +
                              " within 1000 ms (Connection refused). Check MASTER_ADDR and MASTER_PORT, and that rank 0 (or "
                              "torchrun) runs there and can be reached.";
  CHECK(alone.err == "train_gpt: " + message + "\n");
  CHECK(alone.exit_code == 2);
  CHECK(alone.seconds < 5);
  // What torchrun shows as the root cause.
  CHECK(contains(folder.read("error.json"), "\"message\":\"" + message + "\""));
}

TEST_CASE("train_gpt: when a rank dies the other ends with a named error, no stack trace and exit code 1", "[tools][train_gpt]") {
  const Folder folder;
  // Rank 1 is killed once rank 0 has written three losses.
  const std::string script =
      "if [ \"$RANK\" = 0 ]; then exec \"$@\"; fi; \"$@\" & pid=$!; "
      "until [ \"$(wc -l 2>/dev/null <" +
      folder.file("losses") +
      " || echo 0)\" -ge 3 ]; do sleep 0.05; done; "
      "kill -9 $pid; wait $pid 2>/dev/null";
  Arguments shell{"/bin/sh", "-c", script, "sh"};
  const Arguments program = small(folder, {"--steps=1000000", "--timeout=30", "--losses", folder.file("losses")});
  shell.insert(shell.end(), program.begin(), program.end());
  const std::vector<Finished> ranks = run_process_ranks(2, shell);
  INFO(ranks[0].err);
  CHECK(ranks[0].exit_code == 1);
  CHECK(contains(ranks[0].err, "train_gpt: "));
  CHECK(contains(ranks[0].err, "rank 0: the connection to rank 1 is closed"));
  CHECK_FALSE(contains(ranks[0].err, "frame #"));
  CHECK_FALSE(contains(ranks[0].err, "Exception raised from"));
}

}  // namespace
}  // namespace rebind::test
