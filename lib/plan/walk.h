// Visits a module and everything below it in the order of Module::named_parameters: itself, then its children, depth first. A
// module that is registered in two places is visited twice, under both paths.
//
// What named_parameters(false) and named_buffers(false) of a visited module list is defined: they leave out the rest.
// named_modules is no help here: it needs the root to be owned by a shared_ptr.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace rebind::plan {

inline std::string join_path(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

template <class Visitor>  // void(const torch::nn::Module&, const std::string& path)
void walk(const torch::nn::Module& module, const std::string& path, const Visitor& visit) {
  visit(module, path);
  for (const auto& child : module.named_children()) walk(*child.value(), join_path(path, child.key()), visit);
}

}  // namespace rebind::plan
