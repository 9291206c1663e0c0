#include "lib/runtime/slice_state.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "lib/runtime/parameter.h"

namespace rebind::runtime {
namespace {

using optim::StateParts;
using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

void* key_of(const Slice& slice) { return slice.tensor.unsafeGetTensorImpl(); }

std::optional<StateParts> state_of(const torch::optim::Optimizer& optimizer, const optim::Adapter& adapter, const Slice& slice) {
  const auto state = optimizer.state().find(key_of(slice));
  if (state == optimizer.state().end()) return std::nullopt;
  return adapter.take_apart(*state->second);
}

// A tensor over whole parameters, which is cut; others belong to the parameter as one number.
bool is_cut(const at::Tensor& tensor) { return tensor.dim() > 0; }

bool same_kind(const StateParts& a, const StateParts& b) {
  if (a.scalars != b.scalars || a.tensors.size() != b.tensors.size()) return false;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const auto& [key, tensor] = a.tensors[i];
    if (key != b.tensors[i].first || !is_cut(tensor) || !is_cut(b.tensors[i].second) ||
        tensor.scalar_type() != b.tensors[i].second.scalar_type()) {
      return false;
    }
  }
  return true;
}

// Optimizers are not owned. One that is gone has let go of the slices: then only we hold them.
bool is_alive(const Run& run) {
  const auto& slices = run.joined.empty() ? run.single : run.joined;
  return slices.front()->tensor.use_count() > 1;
}

struct Piece {
  int64_t offset;  // in the whole
  at::Tensor tensor;
};

// One tensor of `numel` elements with the pieces in their places: the memory they share if they lie so already, else a copy.
at::Tensor assemble(const std::vector<Piece>& pieces, int64_t numel, const at::TensorOptions& options) {
  const Piece* first = nullptr;
  bool in_place = true;
  for (const Piece& piece : pieces) {
    if (piece.tensor.numel() == 0) continue;
    if (first == nullptr) first = &piece;
    in_place = in_place && piece.tensor.is_contiguous() && piece.tensor.storage().is_alias_of(first->tensor.storage()) &&
               piece.tensor.storage_offset() - piece.offset == first->tensor.storage_offset() - first->offset;
  }
  if (first != nullptr && in_place) {
    const int64_t begin = first->tensor.storage_offset() - first->offset;
    const auto item_bytes = static_cast<int64_t>(first->tensor.element_size());
    if (begin >= 0 && (begin + numel) * item_bytes <= static_cast<int64_t>(first->tensor.storage().nbytes())) {
      return first->tensor.as_strided({numel}, {1}, begin);
    }
  }
  at::Tensor whole = at::zeros({numel}, options);
  for (const Piece& piece : pieces) whole.narrow(0, piece.offset, piece.tensor.numel()).copy_(piece.tensor);
  return whole;
}

}  // namespace

std::optional<StateParts> state_of(const torch::optim::Optimizer& optimizer, const Parameter& parameter) {
  const optim::Adapter* adapter = optim::adapter_of(optimizer);
  if (adapter == nullptr) return std::nullopt;
  std::optional<StateParts> result = state_of(optimizer, *adapter, *slices_of(parameter).front());
  if (!result) return result;
  const std::vector<Part> parts = parts_of(parameter);
  std::vector<StateParts> of_parts;
  for (const Part& part : parts) {
    std::optional<StateParts> state = state_of(optimizer, *adapter, *part.slice);
    if (!state) return std::nullopt;
    of_parts.push_back(*std::move(state));
  }
  for (size_t i = 0; i < result->tensors.size(); ++i) {
    at::Tensor& tensor = result->tensors[i].second;
    if (!is_cut(tensor)) continue;
    std::vector<Piece> pieces;
    for (size_t p = 0; p < parts.size(); ++p) {
      pieces.push_back({parts[p].in_shard, of_parts[p].tensors[i].second.narrow(0, parts[p].in_slice, parts[p].numel)});
    }
    tensor = assemble(pieces, parameter.shard_interval.numel(), tensor.options());
  }
  return result;
}

std::vector<SliceState> state_for_slices(const Run& run, const std::vector<StateParts>& members, const optim::Adapter& adapter) {
  std::vector<SliceState> result;
  for (const auto& slice : run.active()) {
    StateParts state;
    for (size_t i = 0; i < members.size(); ++i) {
      if (run.members[i] == slice->members.front()) state = members[i];  // scalars, keys, and what is one number
    }
    for (size_t t = 0; t < state.tensors.size(); ++t) {
      at::Tensor& tensor = state.tensors[t].second;
      if (!is_cut(tensor)) continue;
      std::vector<Piece> pieces;
      for (size_t i = 0; i < members.size(); ++i) {
        for (const Part& part : parts_of(*run.members[i])) {
          if (part.slice == slice.get()) {
            pieces.push_back({part.in_slice, members[i].tensors[t].second.narrow(0, part.in_shard, part.numel)});
          }
        }
      }
      tensor = assemble(pieces, slice->numel(), tensor.options());
    }
    result.emplace_back(slice.get(), adapter.put_together(state));
  }
  return result;
}

void split_state(Run& run, const Optimizers& optimizers) {
  if (!is_alive(run)) return;
  for (const int index : run.optimizers) {
    torch::optim::Optimizer& optimizer = *optimizers[index];
    const optim::Adapter& adapter = *optim::adapter_of(optimizer);
    StateMap& states = optimizer.state();
    for (const auto& single : run.single) {
      // An empty single slice may belong to any piece: they have one count.
      const auto piece = std::find_if(run.joined.begin(), run.joined.end(), [&](const auto& candidate) {
        return single->numel() == 0 || (candidate->begin <= single->begin && single->end <= candidate->end);
      });
      std::optional<StateParts> state = state_of(optimizer, adapter, **piece);
      if (!state) continue;
      const int64_t first = single->numel() == 0 ? 0 : single->begin - (*piece)->begin;
      for (auto& [key, tensor] : state->tensors) {
        if (is_cut(tensor)) tensor = tensor.narrow(0, first, single->numel());
      }
      states[key_of(*single)] = adapter.put_together(*state);
    }
    for (const auto& slice : run.joined) states.erase(key_of(*slice));
  }
}

bool join_state(Run& run, const Optimizers& optimizers) {
  if (!is_alive(run)) return true;
  std::vector<std::vector<StateParts>> of_optimizers;
  for (const int index : run.optimizers) {
    const torch::optim::Optimizer& optimizer = *optimizers[index];
    std::vector<StateParts>& states = of_optimizers.emplace_back();
    size_t without = 0;
    for (const auto& single : run.single) {
      std::optional<StateParts> state = state_of(optimizer, *optim::adapter_of(optimizer), *single);
      if (!state) {
        ++without;
        continue;
      }
      states.push_back(*std::move(state));
      if (!same_kind(states.front(), states.back())) return false;
    }
    if (without > 0 && without < run.single.size()) return false;
  }
  for (size_t k = 0; k < run.optimizers.size(); ++k) {
    if (of_optimizers[k].empty()) continue;
    torch::optim::Optimizer& optimizer = *optimizers[run.optimizers[k]];
    const optim::Adapter& adapter = *optim::adapter_of(optimizer);
    StateMap& states = optimizer.state();
    for (const auto& slice : run.joined) {
      StateParts state = of_optimizers[k].front();
      for (size_t t = 0; t < state.tensors.size(); ++t) {
        std::vector<Piece> pieces;
        for (size_t s = 0; s < run.single.size(); ++s) {
          const Slice& single = *run.single[s];
          if (single.numel() == 0 || single.begin < slice->begin || single.end > slice->end) continue;
          pieces.push_back({single.begin - slice->begin, of_optimizers[k][s].tensors[t].second});
        }
        at::Tensor& tensor = state.tensors[t].second;
        tensor = assemble(pieces, slice->numel(), tensor.options());
      }
      states[key_of(*slice)] = adapter.put_together(state);
    }
    for (const auto& single : run.single) states.erase(key_of(*single));
  }
  return true;
}

}  // namespace rebind::runtime
