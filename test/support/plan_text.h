// Plans as short strings, so that a test reads as a table, and a model that is nothing but its parameters.
//
//   Bag model({{"weight", {3, 7}}, {"bias", {3}}});
//   torch::optim::SGD sgd(model.parameters(), 0.1);
//   CHECK(shards(model, sgd, /*rank=*/0, /*world_size=*/2) == "weight [0,16)  bias -");
//
// A plan that is refused reads as its status: "UNIMPLEMENTED: plan_fsdp, rank 0: ...".
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <absl/status/statusor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "rebind/plan.h"

namespace rebind::test {

// Its parameters are ones.
struct Bag : torch::nn::Module {
  Bag() = default;
  explicit Bag(std::initializer_list<std::pair<const char*, std::vector<int64_t>>> shapes, at::ScalarType dtype = at::kFloat) {
    for (const auto& [name, shape] : shapes) register_parameter(name, at::ones(shape, dtype));
  }
  at::Tensor& operator[](const std::string& name) { return parameters_[name]; }
};

// A tensor that has sizes and no memory: any look at an element of it is a crash.
inline at::Tensor without_memory(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  at::Tensor tensor = at::empty({0}, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

template <class Render>
std::string render(const absl::StatusOr<FsdpPlan>& plan, Render&& text_of) {
  return plan.ok() ? text_of(*plan) : plan.status().ToString();
}

inline std::string joined(const std::vector<std::string>& texts, const std::string& separator) {
  std::string text;
  for (const std::string& part : texts) text += (text.empty() ? "" : separator) + part;
  return text;
}

inline std::string shards_text(const FsdpPlan& plan) {
  std::vector<std::string> texts;
  for (const ParameterPlan& p : plan.parameters) {
    const auto [begin, end] = p.shard;
    texts.push_back(p.names.front() + (begin == end ? " -" : " [" + std::to_string(begin) + "," + std::to_string(end) + ")"));
  }
  return joined(texts, "  ");
}

// "weight [0,16)  bias -": what `rank` owns of each parameter.
inline std::string shards(torch::nn::Module& model, torch::optim::Optimizer& optimizer, int rank, int world_size,
                          const FsdpOptions& options = {}) {
  return render(plan_fsdp(model, {&optimizer}, rank, world_size, options), shards_text);
}

// "<root>: weight@0 bias@24 of 32 | block: ...": the flat buffers in the order of the units.
inline std::string buffers_text(const FsdpPlan& plan) {
  std::vector<std::string> texts;
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      std::string text = unit.name + ":";
      for (const int p : buffer.parameters) {
        const ParameterPlan& entry = plan.parameters[static_cast<size_t>(p)];
        text += " " + entry.names.front() + "@" + std::to_string(entry.offset);
      }
      texts.push_back(text + " of " + std::to_string(buffer.padded_numel));
    }
  }
  return joined(texts, " | ");
}

// "<root>: weight bias | block: ...": what is gathered together, in the order of the buffers.
inline std::string units_text(const FsdpPlan& plan) {
  std::vector<std::string> texts;
  for (const UnitPlan& unit : plan.units) {
    std::string text = unit.name + ":";
    for (const BufferPlan& buffer : unit.buffers) {
      for (const int p : buffer.parameters) text += " " + plan.parameters[static_cast<size_t>(p)].names.front();
    }
    texts.push_back(text);
  }
  return joined(texts, " | ");
}

inline std::string holders_text(const std::vector<Holder>& holders) {
  std::vector<std::string> texts;
  for (const auto& [optimizer, group, index] : holders) {
    texts.push_back(std::to_string(optimizer) + "." + std::to_string(group) + "[" + std::to_string(index) + "]");
  }
  return texts.empty() ? "-" : joined(texts, " ");
}

// "weight=tied 0.0[0]  bias -": all names of each parameter and where optimizers hold it.
inline std::string census_text(const FsdpPlan& plan) {
  std::vector<std::string> texts;
  for (const ParameterPlan& p : plan.parameters) texts.push_back(joined(p.names, "=") + " " + holders_text(p.holders));
  return joined(texts, "  ");
}

}  // namespace rebind::test
