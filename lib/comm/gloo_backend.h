// Gloo as a c10d backend. Only gloo_backend.cpp knows Gloo's headers, which LibTorch does not bring along.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace rebind::comm {

// Where the ranks of a group run, as far as is known before they are connected.
enum class Reach {
  kThisHost,  // all on this host: bind to the loopback address, whatever the host's name resolves to
  kAnyHost    // the address of the host's name, or loopback when that cannot be bound
};

// Collective, blocking. GLOO_SOCKET_IFNAME, a comma-separated list of interfaces, goes before `reach`. Throws what Gloo throws.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                                    std::chrono::milliseconds timeout, Reach reach);

}  // namespace rebind::comm
