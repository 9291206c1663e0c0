// Ranks as threads: a multi-rank test in one process.
//
//   TEST_CASE("comm: every rank gets every part", "[comm]") {
//     run_ranks(3, [](int rank, auto group) {
//       comm::Communicator comm(group, /*channel=*/0, std::chrono::seconds(5));
//       EXPECT_OK(comm.all_gather(...));
//       EXPECT_EQ(buffer[2], 20.0f);
//     });
//   }
//
// Catch's assertions are not thread safe, so a rank uses EXPECT, EXPECT_EQ, EXPECT_OK, EXPECT_THROWS, which throw. run_ranks
// collects what the ranks threw, names the rank, and throws it on the calling thread; without errors it counts as an assertion.
// A rank that hangs past the watchdog ends the process with a list of the ranks that are not done.
#pragma once

#include <chrono>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace rebind::test {

struct RanksOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(20);  // of the group
  std::chrono::seconds watchdog = std::chrono::seconds(60);      // for all ranks to end
};

using RankBody = std::function<void(int rank, c10::intrusive_ptr<c10d::ProcessGroup> group)>;

// Each thread uses one intra-op thread. A rank that throws drops its group, which its peers notice at once.
void run_ranks(int world_size, const RankBody& body, const RanksOptions& options = {});

// The same, but returns each rank's error text ("" if it had none) instead of throwing.
std::vector<std::string> run_ranks_errors(int world_size, const RankBody& body, const RanksOptions& options = {});

[[noreturn]] void fail(const char* file, int line, const std::string& what);

template <class T>
std::string shown(const T& value) {
  if constexpr (requires(std::ostream & out) { out << value; }) {
    std::ostringstream out;
    out.precision(17);
    out << value;
    return out.str();
  } else if constexpr (requires { value.begin(); }) {
    std::string text = "{";
    for (const auto& element : value) text += (text.size() > 1 ? ", " : "") + shown(element);
    return text + "}";
  } else {
    return "(not printable)";
  }
}

template <class A, class B>
void expect_eq(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) fail(file, line, std::string(text) + "\n    left:  " + shown(a) + "\n    right: " + shown(b));
}

// For absl::Status and absl::StatusOr.
template <class Result>
void expect_ok(const char* file, int line, const char* text, const Result& result) {
  if (result.ok()) return;
  if constexpr (requires { result.status(); }) {
    fail(file, line, std::string(text) + ": " + result.status().ToString());
  } else {
    fail(file, line, std::string(text) + ": " + result.ToString());
  }
}

// The text of the exception that `body` throws.
std::string expect_throws(const char* file, int line, const char* text, const std::function<void()>& body);

}  // namespace rebind::test

#define EXPECT(...)                                                             \
  do {                                                                          \
    if (!(__VA_ARGS__)) ::rebind::test::fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (false)
#define EXPECT_EQ(a, b) ::rebind::test::expect_eq(__FILE__, __LINE__, #a " == " #b, a, b)
#define EXPECT_OK(...) ::rebind::test::expect_ok(__FILE__, __LINE__, #__VA_ARGS__, (__VA_ARGS__))
// Gives the text of the error, without a stack trace.
#define EXPECT_THROWS(...) ::rebind::test::expect_throws(__FILE__, __LINE__, #__VA_ARGS__, [&] { (void)(__VA_ARGS__); })
