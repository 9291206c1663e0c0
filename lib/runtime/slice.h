// What optimizers hold: 1-D tensors over parts of a unit's flat shard.
//
// Note: Runs. A run is a row of parameters of one unit that every optimizer treats alike: same groups, same kinds and counters of
// state. It has up to two sets of slices, and exactly one of them is active, so that each element is in one tensor of an optimizer:
//   joined  the run's part of the flat shard, gaps included, cut into pieces of at most kMostNumel elements. In use while all members
//           have a gradient or none has
//   single  one for each member and piece that it reaches into on any rank. In use when some members have a gradient and some have none, for an optimizer skips a
//           tensor without gradient: no decay, no momentum, no step
// Tensors of the other set have 0 elements and no gradient; optimizers pass over them. Both stand in params() from the beginning: the
// vector is never edited, for an optimizer or the program may be walking over it. A run that cannot or must not be joined has only
// single slices, one for each member. All ranks have equally many slices, so that what is asked of one is asked on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/runtime/keyed_storage.h"

namespace rebind::runtime {

struct Run;
struct Unit;

struct Slice {
  Run* run = nullptr;
  int64_t begin = 0, end = 0;        // in the unit's flat shard, elements
  std::vector<Parameter*> members;   // the run's; of a single slice its parameter
  at::Tensor tensor;                 // [end - begin], or [0] while the other set is active
  KeyedStorage* gradient = nullptr;  // behind tensor.grad(); null: none of ours
  at::Tensor values;                 // of the gradient [end - begin], once it is reduced; plain

  int64_t numel() const { return end - begin; }
};

struct Run {
  // The sizes at which CPU optimizers are fastest: a piece of each of their tensors fits into the caches.
  static constexpr int64_t kMostNumel = 256 * 1024;

  Unit* unit = nullptr;
  std::vector<Parameter*> members;  // in the order of their offsets
  std::vector<int> optimizers;      // that hold it, as indices into Sharding::optimizers
  std::vector<std::unique_ptr<Slice>> joined, single;
  bool is_joined = false;

  const std::vector<std::unique_ptr<Slice>>& active() const { return is_joined ? joined : single; }
};

// The elements that a parameter has in a slice.
struct Part {
  Slice* slice;
  int64_t in_slice;  // where they begin there
  int64_t in_shard;  // and in the parameter's own part
  int64_t numel;
};
// In the active slices, in order, without empty ones.
std::vector<Part> parts_of(const Parameter& parameter);
// The active slices of which the parameter is a member.
std::vector<Slice*> slices_of(const Parameter& parameter);
// This rank's part of its reduced gradient: plain tensors over the slices' memory, without empty ones.
std::vector<at::Tensor> gradient_parts(const Parameter& parameter);

}  // namespace rebind::runtime
