#include <nlohmann/json.hpp>

#include "lib/plan/text.h"
#include "rebind/plan.h"

namespace rebind {
namespace {

using nlohmann::ordered_json;

ordered_json json_of(const BufferPlan& buffer) {
  return {{"dtype", plan::dtype_text(buffer.dtype)}, {"requires_grad", buffer.requires_grad},
          {"parameters", buffer.parameters},         {"numel", buffer.numel},
          {"padded_numel", buffer.padded_numel},     {"shard_numel", buffer.shard_numel}};
}

ordered_json json_of(const UnitPlan& unit) {
  ordered_json buffers = ordered_json::array();
  for (const BufferPlan& buffer : unit.buffers) buffers.push_back(json_of(buffer));
  return {{"name", unit.name}, {"buffers", std::move(buffers)}};
}

ordered_json json_of(const ParameterPlan& parameter) {
  ordered_json holders = ordered_json::array();
  for (const Holder& holder : parameter.holders) {
    holders.push_back({{"optimizer", holder.optimizer}, {"group", holder.group}, {"index", holder.index}});
  }
  return {{"names", parameter.names},
          {"model", parameter.model},
          {"sizes", parameter.sizes},
          {"strides", parameter.strides},
          {"dtype", plan::dtype_text(parameter.dtype)},
          {"requires_grad", parameter.requires_grad},
          {"unit", parameter.unit},
          {"buffer", parameter.buffer},
          {"offset", parameter.offset},
          {"shard", {parameter.shard.begin, parameter.shard.end}},
          {"holders", std::move(holders)}};
}

ordered_json json_of(const MemoryForecast& memory) {
  return {{"parameter_bytes", memory.parameter_bytes},
          {"gradient_bytes", memory.gradient_bytes},
          {"state_bytes", memory.state_bytes},
          {"peak_gathered_bytes", memory.peak_gathered_bytes},
          {"prepare_peak_bytes", memory.prepare_peak_bytes}};
}

}  // namespace

std::string FsdpPlan::to_json() const {
  ordered_json json = {
      {"rank", rank}, {"world_size", world_size}, {"units", ordered_json::array()}, {"parameters", ordered_json::array()}};
  for (const UnitPlan& unit : units) json["units"].push_back(json_of(unit));
  for (const ParameterPlan& parameter : parameters) json["parameters"].push_back(json_of(parameter));
  json["memory"] = json_of(memory);
  json["notes"] = notes;
  json["groups"] = groups;
  // Names are the user's: whatever is not UTF-8 in them is replaced, not thrown.
  return json.dump(/*indent=*/2, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
}

}  // namespace rebind
