// What an operator may do to its arguments, as far as the touch fallback must know. Read once per operator from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>

namespace rebind::runtime {

enum class Special : uint8_t {
  kNone,
  kAccumulate,   // add_.Tensor: how autograd adds to a .grad that is there
  kAdd,          // add.Tensor: how it does so under create_graph
  kReplace,      // set_, resize_, t_ ...: would give a window other memory or another shape
  kRenorm,       // embedding_renorm_: writes rows that depend on the rank's own indices
  kPointwiseScalar,  // in place, each element by itself, other arguments scalars: may as well run on the shard
  kNorm,         // p-norm of the whole tensor
  kAbs,          // the first half of LibTorch's infinity norm
};

struct OperatorInfo {
  std::string name;
  size_t arguments = 0;
  uint64_t writes = 0;      // bit i: argument i is written
  bool is_aten = false;     // its kernels use no other parameter than its arguments
  bool collective = false;  // c10d and its relatives
  bool reduction = false;   // the result of a part says nothing about the whole
  Special special = Special::kNone;

  bool writes_argument(size_t i) const { return i < 64 && ((writes >> i) & 1) != 0; }
};

const OperatorInfo& info_of(const c10::OperatorHandle& op);

}  // namespace rebind::runtime
