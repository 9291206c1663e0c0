// A batch of sends and receives with the peers of a group, posted together and awaited until one deadline.
//
//   Transfer transfer(*backend, /*tag=*/7);
//   transfer.recv(1, buffer, bytes);
//   transfer.send(1, other, bytes);
//   Failures failures = transfer.wait(deadline);
//
// Note: Memory of a failed transfer. Gloo touches a buffer only while the Work of its operation lives: the destructor of a Transfer
// waits for an access that is under way and forbids others, so buffers may be freed after it. But an operation that is dropped
// half done leaves the connection unusable and Gloo's thread spinning. So wait() gives the peers that are alive a moment to finish
// after a failure; what is still open then ends by a time-out, for which Gloo closes all connections of the group.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace rebind::comm {

using Clock = std::chrono::steady_clock;

struct Failures {
  std::vector<int> silent;  // peers that did not answer in time
  std::vector<int> closed;  // peers to which there is no connection any more
  std::string detail;       // what the backend said of the first closed one, one line
  bool any() const { return !silent.empty() || !closed.empty(); }
};

class Transfer {
 public:
  Transfer(c10d::Backend& backend, int tag) : backend_(backend), tag_(tag) {}

  // An error here (a connection that is closed already) is reported by wait(). Zero bytes are a message too.
  void send(int peer, const void* data, int64_t bytes) { post(peer, const_cast<void*>(data), bytes, /*sends=*/true); }
  void recv(int peer, void* data, int64_t bytes) { post(peer, data, bytes, /*sends=*/false); }

  // Receives first, in the order they were posted, then sends. Peers that failed are not awaited any further. With
  // `finish_others` the other peers are given `kGrace` to complete; without, returns at the first closed connection, and what is
  // not complete stays open until this object is destroyed.
  static constexpr std::chrono::milliseconds kGrace{2000};
  Failures wait(Clock::time_point deadline, bool finish_others);

 private:
  struct Operation {
    int peer;
    bool sends;
    c10::intrusive_ptr<c10d::Work> work;
  };
  void post(int peer, void* data, int64_t bytes, bool sends);
  void note_closed(int peer, const std::string& detail);
  bool failed(int peer) const;

  c10d::Backend& backend_;
  const int tag_;
  std::vector<Operation> operations_;
  Failures failures_;
};

}  // namespace rebind::comm
