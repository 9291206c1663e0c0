// What is gathered together: the parameters of one flat buffer, their flat shard, and the gathered copies while there are any.
//
// A unit of the plan has a buffer for each (dtype, requires_grad); here each buffer is a Unit of its own, so that an operator that
// needs one dtype does not gather the others.
//
// A Space is one gathered copy of the unit's flat buffer: of the parameters, or of the gradients. It is filled by one
// all-gather, used while pinned, and dropped whole. The shards are the truth; an element of a Space that may differ from them
// is stale, parameter by parameter, and is gathered again before it is read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lib/runtime/parameter.h"

namespace rebind::runtime {

struct Space {
  at::Tensor memory;  // uint8 [world_size * shard bytes]; undefined: not gathered
  std::vector<bool> stale;  // by Parameter::slot_in_unit
  int pins = 0;             // operators that are using it
};

struct Unit {
  int index = 0;     // in Sharding::units
  std::string name;  // the plan's unit, and the buffer if there are several: "head", "head (frozen int64)"
  at::ScalarType dtype = at::kFloat;
  int64_t item_bytes = 4;
  int64_t shard_numel = 0;
  int64_t padded_numel = 0;  // world_size * shard_numel
  std::vector<Parameter*> parameters;  // in the order of their offsets

  at::Tensor flat_shard;  // [shard_numel]; gaps and tail are zero
  Space values, gradients;
  int arrived = 0;  // parameters whose hooks have fired in the current backward

  bool has_pending() const {
    for (const Parameter* parameter : parameters) {
      if (parameter->pending.defined()) return true;
    }
    return false;
  }
};

}  // namespace rebind::runtime
