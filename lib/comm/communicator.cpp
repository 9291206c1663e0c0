// The thread of a communicator and what is posted to it; engine.cpp does the work.
#include "lib/comm/communicator.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "lib/base/error.h"
#include "lib/comm/engine.h"

namespace rebind::comm {

struct Pending::Job {
  std::function<void(Job&)> run;
  absl::Status status;
  Words words;
  std::atomic<bool> done = false;

  void finish() {
    try {
      run(*this);
    } catch (const std::exception& failure) {  // no memory for what is received
      status = error(absl::StatusCode::kResourceExhausted, {.call = "a collective"}, failure.what(), "Free memory or use more ranks");
    }
    run = nullptr;
    done.store(true, std::memory_order_release);
    done.notify_all();
  }
};

namespace {

std::mutex fault_mutex;
Communicator::Fault fault;

absl::Status injected_fault(int rank, const Identity& identity, uint64_t position) {
  Communicator::Fault copy;
  {
    std::lock_guard lock(fault_mutex);
    copy = fault;
  }
  return copy ? copy(rank, identity, position) : absl::OkStatus();
}

}  // namespace

struct Communicator::Thread {
  std::mutex mutex;
  std::condition_variable posted;
  std::deque<std::shared_ptr<Pending::Job>> jobs;
  bool stop = false;
  std::thread thread{[this] { serve(); }};  // last: it uses the others

  ~Thread() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    posted.notify_one();
    thread.join();
  }

  void post(std::shared_ptr<Pending::Job> job) {
    {
      std::lock_guard lock(mutex);
      jobs.push_back(std::move(job));
    }
    posted.notify_one();
  }

  void serve() {
    // Signals are the program's; its handlers run on its own threads.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    std::unique_lock lock(mutex);
    while (true) {
      posted.wait(lock, [this] { return stop || !jobs.empty(); });
      if (jobs.empty()) return;
      const std::shared_ptr<Pending::Job> job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job->finish();
      lock.lock();
    }
  }
};

Communicator::Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, int channel, std::chrono::milliseconds timeout)
    : engine_(std::make_unique<Engine>(std::move(group), channel, timeout)) {}

Communicator::~Communicator() = default;

int Communicator::rank() const { return engine_->rank(); }
int Communicator::world_size() const { return engine_->world_size(); }
uint64_t Communicator::position() const { return posted_; }
double Communicator::waited_seconds() const { return waited_seconds_; }

void Communicator::set_fault_for_tests(Fault value) {
  std::lock_guard lock(fault_mutex);
  fault = std::move(value);
}

Pending Communicator::post(const Identity& identity, std::function<void(Pending::Job&)> run) {
  Pending pending;
  pending.job_ = std::make_shared<Pending::Job>();
  pending.job_->run = [this, identity, position = posted_++, run = std::move(run)](Pending::Job& job) {
    if (absl::Status status = injected_fault(rank(), identity, position); !status.ok()) engine_->break_with(status);
    run(job);
  };
  if (world_size() == 1) {
    pending.job_->finish();
    return pending;
  }
  if (thread_ == nullptr) thread_ = std::make_unique<Thread>();
  last_ = pending;
  thread_->post(pending.job_);
  return pending;
}

absl::Status Communicator::wait(const Pending& pending) {
  if (!pending.valid()) return absl::OkStatus();
  if (!pending.job_->done.load(std::memory_order_acquire)) {
    const Clock::time_point begin = Clock::now();
    pending.job_->done.wait(false, std::memory_order_acquire);
    waited_seconds_ += std::chrono::duration<double>(Clock::now() - begin).count();
  }
  return pending.job_->status;
}

absl::Status Communicator::broken() {
  wait(last_).IgnoreError();  // it holds what broke it, which is also what the engine says
  return engine_->broken();
}

const Words& Communicator::words_of(const Pending& pending) { return pending.job_->words; }

absl::StatusOr<Words> Communicator::wait_for_words(const Pending& pending) {
  if (absl::Status status = wait(pending); !status.ok()) return status;
  return std::move(pending.job_->words);
}

Pending Communicator::post_all_gather(const Identity& identity, void* buffer, int64_t part_bytes) {
  return post(identity, [=, this](Pending::Job& job) { job.status = engine_->all_gather(identity, buffer, part_bytes); });
}

Pending Communicator::post_reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel,
                                          c10::ScalarType dtype, std::vector<uint64_t> words, double divisor) {
  return post(identity, [=, this, words = std::move(words)](Pending::Job& job) {
    auto result = engine_->reduce_scatter(identity, buffer, out, part_numel, dtype, words, divisor);
    job.status = result.status();
    if (result.ok()) job.words = *std::move(result);
  });
}

absl::Status Communicator::all_gather(const Identity& identity, void* buffer, int64_t part_bytes) {
  return wait(post_all_gather(identity, buffer, part_bytes));
}

absl::StatusOr<Words> Communicator::reduce_scatter(const Identity& identity, const void* buffer, void* out, int64_t part_numel,
                                                   c10::ScalarType dtype, std::span<const uint64_t> words, double divisor) {
  return wait_for_words(
      post_reduce_scatter(identity, buffer, out, part_numel, dtype, std::vector<uint64_t>(words.begin(), words.end()), divisor));
}

absl::StatusOr<Words> Communicator::exchange(const Identity& identity, std::span<const uint64_t> words) {
  return wait_for_words(post(identity, [&](Pending::Job& job) {
    auto result = engine_->exchange(identity, words);
    job.status = result.status();
    if (result.ok()) job.words = *std::move(result);
  }));
}

absl::Status Communicator::broadcast(const Identity& identity, void* buffer, int64_t bytes) {
  return wait(post(identity, [&](Pending::Job& job) { job.status = engine_->broadcast(identity, buffer, bytes); }));
}

}  // namespace rebind::comm
