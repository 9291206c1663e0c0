#include "test/support/processes.h"

#include <arpa/inet.h>
#include <c10/core/Allocator.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace rebind::test {
namespace {

using Clock = std::chrono::steady_clock;

bool of_a_launcher(const std::string& name) {
  for (const char* exact : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (name == exact) return true;
  }
  for (const char* beginning : {"LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "OMPI_", "PMIX_", "SLURM_", "PMI_", "MPI_LOCAL"}) {
    if (name.rfind(beginning, 0) == 0) return true;
  }
  return false;
}

std::vector<std::string> environment(const Environment& extra) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    if (!of_a_launcher(name) && extra.count(name) == 0) result.push_back(text);
  }
  for (const auto& [name, value] : extra) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

void check(int code, const char* what) {
  if (code != 0) throw std::runtime_error(std::string(what) + ": " + std::strerror(code));
}

}  // namespace

Finished run_process(const std::vector<std::string>& command, const Environment& extra, std::chrono::seconds limit) {
  std::vector<std::string> arguments = command, variables = environment(extra);
  std::array<std::array<int, 2>, 2> pipes;
  posix_spawn_file_actions_t actions;
  check(posix_spawn_file_actions_init(&actions), "posix_spawn_file_actions_init");
  for (int i = 0; i < 2; ++i) {
    check(::pipe2(pipes[i].data(), O_CLOEXEC) == 0 ? 0 : errno, "pipe2");
    check(posix_spawn_file_actions_adddup2(&actions, pipes[i][1], i + 1), "posix_spawn_file_actions_adddup2");
  }
  pid_t child = 0;
  const Clock::time_point begin = Clock::now();
  check(posix_spawnp(&child, arguments[0].c_str(), &actions, nullptr, pointers(arguments).data(), pointers(variables).data()),
        arguments[0].c_str());
  posix_spawn_file_actions_destroy(&actions);
  for (auto& ends : pipes) ::close(ends[1]);

  Finished result;
  std::array<pollfd, 2> open{{{pipes[0][0], POLLIN, 0}, {pipes[1][0], POLLIN, 0}}};
  int status = 0;
  bool ended = false;
  // The pipes can stay open after the end, in the hands of a grandchild; then they are read once more and left.
  for (int last_reads = 0; last_reads < 2;) {
    const int ready = ::poll(open.data(), open.size(), 50);
    bool read_something = false;
    for (int i = 0; ready > 0 && i < 2; ++i) {
      if (open[i].revents == 0) continue;
      std::array<char, 65536> buffer;
      const ssize_t count = ::read(open[i].fd, buffer.data(), buffer.size());
      if (count > 0) {
        (i == 0 ? result.out : result.err).append(buffer.data(), count);
        read_something = true;
      } else {
        open[i].fd = -1;  // poll skips it
      }
    }
    if (!ended && ::waitpid(child, &status, WNOHANG) == child) ended = true;
    if (ended && !read_something) ++last_reads;
    if (!ended && !result.timed_out && Clock::now() - begin > limit) {
      result.timed_out = true;
      ::kill(child, SIGKILL);
    }
  }
  for (auto& ends : pipes) ::close(ends[0]);
  result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::vector<Finished> run_process_ranks(int world_size, const std::vector<std::string>& command, const Environment& extra,
                                        std::chrono::seconds limit) {
  const std::string port = std::to_string(free_port());
  std::vector<Finished> results(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Environment variables = extra;
      variables.insert({{"RANK", std::to_string(rank)},
                        {"WORLD_SIZE", std::to_string(world_size)},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", port},
                        {"OMP_NUM_THREADS", "1"}});
      results[rank] = run_process(command, variables, limit);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

std::string torchrun() {
  // .../bin/torchrun next to .../lib/python3.x/site-packages/torch/lib/libc10.so
  Dl_info info;
  if (::dladdr(reinterpret_cast<void*>(&c10::GetAllocator), &info) != 0) {
    std::filesystem::path path = std::filesystem::absolute(info.dli_fname);
    for (; path.has_relative_path(); path = path.parent_path()) {
      if (std::filesystem::exists(path / "bin" / "torchrun")) return (path / "bin" / "torchrun").string();
    }
  }
  return "torchrun";
}

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(fd);
  if (!bound) throw std::runtime_error("no free port");
  return ntohs(address.sin_port);
}

}  // namespace rebind::test
