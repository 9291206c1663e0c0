// What is gathered together: the parameters of one flat buffer, their flat shard, and the gathered copies while there are any.
//
// A unit of the plan has a buffer for each (dtype, requires_grad); here each buffer is a Unit of its own, so that an operator that
// needs one dtype does not gather the others.
//
// A Space is one gathered copy of the unit's flat buffer: of the parameters, or of the gradients. It is filled by one
// all-gather, used while pinned, and dropped whole. The shards are the truth; an element of a Space that may differ from them
// is stale, parameter by parameter, and is gathered again before it is read.
//
// A Reduction is the way of one backward's gradients to the shards, under way while the backward goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/comm/communicator.h"
#include "lib/runtime/arena.h"
#include "lib/runtime/parameter.h"
#include "lib/runtime/slice.h"

namespace rebind::runtime {

struct Space {
  Arena::Block memory;      // [world_size * shard bytes]; empty: not gathered
  comm::Pending gather;     // valid: still being filled
  bool prefetched = false;  // gathered ahead, and not used yet
  uint64_t last_use = 0;    // Sharding's count of uses
  std::vector<bool> stale;  // by Parameter::slot_in_unit
  int pins = 0;             // operators that are using it
};

struct Reduction {
  Arena::Block flat;       // [world_size * shard_numel] of this rank's gradients, in the dtype of the sum
  at::Tensor mean;         // [shard_numel], this rank's part, in the dtype of the sum
  comm::Pending scatter;
};

// The dtype in which gradients of `dtype` are summed.
at::ScalarType reduce_dtype(at::ScalarType dtype);

struct Unit {
  int index = 0;     // in Sharding::units
  std::string name;  // the plan's unit, and the buffer if there are several: "head", "head (frozen int64)"
  at::ScalarType dtype = at::kFloat;
  int64_t item_bytes = 4;
  int64_t shard_numel = 0;
  int64_t padded_numel = 0;  // world_size * shard_numel
  std::vector<Parameter*> parameters;  // in the order of their offsets
  std::vector<std::unique_ptr<Run>> runs;  // likewise; every parameter is in one

  at::Tensor flat_shard;  // [shard_numel]; gaps and tail are zero
  Space values, gradients;
  std::optional<Reduction> reduction;
  at::Tensor gradient_memory;  // of the last Reduction's mean, used again once nobody holds it
  int arrived = 0;  // parameters whose hooks have fired in the current backward

  bool has_pending() const {
    for (const Parameter* parameter : parameters) {
      if (parameter->pending.defined()) return true;
    }
    return false;
  }
};

}  // namespace rebind::runtime
