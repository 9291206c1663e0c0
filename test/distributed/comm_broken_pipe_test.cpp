// What the user saw: one rank died, and the others were gone too, without a message.
#include <csignal>

#include "test/support/catch.h"
#include "test/support/ranks.h"

namespace rebind::test {

TEST_CASE("comm: a group of several ranks ignores SIGPIPE, and leaves a handler of the program's alone", "[comm]") {
  struct sigaction before {}, now {};
  sigaction(SIGPIPE, nullptr, &before);
  const auto join = [] { run_ranks(2, [](int, auto) {}); };

  std::signal(SIGPIPE, SIG_DFL);
  join();
  sigaction(SIGPIPE, nullptr, &now);
  CHECK(now.sa_handler == SIG_IGN);

  const auto own = +[](int) {};
  std::signal(SIGPIPE, own);
  join();
  sigaction(SIGPIPE, nullptr, &now);
  CHECK(now.sa_handler == own);
  sigaction(SIGPIPE, &before, nullptr);
}

}  // namespace rebind::test
