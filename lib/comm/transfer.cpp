#include "lib/comm/transfer.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace rebind::comm {
namespace {

std::string one_line(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  std::string text = error != nullptr ? error->what_without_backtrace() : e.what();
  text = text.substr(0, text.find('\n'));
  const size_t place = text.find(".cc:");  // Gloo begins with the place in its sources
  const size_t end = place == std::string::npos ? place : text.find("] ", place);
  return end == std::string::npos ? text : text.substr(end + 2);
}

bool has(const std::vector<int>& peers, int peer) { return std::find(peers.begin(), peers.end(), peer) != peers.end(); }

}  // namespace

void Transfer::post(int peer, void* data, int64_t bytes, bool sends) {
  if (failed(peer)) return;
  std::vector<at::Tensor> tensors{at::from_blob(data, {bytes}, at::TensorOptions(at::kByte))};
  try {
    operations_.push_back({peer, sends, sends ? backend_.send(tensors, peer, tag_) : backend_.recv(tensors, peer, tag_)});
  } catch (const std::exception& e) {
    note_closed(peer, one_line(e));
  }
}

void Transfer::note_closed(int peer, const std::string& detail) {
  if (failures_.closed.empty()) failures_.detail = detail;
  failures_.closed.push_back(peer);
}

bool Transfer::failed(int peer) const { return has(failures_.silent, peer) || has(failures_.closed, peer); }

Failures Transfer::wait(Clock::time_point deadline, bool finish_others) {
  bool shortened = false;  // a peer failed: the others have until the end of the grace period
  for (const bool sends : {false, true}) {
    for (Operation& operation : operations_) {
      if (operation.sends != sends || failed(operation.peer)) continue;
      if (!failures_.closed.empty()) {
        if (!finish_others) return failures_;
        if (!shortened) deadline = std::min(deadline, Clock::now() + kGrace);
        shortened = true;
      }
      try {
        // A limit of 0 would mean the group's own time-out.
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        operation.work->wait(std::max(left, std::chrono::milliseconds(1)));
      } catch (const std::exception& e) {
        // A time-out makes Gloo close all connections; operations that were open then fail too, with a text of their own.
        const std::string text = one_line(e);
        if (Clock::now() >= deadline && text.find("closed by peer") == std::string::npos) {
          failures_.silent.push_back(operation.peer);
        } else {
          note_closed(operation.peer, text);
        }
      }
    }
  }
  return failures_;
}

}  // namespace rebind::comm
