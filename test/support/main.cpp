// The main function of every test program.
//
//   REBIND_TEST_SEED=7 build/test/rebind_unit "plan: *"
//
// The seed of Catch2's random order and generators is a constant unless REBIND_TEST_SEED or --rng-seed sets it: tests whose ranks
// are processes of their own need the same one in all of them. With REBIND_TEST_RECORD=FILE, lines "<outcome>\t<program>\t<test>"
// are added to FILE, outcome one of start, passed, failed; tools/run_tests counts them.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#define CATCH_CONFIG_RUNNER
#include "test/support/catch.h"

namespace {

#if CATCH_VERSION_MAJOR < 3
using Listener = Catch::TestEventListenerBase;
#else
using Listener = Catch::EventListenerBase;
#endif

constexpr unsigned kSeed = 20260;

std::string record_file, program;
pid_t record_owner;  // a forked rank records nothing

class Recorder final : public Listener {
 public:
  using Listener::Listener;

  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    Listener::testCaseStarting(test);
    name_ = test.name;
    record("start");
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    record(stats.totals.testCases.allOk() ? "passed" : "failed");
    Listener::testCaseEnded(stats);
  }

 private:
  void record(const char* outcome) const {
    if (record_file.empty() || getpid() != record_owner) return;
    std::ofstream(record_file, std::ios::app) << outcome << '\t' << program << '\t' << name_ << std::endl;
  }

  std::string name_;
};
CATCH_REGISTER_LISTENER(Recorder)

}  // namespace

int main(int argc, char** argv) {
  program = std::filesystem::path(argv[0]).filename();
  record_owner = getpid();
  if (const char* file = std::getenv("REBIND_TEST_RECORD")) record_file = file;
  unsetenv("REBIND_TEST_RECORD");  // programs that a test starts are part of that test

  Catch::Session session;
  const char* seed = std::getenv("REBIND_TEST_SEED");
  session.configData().rngSeed = seed != nullptr ? static_cast<unsigned>(std::strtoul(seed, nullptr, 10)) : kSeed;
  const int usage_error = session.applyCommandLine(argc, argv);
  return usage_error != 0 ? usage_error : session.run();
}
