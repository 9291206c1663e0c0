#include "lib/comm/gloo_backend.h"

#include <cstdlib>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lib/comm/broken_pipe.h"

namespace rebind::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::vector<std::shared_ptr<gloo::transport::Device>> devices(Reach reach) {
  std::vector<std::shared_ptr<gloo::transport::Device>> result;
  const char* names = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream list(names == nullptr ? "" : names);
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) result.push_back(Gloo::createDeviceForInterface(name));
  }
  if (result.empty()) {
    result.push_back(reach == Reach::kThisHost ? Gloo::createDeviceForHostname("127.0.0.1") : Gloo::createDefaultDevice());
  }
  return result;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                                    std::chrono::milliseconds timeout, Reach reach) {
  survive_broken_pipes();
  auto options = Gloo::Options::create(timeout);
  options->devices = devices(reach);
  return c10::make_intrusive<Gloo>(store, rank, world_size, options);
}

}  // namespace rebind::comm
