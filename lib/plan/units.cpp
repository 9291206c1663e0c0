#include "lib/plan/units.h"

#include <algorithm>
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

bool is_tiny(int64_t numel, int64_t model_numel) { return numel < kTinyNumel && numel < model_numel / kTinyShare; }

// "a.b" of "a.b.weight"
std::string parent_of(std::string path) {
  const size_t dot = path.rfind('.');
  path.resize(dot == std::string::npos ? 0 : dot);
  return path;
}

bool is_below(const std::string& path, const std::string& module) {
  return module.empty() || (path.size() > module.size() && path.starts_with(module) && path[module.size()] == '.');
}

Paths chosen_modules(const torch::nn::Module& model, const UnitPolicy::Predicate& predicate) {
  Paths chosen;
  walk(model, "", [&](const torch::nn::Module& module, const std::string& path) {
    if (predicate(path, module)) chosen.insert(path);
  });
  return chosen;
}

// Finds repeated blocks. Two modules repeat each other if they are of one type and everything below them has the same names,
// shapes, dtypes and types.
class BlockFinder {
 public:
  BlockFinder(const torch::nn::Module& model, int64_t model_numel) : model_numel_(model_numel) {
    measure(model, "");
    choose(model, "");
  }
  Paths take() { return std::move(blocks_); }

 private:
  struct Content {
    int signature = 0;  // equal numbers for equal parameters below; 0 for none at all
    int64_t numel = 0;
  };

  Content measure(const torch::nn::Module& module, const std::string& path) {
    std::string text;
    Content content;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = item.value();
      absl::StrAppend(&text, item.key(), ":", static_cast<int>(tensor.scalar_type()), shape_text(tensor.sizes().vec()), ";");
      content.numel += tensor.numel();
    }
    for (const auto& child : module.named_children()) {
      const Content below = measure(*child.value(), join_path(path, child.key()));
      if (below.signature != 0) absl::StrAppend(&text, child.key(), "=", below.signature, ";");
      content.numel += below.numel;
    }
    if (!text.empty()) {
      text.insert(0, absl::StrCat(typeid(module).name(), " "));  // an embedding is no repetition of a head of the same shape
      content.signature = numbers_.emplace(text, static_cast<int>(numbers_.size()) + 1).first->second;
    }
    contents_[path] = content;
    return content;
  }

  // A block is not searched for blocks: the outermost container wins.
  void choose(const torch::nn::Module& module, const std::string& path) {
    const auto children = module.named_children();
    std::unordered_map<int, int> count;
    for (const auto& child : children) ++count[contents_.at(join_path(path, child.key())).signature];
    for (const auto& child : children) {
      const std::string child_path = join_path(path, child.key());
      const Content& content = contents_.at(child_path);
      if (count.at(content.signature) == 1) {
        choose(*child.value(), child_path);
      } else if (!is_tiny(content.numel, model_numel_)) {
        blocks_.insert(child_path);
      }
    }
  }

  const int64_t model_numel_;
  std::unordered_map<std::string, int> numbers_;       // by what a module holds
  std::unordered_map<std::string, Content> contents_;  // by path
  Paths blocks_;
};

// The nearest chosen module at or above `path`; "" is the model itself, which takes what is left.
std::string owner_of(std::string path, const Paths& units) {
  while (!path.empty() && !units.contains(path)) path = parent_of(std::move(path));
  return path;
}

// The units of one model's parameters, which stand side by side in the census.
class ModelUnits {
 public:
  ModelUnits(const Census& census, size_t model, const std::vector<size_t>& members) : prefix_(prefix_of(census, model)) {
    for (const size_t p : members) {
      const CensusParameter& parameter = census.parameters[p];
      paths_.push_back(parameter.names.front().substr(prefix_.empty() ? 0 : prefix_.size() + 1));
      numels_.push_back(parameter.tensor.numel());
      total_ += numels_.back();
    }
    unit_of_.assign(members.size(), kNone);
  }

  int64_t total() const { return total_; }

  void one_unit(const std::string& name) { std::fill(unit_of_.begin(), unit_of_.end(), new_unit(rooted(name))); }

  void by_size(int64_t min_numel) { cut(0, paths_.size(), min_numel); }

  void by_modules(const Paths& modules) {
    give_to(modules);
    const int rest = new_unit(rooted("<root>"));
    std::replace(unit_of_.begin(), unit_of_.end(), kNone, rest);
  }

  void automatic(const Paths& blocks) {
    give_to(blocks);
    const std::vector<std::pair<size_t, size_t>> stretches = rest();
    int64_t rest_numel = 0;
    for (const auto& [begin, end] : stretches) rest_numel += numel_of(begin, end);
    if (rest_numel < kSmallRestNumel && !is_tiny(rest_numel, total_)) {
      const int root = new_unit(rooted("<root>"));
      std::replace(unit_of_.begin(), unit_of_.end(), kNone, root);
      return;
    }
    for (const auto& [begin, end] : stretches) {
      if (!is_tiny(numel_of(begin, end), total_)) cut(begin, end, kPieceNumel);
    }
    join_the_rest();
  }

  // Appends to the whole assignment: units in the order of their first parameter.
  void append_to(UnitAssignment& assignment, const std::vector<size_t>& members) const {
    std::vector<int> final_index(names_.size(), kNone);
    for (size_t i = 0; i < members.size(); ++i) {
      int& index = final_index[static_cast<size_t>(unit_of_[i])];
      if (index == kNone) {
        index = static_cast<int>(assignment.names.size());
        assignment.names.push_back(names_[static_cast<size_t>(unit_of_[i])]);
      }
      assignment.unit_of[members[i]] = index;
    }
  }

 private:
  static constexpr int kNone = -1;

  static std::string prefix_of(const Census& census, size_t model) {
    return census.models.size() > 1 ? census.models[model].name : "";
  }

  // The name of what is named `name` in a single model.
  std::string rooted(const std::string& name) const { return prefix_.empty() ? name : prefix_; }

  int new_unit(std::string name) {
    names_.push_back(std::move(name));
    return static_cast<int>(names_.size()) - 1;
  }

  int64_t numel_of(size_t begin, size_t end) const {
    int64_t numel = 0;
    for (size_t i = begin; i < end; ++i) numel += numels_[i];
    return numel;
  }

  // Each module in `modules` becomes a unit; "" is left to the caller.
  void give_to(const Paths& modules) {
    std::unordered_map<std::string, int> index;
    for (size_t i = 0; i < paths_.size(); ++i) {
      const std::string owner = owner_of(parent_of(paths_[i]), modules);
      if (owner.empty()) continue;
      const auto [found, is_new] = index.emplace(owner, static_cast<int>(names_.size()));
      if (is_new) new_unit(join_path(prefix_, owner));
      unit_of_[i] = found->second;
    }
  }

  // [begin, end) of neighbours that have no unit yet.
  std::vector<std::pair<size_t, size_t>> rest() const {
    std::vector<std::pair<size_t, size_t>> stretches;
    for (size_t i = 0; i < unit_of_.size(); ++i) {
      if (unit_of_[i] != kNone) continue;
      if (stretches.empty() || stretches.back().second != i) stretches.emplace_back(i, i);
      stretches.back().second = i + 1;
    }
    return stretches;
  }

  // Cuts [begin, end) into units of at least `min_numel`, if there are that many.
  void cut(size_t begin, size_t end, int64_t min_numel) {
    std::vector<size_t> starts = {begin};
    int64_t numel = 0, largest = 0;  // of the piece; of its last module
    for (size_t i = begin; i < end; ++i) {
      const bool same_module = i > starts.back() && parent_of(paths_[i]) == parent_of(paths_[i - 1]);
      if (!same_module) largest = 0;
      const bool sticks = same_module && numels_[i] <= largest / 8;
      if (i > begin && numel >= min_numel && !sticks) {
        starts.push_back(i);
        numel = largest = 0;
      }
      numel += numels_[i];
      largest = std::max(largest, numels_[i]);
    }
    if (starts.size() > 1 && numel < min_numel) starts.pop_back();
    starts.push_back(end);
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      const int unit = new_unit(name_of(starts[s], starts[s + 1]));
      std::fill(unit_of_.begin() + static_cast<int64_t>(starts[s]), unit_of_.begin() + static_cast<int64_t>(starts[s + 1]), unit);
    }
  }

  std::string name_of(size_t begin, size_t end) const {
    std::string module = parent_of(paths_[begin]);
    while (!is_below(paths_[end - 1], module)) module = parent_of(module);
    const bool all =
        (begin == 0 || !is_below(paths_[begin - 1], module)) && (end == paths_.size() || !is_below(paths_[end], module));
    if (all) return module.empty() ? rooted("<root>") : join_path(prefix_, module);
    std::string first = paths_[begin], last = paths_[end - 1];
    if (end - begin == 1) return join_path(prefix_, first);
    if (parent_of(first) != parent_of(last)) {  // whose parameters are named by their module, unless they are the model's own
      if (const std::string parent = parent_of(first); !parent.empty()) first = parent;
      if (const std::string parent = parent_of(last); !parent.empty()) last = parent;
    }
    return join_path(prefix_, absl::StrCat(first, "..", last));
  }

  // What is too small for a unit goes with its neighbour before, at the beginning with the one after.
  void join_the_rest() {
    for (size_t i = 1; i < unit_of_.size(); ++i) {
      if (unit_of_[i] == kNone) unit_of_[i] = unit_of_[i - 1];
    }
    for (size_t i = unit_of_.size() - 1; i > 0; --i) {
      if (unit_of_[i - 1] == kNone) unit_of_[i - 1] = unit_of_[i];
    }
  }

  const std::string prefix_;        // the model's name, if there are several
  std::vector<std::string> paths_;  // of the parameters within the model
  std::vector<int64_t> numels_;
  int64_t total_ = 0;
  std::vector<int> unit_of_;
  std::vector<std::string> names_;
};

void assign(const torch::nn::Module& model, const UnitPolicy& policy, ModelUnits& units) {
  switch (policy.kind()) {
    case UnitPolicy::Kind::kAutomatic: return units.automatic(BlockFinder(model, units.total()).take());
    case UnitPolicy::Kind::kBySize: return units.by_size(policy.min_numel());
    case UnitPolicy::Kind::kByModule: return units.by_modules(chosen_modules(model, policy.predicate()));
    case UnitPolicy::Kind::kWholeModel: return units.one_unit("model");
  }
}

}  // namespace

absl::StatusOr<UnitAssignment> assign_units(const Census& census, const UnitPolicy& policy, const Where& where) {
  std::vector<std::vector<size_t>> members(census.models.size());
  for (size_t p = 0; p < census.parameters.size(); ++p) members[static_cast<size_t>(census.parameters[p].model)].push_back(p);
  UnitAssignment assignment;
  assignment.unit_of.resize(census.parameters.size());
  for (size_t m = 0; m < census.models.size(); ++m) {
    if (members[m].empty()) continue;  // all of it is shared with models before it
    ModelUnits units(census, m, members[m]);
    try {
      assign(*census.models[m].module, policy, units);
    } catch (const std::exception& thrown) {
      return error(absl::StatusCode::kInvalidArgument, where,
                   absl::StrCat("options.unit_policy's predicate threw: ", thrown.what()),
                   "Give by_module a function that does not throw");
    }
    units.append_to(assignment, members[m]);
  }
  return assignment;
}

}  // namespace rebind::plan
