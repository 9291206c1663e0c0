// Presence: one all-gather fills a unit's Space, ahead of its use where the schedule knows it; what is needed last makes room.
#include <absl/strings/str_cat.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstring>

#include "lib/plan/flat_layout.h"
#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

enum class What : uint32_t { kValues = 0, kGradients = 1, kPiece = 2 };

// The unit's number and what of it is gathered: part of the identity that ranks compare.
uint32_t identity_of(int unit, What what) { return static_cast<uint32_t>(unit) * 4 + static_cast<uint32_t>(what); }

int64_t gathered_bytes(const Unit& unit) { return unit.padded_numel * unit.item_bytes; }

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
  if (!parameter.reduced) {
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
  Unit& unit = *parameter.unit;
  const bool is_here = space.memory && !space.stale[parameter.slot_in_unit];
  if (gradients) {
    if (!is_here) gather(unit, space, gradients, /*service=*/true);
    return;
  }
  note_use(unit);
  if (!is_here) {
    claim(unit, space);
    post_gather(unit, space, gradients, /*service=*/false);
  } else if (space.prefetched) {
    ++counts.prefetch_hits;
  }
  space.prefetched = false;
  prefetch();
  await_gather(space);
}

// Evaluation has an order of its own, and none that ends: it is served on demand and leaves the record alone.
void Sharding::note_use(Unit& unit) {
  unit.values.last_use = ++uses_;
  if (!c10::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() == -1) return schedule_.lose_place();
  if (!schedule_.use(unit.index) || !schedule_.knows_place()) return;
  for (auto& other : units) {  // what has had its last use
    Space& space = other->values;
    if (space.memory && space.pins == 0 && other.get() != &unit && schedule_.distance(other->index) == Schedule::kNever) drop(space);
  }
}

Arena::Block Sharding::make_room(int64_t bytes, int64_t next_use) {
  const auto key = [&](const Unit& unit, const Space& space) {
    const int64_t distance = &space == &unit.gradients ? Schedule::kNever : schedule_.distance(unit.index);
    return std::pair(distance, ~space.last_use);  // the farther away the better; if that is unknown, the longest unused
  };
  while (true) {
    if (Arena::Block block = gathered.allocate(bytes)) return block;
    Space* victim = nullptr;
    std::pair<int64_t, uint64_t> best;
    for (auto& unit : units) {
      for (Space* space : {&unit->values, &unit->gradients}) {
        if (!space->memory || space->pins > 0) continue;
        const auto candidate = key(*unit, *space);
        if (candidate.first <= next_use || (victim != nullptr && candidate <= best)) continue;
        victim = space;
        best = candidate;
      }
    }
    if (victim == nullptr) return {};
    drop(*victim);
  }
}

void Sharding::prefetch() {
  for (const int index : schedule_.upcoming(prefetch_units_)) {
    Unit& unit = *units[index];
    if (unit.values.memory) continue;
    unit.values.memory = make_room(gathered_bytes(unit), schedule_.distance(index));
    if (!unit.values.memory) return;
    set_live_bytes(unit.values.memory.bytes());
    post_gather(unit, unit.values, /*gradients=*/false, /*service=*/false);
    unit.values.prefetched = true;
  }
}

void Sharding::claim(Unit& unit, Space& space) {
  await_gather(space);
  if (space.memory) return;
  space.memory = make_room(gathered_bytes(unit), /*next_use=*/-1);
  if (!space.memory) space.memory = Arena::outside(gathered_bytes(unit));
  set_live_bytes(space.memory.bytes());
}

void Sharding::post_gather(Unit& unit, Space& space, bool gradients, bool service) {
  const int64_t part_bytes = unit.shard_numel * unit.item_bytes;
  char* own = space.memory.data() + rank() * part_bytes;
  if (gradients) {
    if (part_bytes > 0) std::memset(own, 0, part_bytes);
    for (Parameter* parameter : unit.parameters) {
      if (!parameter->reduced) continue;
      char* to = own + parameter->shard_offset * unit.item_bytes;
      for (const at::Tensor& part : gradient_parts(*parameter)) {
        std::memcpy(to, part.data_ptr(), part.nbytes());
        to += part.nbytes();
      }
    }
  } else if (part_bytes > 0) {
    std::memcpy(own, unit.flat_shard.data_ptr(), part_bytes);
  }
  space.gather = communicator->post_all_gather(
      {.kind = comm::Kind::kAllGather,
       .unit = identity_of(unit.index, gradients ? What::kGradients : What::kValues),
       .epoch = epoch_,
       .name = absl::StrCat(gradients ? "gradients of unit '" : "unit '", unit.name, "'")},
      space.memory.data(), part_bytes);
  std::fill(space.stale.begin(), space.stale.end(), false);
  ++(service ? counts.service_gathers : counts.all_gathers);
  counts.gathered_bytes += space.memory.bytes();
}

void Sharding::gather(Unit& unit, Space& space, bool gradients, bool service) {
  space.last_use = ++uses_;
  claim(unit, space);
  post_gather(unit, space, gradients, service);
  await_gather(space);
}

void Sharding::await_gather(Space& space) {
  if (!space.gather.valid()) return;
  const absl::Status status = communicator->wait(std::exchange(space.gather, {}));
  if (status.ok()) return;
  drop(space);
  throw c10::Error(std::string(status.message()), /*backtrace=*/nullptr);
}

void Sharding::drop(Space& space) {
  if (!space.memory) return;
  // A gather that nobody needs any more still writes; if it failed, everything later fails with its error.
  communicator->wait(std::exchange(space.gather, {})).IgnoreError();
  set_live_bytes(-space.memory.bytes());
  space.memory.reset();
  space.prefetched = false;
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
  return (world_size() == 1 ? bytes_of(unit.flat_shard) : unit.values.memory.data()) + parameter.offset * unit.item_bytes;
}

void* Sharding::gradients_of(Parameter& parameter) {
  if (world_size() > 1) return parameter.unit->gradients.memory.data() + parameter.offset * parameter.item_bytes;
  // Its parts in several slices lie one after another: all are views of one flat gradient.
  const std::vector<at::Tensor> parts = gradient_parts(parameter);
  return parts.empty() ? nullptr : parts.front().data_ptr();
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
  if (parameter.reduced) {
    const char* from = static_cast<char*>(gradients_of(parameter)) + parameter.shard_interval.begin * unit.item_bytes;
    for (const at::Tensor& part : gradient_parts(parameter)) {
      std::memcpy(part.data_ptr(), from, part.nbytes());
      from += part.nbytes();
    }
  }
  unit.gradients.stale[parameter.slot_in_unit] = true;
}

std::vector<at::Tensor> Sharding::copy_whole(bool gradients) {
  std::vector<at::Tensor> whole(parameters.size());
  for (auto& unit : units) {
    const auto has_any = [&](const Parameter* parameter) { return !gradients || parameter->reduced; };
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
