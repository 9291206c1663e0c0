#include "lib/comm/master_store.h"

#include <absl/strings/str_cat.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "lib/base/error.h"

namespace rebind::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds until(Clock::time_point deadline) {
  return std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()), milliseconds(1));
}

// Empty on success, else why not.
std::string try_connect(const addrinfo& address, Clock::time_point deadline) {
  const int fd = ::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol);
  if (fd < 0) return std::strerror(errno);
  std::string problem;
  if (::connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
    pollfd ready{fd, POLLOUT, 0};
    int code = errno;
    socklen_t length = sizeof code;
    if (code == EINPROGRESS) {
      if (::poll(&ready, 1, static_cast<int>(until(deadline).count())) <= 0) {
        code = ETIMEDOUT;
      } else {
        ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &length);
      }
    }
    if (code != 0) problem = std::strerror(code);
  }
  ::close(fd);
  return problem;
}

// Whether somebody listens at the address, and if not, why. LibTorch's own store client overshoots its time-out twofold when
// nobody does.
std::string probe(const std::string& host, uint16_t port, Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); code != 0) {
    return ::gai_strerror(code);
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  std::string problem;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    // One address that swallows packets must not use up the time of the next.
    problem = try_connect(*address, std::min(deadline, Clock::now() + std::chrono::seconds(3)));
    if (problem.empty()) break;
  }
  return problem;
}

std::string first_line(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  const std::string text = error != nullptr ? error->what_without_backtrace() : e.what();
  return text.substr(0, text.find('\n'));
}

using Store = c10::intrusive_ptr<c10d::Store>;

// On a thread of its own: LibTorch's client waits for ever for a listener that is no store and never answers. Then the thread is
// left behind, for a program that is about to end with an error.
std::future<Store> open_store(const std::string& host, const c10d::TCPStoreOptions& options) {
  std::promise<Store> promise;
  std::future<Store> result = promise.get_future();
  std::thread([promise = std::move(promise), host, options]() mutable {
    try {
      promise.set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }).detach();
  return result;
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Store>> connect_master_store(const LaunchEnvironment& launch, milliseconds timeout) {
  const Where where{.call = "init_process_group", .rank = launch.rank};
  const std::string place = absl::StrCat(launch.master_address, ":", launch.master_port);
  const bool serves = launch.rank == 0 && !launch.agent_serves_store;
  const Clock::time_point deadline = Clock::now() + timeout;

  if (!serves) {
    std::string refusal;
    milliseconds pause(20);
    while (!(refusal = probe(launch.master_address, launch.master_port, deadline)).empty()) {
      if (Clock::now() + pause >= deadline) {
        return error(absl::StatusCode::kDeadlineExceeded, where,
                     absl::StrCat("no answer from the master at ", place, " within ", timeout.count(), " ms (", refusal, ")"),
                     "Check MASTER_ADDR and MASTER_PORT, and that rank 0 (or torchrun) runs there and can be reached");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, milliseconds(500));
    }
  }

  c10d::TCPStoreOptions options;
  options.port = launch.master_port;
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = until(deadline);
  const std::string problem = serves ? "cannot serve the store at " : "the store did not answer at ";
  const std::string remedy = serves ? "Choose another MASTER_PORT; MASTER_ADDR must be an address of this host"
                                    : "Check MASTER_ADDR and MASTER_PORT: something else may be listening there";
  std::future<Store> store = open_store(launch.master_address, options);
  if (store.wait_until(deadline) != std::future_status::ready) {
    return error(absl::StatusCode::kDeadlineExceeded, where, absl::StrCat(problem, place, " within ", timeout.count(), " ms"),
                 remedy);
  }
  try {
    return c10::make_intrusive<c10d::PrefixStore>(launch.key_prefix, store.get());
  } catch (const std::exception& e) {
    return error(absl::StatusCode::kUnavailable, where, absl::StrCat(problem, place, " (", first_line(e), ")"), remedy);
  }
}

}  // namespace rebind::comm
