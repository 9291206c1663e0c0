#include "test/support/ranks.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "rebind/process_group.h"
#include "test/support/catch.h"

namespace rebind::test {
namespace {

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

void run_one(int rank, int world_size, const c10::intrusive_ptr<c10d::Store>& store, const RankBody& body,
             std::chrono::milliseconds timeout) {
  at::init_num_threads();
  at::set_num_threads(1);
  ProcessGroupOptions options;
  options.timeout = timeout;
  auto group = make_process_group(store, rank, world_size, options);
  if (!group.ok()) throw std::runtime_error(group.status().ToString());
  body(rank, *std::move(group));
}

}  // namespace

std::vector<std::string> run_ranks_errors(int world_size, const RankBody& body, const RanksOptions& options) {
  std::mutex mutex;
  std::condition_variable ended;
  int running = world_size;
  std::vector<bool> done(world_size);
  std::vector<std::string> errors(world_size);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      std::string text;
      try {
        run_one(rank, world_size, store, body, options.timeout);
      } catch (...) {
        text = text_of(std::current_exception());
        if (text.empty()) text = "an exception without a text";
      }
      const std::lock_guard lock(mutex);
      errors[rank] = text;
      done[rank] = true;
      --running;
      ended.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    if (!ended.wait_for(lock, options.watchdog, [&] { return running == 0; })) {
      for (int rank = 0; rank < world_size; ++rank) {
        const std::string state = !done[rank] ? "STUCK" : errors[rank].empty() ? "done" : "threw: " + errors[rank];
        std::fprintf(stderr, "run_ranks: after %lld s rank %d of %d: %s\n", static_cast<long long>(options.watchdog.count()), rank,
                     world_size, state.c_str());
      }
      std::fflush(stderr);
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_ranks(int world_size, const RankBody& body, const RanksOptions& options) {
  const std::vector<std::string> errors = run_ranks_errors(world_size, body, options);
  std::string text;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!errors[rank].empty()) text += "\nrank " + std::to_string(rank) + " of " + std::to_string(world_size) + ": " + errors[rank];
  }
  if (!text.empty()) throw std::runtime_error(text);
  SUCCEED("all ranks ended without an error");
}

void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

std::string expect_throws(const char* file, int line, const char* text, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    return text_of(std::current_exception());
  }
  fail(file, line, std::string(text) + " did not throw");
}

}  // namespace rebind::test
