// What the caller may decide about a sharding. Every default is safe; every field is the same on all ranks (that is checked).
//
//   rebind::FsdpOptions options;
//   options.unit_policy = rebind::UnitPolicy::by_type<BlockImpl>();
//   auto fsdp = rebind::prepare_fsdp(*model, {&adam}, group, options);
//
// Fields marked "Unimplemented" are part of the interface already; prepare_fsdp refuses them by name when they are set.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace rebind {

enum class ShardingStrategy {
  kFullShard,       // ZeRO-3: parameters, gradients and optimizer state are sharded
  kShardGradOp,     // ZeRO-2. Unimplemented
  kShardOptimizer,  // ZeRO-1. Unimplemented
  kNoShard          // plain data parallel. Unimplemented
};

// Unimplemented.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype, reduce_dtype;
};

// Which parameters are gathered together. A unit is gathered whole, used, and freed whole.
class UnitPolicy {
 public:
  enum class Kind { kAutomatic, kBySize, kByModule, kWholeModel };
  using Predicate = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

  // Repeated blocks (children of one container that have one type and the same parameters) are a unit each. The rest is cut by
  // size where blocks lie in between, so that an embedding and a head are two units when they are large; what is too small for a
  // unit of its own joins its neighbour. No unit of a large model is smaller than 64 Ki elements.
  static UnitPolicy automatic() { return UnitPolicy(Kind::kAutomatic); }
  // Parameters in the order of registration, cut into units of at least `min_numel` elements (1 or more). The parameters after the
  // last such unit belong to it too; small parameters of a module (biases) stay with its large ones.
  static UnitPolicy by_size(int64_t min_numel) {
    UnitPolicy policy(Kind::kBySize);
    policy.min_numel_ = min_numel;
    return policy;
  }
  // Each module for which `predicate` says yes is a unit: its parameters, less those of a unit inside it. The rest is one unit.
  // `name` is the module's path in the model, "" for the model itself.
  static UnitPolicy by_module(Predicate predicate) {
    UnitPolicy policy(Kind::kByModule);
    policy.predicate_ = std::move(predicate);
    return policy;
  }
  // by_module for the modules of the given (Impl) types.
  template <class... ModuleTypes>
  static UnitPolicy by_type() {
    return by_module([](const std::string&, const torch::nn::Module& module) {
      return ((dynamic_cast<const ModuleTypes*>(&module) != nullptr) || ...);
    });
  }
  // The whole model is one unit.
  static UnitPolicy whole_model() { return UnitPolicy(Kind::kWholeModel); }

  Kind kind() const { return kind_; }
  int64_t min_numel() const { return min_numel_; }
  const Predicate& predicate() const { return predicate_; }

 private:
  explicit UnitPolicy(Kind kind) : kind_(kind) {}
  Kind kind_;
  int64_t min_numel_ = 0;
  Predicate predicate_;
};

// Where parameters may start in a flat buffer, in elements: each at a multiple of `slot`; the shard length is a multiple of
// `quantum`, which is a multiple of `slot`. 0 and 0: chosen by the unit's size (8 and 8; 64 and 512 from 64 Ki elements a rank).
struct LayoutRules {
  int64_t slot = 0, quantum = 0;
};

struct FsdpOptions {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  UnitPolicy unit_policy = UnitPolicy::automatic();
  MixedPrecision mixed_precision;  // Unimplemented
  // Hybrid: shard over the main group, all-reduce over this one. Unimplemented.
  c10::intrusive_ptr<c10d::ProcessGroup> replicate_group;
  // All ranks start from rank 0's parameters, buffers, gradients and optimizer state. Off: they are checked to be equal.
  bool sync_from_rank0 = true;
  // Free a unit after its forward and gather it again for backward. Off: the whole model stays gathered from its forward to the end
  // of its backward, each unit is gathered once.
  bool reshard_after_forward = true;
  // Cap on gathered parameters, in bytes. Unimplemented; today the bound is plan().memory.peak_gathered_bytes, or what one
  // operator uses at once if that is more.
  std::optional<int64_t> max_live_bytes;
  // Units gathered ahead of use, in the order of the last iteration. Changes speed and memory (1 + prefetch_units units are gathered
  // at a time), never a result.
  int prefetch_units = 1;
  // A few optimizer tensors, of at most 256 Ki elements, for a row of parameters that are stepped alike, instead of one for each
  // parameter. Changes speed and params().size(), never a result: where some of them have a gradient and some have none, they are
  // stepped by themselves. Off: params() has one entry a parameter.
  bool coalesce = true;
  // The summed gradient is divided by this. Default: the world size (mean over the ranks).
  std::optional<double> gradient_divide_factor;
  // Exact names, or prefixes ending in ".": not sharded, gradients still averaged. Unimplemented.
  std::vector<std::string> ignored_parameters;
  // The longest one collective may take; also how long prepare_fsdp waits for the other ranks.
  std::chrono::milliseconds collective_timeout = std::chrono::minutes(10);
  // Richer diagnosis of every collective's identity. That identities agree is always checked; today this adds nothing.
  bool check_order = false;
  // For tests of the layout.
  LayoutRules layout_rules;
};

}  // namespace rebind
