#include "lib/comm/parent_death.h"

#include <absl/strings/str_cat.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

namespace rebind::comm {
namespace {

// As early as it can be known: a launcher that ends between this and the request below shows as another parent.
struct Loaded {
  pid_t self = ::getpid(), parent = ::getppid();
};
const Loaded loaded;

}  // namespace

absl::Status end_with_parent(const Where& where) {
  int signal = 0;
  if (::prctl(PR_GET_PDEATHSIG, &signal) == 0 && signal != 0) return absl::OkStatus();
  // A process that was forked later has the loading process for a parent.
  const pid_t parent = ::getpid() == loaded.self ? loaded.parent : ::getppid();
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() == parent) return absl::OkStatus();
  return error(absl::StatusCode::kUnavailable, where, absl::StrCat("the launcher, process ", parent, ", has ended"),
               "Start the job again; a rank that should outlive its launcher sets ProcessGroupOptions::end_with_launcher to false");
}

}  // namespace rebind::comm
