// Presence: one all-gather fills a unit's Space, the next one's need frees it.
#include <absl/strings/str_cat.h>

#include <algorithm>
#include <cstring>

#include "lib/plan/flat_layout.h"
#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

enum class What : uint32_t { kValues = 0, kGradients = 1, kPiece = 2 };

// The unit's number and what of it is gathered: part of the identity that ranks compare.
uint32_t identity_of(int unit, What what) { return static_cast<uint32_t>(unit) * 4 + static_cast<uint32_t>(what); }

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

void Sharding::pin_values(Parameter& parameter) {
  if (moved_) check_windows();
  check_window(parameter);
  check_gradient(parameter);
  ensure(parameter, parameter.unit->values, /*gradients=*/false);
  ++parameter.unit->values.pins;
}

void Sharding::pin_gradients(Parameter& parameter) {
  if (moved_) check_windows();
  settle(parameter);
  if (parameter.shard_gradient == nullptr) {
    throw_error(where("use of a gradient", &parameter), "it was cleared (zero_grad) and is kept by a handle of the program's own",
                "Clone a gradient to keep it");
  }
  ensure(parameter, parameter.unit->gradients, /*gradients=*/true);
  ++parameter.unit->gradients.pins;
}

void Sharding::unpin(Space& space) {
  --space.pins;
  if (space.pins == 0 && strict_for_tests()) drop(space);
}

void Sharding::ensure(Parameter& parameter, Space& space, bool gradients) {
  if (world_size() == 1) return;  // the shard is the whole
  if (space.memory.defined() && !space.stale[parameter.slot_in_unit]) return;
  gather(*parameter.unit, space, gradients, /*service=*/gradients);
}

void Sharding::gather(Unit& unit, Space& space, bool gradients, bool service) {
  // One Space at a time (I3): what no operator is using makes room first.
  for (auto& other : units) {
    for (Space* candidate : {&other->values, &other->gradients}) {
      if (candidate != &space && candidate->pins == 0) drop(*candidate);
    }
  }
  const int64_t part_bytes = unit.shard_numel * unit.item_bytes;
  if (!space.memory.defined()) {
    space.memory = at::empty({world_size() * part_bytes}, at::TensorOptions().dtype(at::kByte));
    set_live_bytes(space.memory.numel());
  }
  char* own = bytes_of(space.memory) + rank() * part_bytes;
  if (gradients) {
    if (part_bytes > 0) std::memset(own, 0, part_bytes);
    for (Parameter* parameter : unit.parameters) {
      const KeyedStorage* gradient = parameter->shard_gradient;
      if (gradient == nullptr || gradient->hidden() || gradient->nbytes() == 0) continue;
      std::memcpy(own + parameter->shard_offset * unit.item_bytes, gradient->data(), gradient->nbytes());
    }
  } else if (part_bytes > 0) {
    std::memcpy(own, unit.flat_shard.data_ptr(), part_bytes);
  }
  const comm::Identity identity{
      .kind = comm::Kind::kAllGather,
      .unit = identity_of(unit.index, gradients ? What::kGradients : What::kValues),
      .epoch = epoch_,
      .name = absl::StrCat(gradients ? "gradients of unit '" : "unit '", unit.name, "'")};
  if (absl::Status status = communicator->all_gather(identity, bytes_of(space.memory), part_bytes); !status.ok()) {
    drop(space);
    throw c10::Error(std::string(status.message()), /*backtrace=*/nullptr);
  }
  std::fill(space.stale.begin(), space.stale.end(), false);
  ++(service ? counts.service_gathers : counts.all_gathers);
  counts.gathered_bytes += space.memory.numel();
}

void Sharding::drop(Space& space) {
  if (!space.memory.defined()) return;
  set_live_bytes(-space.memory.numel());
  space.memory.reset();
}

void Sharding::drop_unpinned() {
  for (auto& unit : units) {
    for (Space* space : {&unit->values, &unit->gradients}) {
      if (space->pins == 0) drop(*space);
    }
  }
}

void* Sharding::values_of(Parameter& parameter) {
  const Unit& unit = *parameter.unit;
  const at::Tensor& memory = world_size() == 1 ? unit.flat_shard : unit.values.memory;
  return bytes_of(memory) + parameter.offset * unit.item_bytes;
}

void* Sharding::gradients_of(Parameter& parameter) {
  if (world_size() > 1) return bytes_of(parameter.unit->gradients.memory) + parameter.offset * parameter.item_bytes;
  return parameter.shard_gradient->mutable_data();
}

void Sharding::write_through_values(Parameter& parameter) {
  if (world_size() == 1) return;
  Unit& unit = *parameter.unit;
  const int64_t bytes = parameter.shard_interval.numel() * unit.item_bytes;
  if (bytes > 0) {
    std::memcpy(bytes_of(unit.flat_shard) + parameter.shard_offset * unit.item_bytes,
                static_cast<char*>(values_of(parameter)) + parameter.shard_interval.begin * unit.item_bytes, bytes);
  }
  // A random write differs by rank, and each rank keeps its own part of it: the other parts must come from their owners.
  unit.values.stale[parameter.slot_in_unit] = true;
}

void Sharding::write_through_gradients(Parameter& parameter) {
  if (world_size() == 1) return;
  Unit& unit = *parameter.unit;
  KeyedStorage* gradient = parameter.shard_gradient;
  if (gradient != nullptr && gradient->nbytes() > 0) {
    std::memcpy(gradient->mutable_data(),
                static_cast<char*>(gradients_of(parameter)) + parameter.shard_interval.begin * unit.item_bytes,
                gradient->nbytes());
  }
  unit.gradients.stale[parameter.slot_in_unit] = true;
}

std::vector<at::Tensor> Sharding::copy_whole(bool gradients) {
  std::vector<at::Tensor> whole(parameters.size());
  for (auto& unit : units) {
    const auto has_any = [&](const Parameter* parameter) { return !gradients || parameter->shard_gradient != nullptr; };
    if (std::none_of(unit->parameters.begin(), unit->parameters.end(), has_any)) continue;  // on all ranks alike
    Space& space = gradients ? unit->gradients : unit->values;
    if (world_size() > 1) gather(*unit, space, gradients, /*service=*/true);
    for (Parameter* parameter : unit->parameters) {
      if (!has_any(parameter)) continue;
      at::Tensor& copy = whole[parameter->index];
      copy = at::empty_strided(parameter->sizes, parameter->strides, at::TensorOptions().dtype(parameter->dtype));
      if (parameter->numel == 0) continue;
      std::memcpy(bytes_of(copy), gradients ? gradients_of(*parameter) : values_of(*parameter), parameter->nbytes());
    }
    if (space.pins == 0) drop(space);
  }
  return whole;
}

absl::StatusOr<at::Tensor> Sharding::gather_whole(Parameter& parameter, const at::Tensor& piece, std::string_view what) {
  at::Tensor whole = at::empty_strided(parameter.sizes, parameter.strides, at::TensorOptions().dtype(piece.scalar_type()));
  if (parameter.numel == 0) return whole;
  const int64_t item_bytes = static_cast<int64_t>(piece.element_size());
  if (world_size() == 1) {
    std::memcpy(bytes_of(whole), bytes_of(piece), piece.nbytes());
    return whole;
  }
  std::vector<Interval> intervals;
  int64_t part_numel = 0;
  for (int r = 0; r < world_size(); ++r) {
    intervals.push_back(plan::shard_of(parameter.offset, parameter.numel, parameter.unit->shard_numel, r));
    part_numel = std::max(part_numel, intervals.back().numel());
  }
  const int64_t part_bytes = part_numel * item_bytes;
  at::Tensor parts = at::zeros({world_size() * part_bytes}, at::TensorOptions().dtype(at::kByte));
  if (piece.numel() > 0) std::memcpy(bytes_of(parts) + rank() * part_bytes, bytes_of(piece), piece.nbytes());
  const comm::Identity identity{
      .kind = comm::Kind::kAllGather,
      .unit = identity_of(parameter.unit->index, What::kPiece),
      .epoch = static_cast<uint64_t>(parameter.index),
      .name = absl::StrCat(absl::string_view(what.data(), what.size()), " of parameter '", parameter.name, "'")};
  if (absl::Status status = communicator->all_gather(identity, bytes_of(parts), part_bytes); !status.ok()) return status;
  for (int r = 0; r < world_size(); ++r) {
    if (intervals[r].numel() == 0) continue;
    std::memcpy(bytes_of(whole) + intervals[r].begin * item_bytes, bytes_of(parts) + r * part_bytes,
                intervals[r].numel() * item_bytes);
  }
  ++counts.service_gathers;
  counts.gathered_bytes += parts.numel();
  return whole;
}

}  // namespace rebind::runtime
