// The communicator's all_gather and reduce_scatter next to Gloo's own, over one group, in one process a rank.
//
//   torchrun --standalone --no-python --nproc-per-node=2 comm_bench ROUNDS BYTES...     bytes: of one shard, fp32
//
// Results are compared bit for bit before anything is timed (whole numbers, whose sums are exact in any order). In a round every
// contender runs once, after a barrier, so that a change of the machine's load meets all of them. Wall time: of the slowest rank;
// CPU time: of the mean rank, all threads. Ratios are native / rebind, taken within a round; numbers are medians. bench/comm runs
// it.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lib/comm/communicator.h"
#include "rebind/process_group.h"

namespace {

using rebind::comm::Communicator;
using Clock = std::chrono::steady_clock;

void check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

uint64_t cpu_nanoseconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& time) { return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_usec) * 1000; };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

struct Times {
  double wall_ms = 0, cpu_ms = 0;
};

struct Contender {
  const char* name;
  std::function<void()> run;
  std::vector<Times> rounds{};
};

class Bench {
 public:
  Bench(c10::intrusive_ptr<c10d::ProcessGroup> group, int rounds)
      : group_(std::move(group)), rounds_(rounds), comm_(group_, /*channel=*/0, std::chrono::minutes(2)) {}

  // shards of `bytes`: whole [W * n], part [n]
  void run(int64_t bytes) {
    const int64_t world_size = group_->getSize(), rank = group_->getRank(), n = bytes / 4;
    at::Tensor part = at::full({n}, double(rank + 1)), expected_whole = at::empty({world_size * n});
    for (int64_t r = 0; r < world_size; ++r) expected_whole.narrow(0, r * n, n).fill_(double(r + 1));

    at::Tensor gathered = at::empty({world_size * n}), native = at::empty({world_size * n});
    gathered.narrow(0, rank * n, n).copy_(part);
    std::vector<Contender> gathers{
        {"rebind", [&] { check(comm_.all_gather({.name = "the benchmark"}, gathered.data_ptr(), bytes)); }},
        {"_allgather_base", [&] { group_->_allgather_base(native, part)->wait(); }}};
    for (Contender& contender : gathers) contender.run();
    expect_equal("all_gather", gathered, expected_whole);
    expect_equal("_allgather_base", native, expected_whole);
    time(gathers, bytes);
    print("all_gather", bytes, gathers);

    // Rank r adds r + 1 everywhere, and its position modulo 1024.
    at::Tensor summand = at::arange(world_size * n).remainder_(1024).add_(rank + 1).to(at::kFloat);
    const double ranks_sum = double(world_size * (world_size + 1) / 2);
    const at::Tensor expected_sum =
        at::arange(rank * n, (rank + 1) * n).remainder_(1024).mul_(world_size).to(at::kFloat).add_(ranks_sum);
    at::Tensor sum = at::empty({n}), native_sum = at::empty({n});
    std::vector<at::Tensor> reduced{summand.clone()};
    std::vector<Contender> sums{
        {"rebind",
         [&] {
           check(comm_.reduce_scatter({.name = "the benchmark"}, summand.data_ptr(), sum.data_ptr(), n, at::kFloat, {}).status());
         }},
        {"_reduce_scatter_base", [&] { group_->_reduce_scatter_base(native_sum, summand)->wait(); }},
        {"allreduce", [&] { group_->allreduce(reduced)->wait(); }}};
    for (Contender& contender : sums) contender.run();
    expect_equal("reduce_scatter", sum, expected_sum);
    expect_equal("_reduce_scatter_base", native_sum, expected_sum);
    expect_equal("allreduce", reduced[0].narrow(0, rank * n, n), expected_sum);
    // In place and repeated, the values would leave the range in which floats are fast.
    reduced[0].zero_();
    time(sums, bytes);
    print("reduce_scatter", bytes, sums);
  }

 private:
  static void expect_equal(const char* what, const at::Tensor& got, const at::Tensor& expected) {
    if (!got.equal(expected)) throw std::runtime_error(std::string(what) + " gave a wrong result");
  }

  void time(std::vector<Contender>& contenders, int64_t bytes) {
    const int repeats = static_cast<int>(std::clamp<int64_t>((int64_t{8} << 20) / bytes, 1, 32));
    for (Contender& contender : contenders) contender.run();  // once more, with all memory touched
    for (int round = 0; round < rounds_; ++round) {
      for (size_t c = 0; c < contenders.size(); ++c) {
        Contender& contender = contenders[(c + round) % contenders.size()];  // nobody is always the first
        check(comm_.exchange({.name = "a barrier"}, {}).status());
        const uint64_t cpu_begin = cpu_nanoseconds();
        const auto begin = Clock::now();
        for (int i = 0; i < repeats; ++i) contender.run();
        const std::vector<uint64_t> own{uint64_t(std::chrono::nanoseconds(Clock::now() - begin).count()),
                                        cpu_nanoseconds() - cpu_begin};
        const auto all = comm_.exchange({.name = "times"}, own);
        check(all.status());
        Times times;
        for (const auto& of_rank : *all) {
          times.wall_ms = std::max(times.wall_ms, double(of_rank[0]) / 1e6 / repeats);
          times.cpu_ms += double(of_rank[1]) / 1e6 / repeats / double(all->size());
        }
        contender.rounds.push_back(times);
      }
    }
  }

  static double median_of(const Contender& contender, double Times::*field) {
    std::vector<double> values;
    for (const Times& round : contender.rounds) values.push_back(round.*field);
    return median(values);
  }

  static double median_ratio(const Contender& native, const Contender& own, double Times::*field) {
    std::vector<double> ratios;
    // The clock of CPU time is coarse: a round may show none.
    for (size_t i = 0; i < own.rounds.size(); ++i) ratios.push_back(native.rounds[i].*field / std::max(own.rounds[i].*field, 1e-6));
    return median(ratios);
  }

  void print(const char* operation, int64_t bytes, const std::vector<Contender>& contenders) const {
    if (group_->getRank() != 0) return;
    const std::string size = bytes < (1 << 20) ? std::to_string(bytes >> 10) + " KiB" : std::to_string(bytes >> 20) + " MiB";
    for (size_t i = 1; i < contenders.size(); ++i) {
      const Contender &own = contenders[0], &native = contenders[i];
      std::printf("%d  %-14s  %8s  %9.3f %9.3f  %5.2f  %9.3f %9.3f  %5.2f  %s\n", group_->getSize(), operation, size.c_str(),
                  median_of(own, &Times::wall_ms), median_of(native, &Times::wall_ms), median_ratio(native, own, &Times::wall_ms),
                  median_of(own, &Times::cpu_ms), median_of(native, &Times::cpu_ms), median_ratio(native, own, &Times::cpu_ms),
                  native.name);
    }
    std::fflush(stdout);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const int rounds_;
  Communicator comm_;
};

int64_t number(const char* text) {
  const int64_t value = std::atoll(text);
  if (value < 1) throw std::invalid_argument("usage: comm_bench ROUNDS BYTES...   (positive numbers)");
  return value;
}

void run(int argc, char** argv) {
  if (argc < 3) number("");
  auto group = rebind::init_process_group();
  check(group.status());
  if ((*group)->getSize() < 2) throw std::invalid_argument("comm_bench needs two ranks or more: start it with torchrun");
  at::set_num_threads(1);
  if ((*group)->getRank() == 0) {
    std::printf("W  operation          shard  rebind ms native ms  ratio  rebind cpu    native  ratio  native\n");
  }
  Bench bench(*group, static_cast<int>(number(argv[1])));
  for (int i = 2; i < argc; ++i) bench.run((number(argv[i]) + 3) / 4 * 4);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
    return 0;
  } catch (const c10::Error& e) {
    std::fprintf(stderr, "comm_bench: %s\n", e.what_without_backtrace());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "comm_bench: %s\n", e.what());
  }
  return 1;
}
