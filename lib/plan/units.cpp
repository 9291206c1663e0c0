#include "lib/plan/units.h"

#include <exception>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include <absl/strings/str_cat.h>

#include "lib/plan/walk.h"

namespace rebind::plan {
namespace {

// Paths, within one model, of the modules that are a unit.
using Paths = std::unordered_set<std::string>;

Paths chosen_modules(const torch::nn::Module& model, const UnitPolicy::Predicate& predicate) {
  Paths chosen;
  walk(model, "", [&](const torch::nn::Module& module, const std::string& path) {
    if (predicate(path, module)) chosen.insert(path);
  });
  return chosen;
}

// Finds repeated blocks. Two modules repeat each other if they are of one type and everything below them
// has the same names, shapes, dtypes and types.
class BlockFinder {
 public:
  explicit BlockFinder(const torch::nn::Module& model) {
    signature_of(model, "");
    choose(model, "");
  }
  const Paths& blocks() const { return blocks_; }

 private:
  // Equal numbers for equal parameters below; 0 for none at all.
  int signature_of(const torch::nn::Module& module, const std::string& path) {
    std::string text;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      absl::StrAppend(&text, item.key(), ":", static_cast<int>(item.value().scalar_type()), shape_text(item.value().sizes().vec()),
                      ";");
    }
    for (const auto& child : module.named_children()) {
      const int signature = signature_of(*child.value(), join_path(path, child.key()));
      if (signature != 0) absl::StrAppend(&text, child.key(), "=", signature, ";");
    }
    if (text.empty()) {
      signatures_[path] = 0;
      return 0;
    }
    text.insert(0, absl::StrCat(typeid(module).name(), " "));  // an embedding is no repetition of a head of the same shape
    const int signature = numbers_.emplace(text, static_cast<int>(numbers_.size()) + 1).first->second;
    signatures_[path] = signature;
    return signature;
  }

  // A block is not searched for blocks: the outermost container wins.
  void choose(const torch::nn::Module& module, const std::string& path) {
    const auto children = module.named_children();
    std::unordered_map<int, int> count;
    for (const auto& child : children) ++count[signatures_.at(join_path(path, child.key()))];
    for (const auto& child : children) {
      const std::string child_path = join_path(path, child.key());
      const int signature = signatures_.at(child_path);
      if (count.at(signature) > 1) {
        blocks_.insert(child_path);
      } else {
        choose(*child.value(), child_path);
      }
    }
  }

  std::unordered_map<std::string, int> numbers_;     // by what a module holds
  std::unordered_map<std::string, int> signatures_;  // by path
  Paths blocks_;
};

Paths unit_modules(const torch::nn::Module& model, const UnitPolicy& policy) {
  switch (policy.kind()) {
    case UnitPolicy::Kind::kAutomatic: return BlockFinder(model).blocks();
    case UnitPolicy::Kind::kByModule: return chosen_modules(model, policy.predicate());
    default: return {};
  }
}

// The nearest chosen module at or above `path`; "" is the model itself, whose unit takes what is left.
std::string owner_of(std::string path, const Paths& units) {
  while (!path.empty() && !units.contains(path)) {
    const size_t dot = path.rfind('.');
    path.resize(dot == std::string::npos ? 0 : dot);
  }
  return path;
}

std::string unit_name(const Census& census, int model, const std::string& owner, UnitPolicy::Kind kind) {
  if (census.models.size() > 1) {
    const std::string& name = census.models[static_cast<size_t>(model)].name;
    return owner.empty() ? name : join_path(name, owner);
  }
  if (!owner.empty()) return owner;
  return kind == UnitPolicy::Kind::kWholeModel ? "model" : "<root>";
}

}  // namespace

absl::StatusOr<UnitAssignment> assign_units(const Census& census, const UnitPolicy& policy, const Where& where) {
  UnitAssignment assignment;
  std::unordered_map<std::string, int> index;  // by the unit's name, which is unique: paths are, and models' names have no dot
  std::vector<Paths> units;
  for (const NamedModule& model : census.models) {
    try {
      units.push_back(unit_modules(*model.module, policy));
    } catch (const std::exception& thrown) {
      return error(absl::StatusCode::kInvalidArgument, where,
                   absl::StrCat("options.unit_policy's predicate threw: ", thrown.what()),
                   "Give by_module a function that does not throw");
    }
  }
  for (const CensusParameter& parameter : census.parameters) {
    const auto m = static_cast<size_t>(parameter.model);
    std::string path = parameter.names.front();
    if (census.models.size() > 1) path.erase(0, census.models[m].name.size() + 1);
    const size_t dot = path.rfind('.');
    path.resize(dot == std::string::npos ? 0 : dot);
    const std::string name = unit_name(census, parameter.model, owner_of(path, units[m]), policy.kind());
    const auto [found, is_new] = index.emplace(name, static_cast<int>(assignment.names.size()));
    if (is_new) assignment.names.push_back(name);
    assignment.unit_of.push_back(found->second);
  }
  return assignment;
}

}  // namespace rebind::plan
