#include "lib/runtime/operator_info.h"

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <absl/container/node_hash_map.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include <ATen/core/enum_tag.h>

namespace rebind::runtime {
namespace {

Special special_of(const c10::OperatorHandle& op, const std::string& full_name) {
  static const absl::flat_hash_map<std::string, Special> specials = {
      {"aten::add_.Tensor", Special::kAccumulate},
      {"aten::add.Tensor", Special::kAdd},
      {"aten::embedding_renorm_", Special::kRenorm},
      {"aten::mul_.Tensor", Special::kPointwiseScalar},
      {"aten::mul_.Scalar", Special::kPointwiseScalar},
      {"aten::div_.Tensor", Special::kPointwiseScalar},
      {"aten::div_.Scalar", Special::kPointwiseScalar},
      {"aten::zero_", Special::kPointwiseScalar},
      {"aten::fill_.Scalar", Special::kPointwiseScalar},
      {"aten::clamp_", Special::kPointwiseScalar},
      {"aten::norm.Scalar", Special::kNorm},
      {"aten::linalg_vector_norm", Special::kNorm},
      {"aten::abs", Special::kAbs},
      {"aten::resize_", Special::kReplace},
      {"aten::resize_as_", Special::kReplace},
  };
  if (auto found = specials.find(full_name); found != specials.end()) return found->second;
  if (absl::StartsWith(full_name, "aten::set_")) return Special::kReplace;
  // detach_ of a leaf changes nothing that concerns us.
  if (op.hasTag(at::Tag::inplace_view) && full_name != "aten::detach_") return Special::kReplace;
  return Special::kNone;
}

// Reductions and orderings without at::Tag::reduction (fact 42).
bool is_untagged_reduction(const std::string& name) {
  static const absl::flat_hash_set<std::string> names = {
      "aten::dot",  "aten::vdot",  "aten::dist",    "aten::median",   "aten::nanmedian", "aten::mode",    "aten::kthvalue",
      "aten::sort", "aten::topk",  "aten::argsort", "aten::cumsum",   "aten::cumprod",   "aten::softmax", "aten::_softmax",
      "aten::mm",   "aten::equal", "aten::_foreach_norm", "aten::logcumsumexp", "aten::count_nonzero"};
  return names.contains(name);
}

OperatorInfo read(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OperatorInfo info;
  info.name = schema.name();
  info.arguments = schema.arguments().size();
  for (size_t i = 0; i < info.arguments && i < 64; ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) info.writes |= uint64_t{1} << i;
  }
  info.is_aten = absl::StartsWith(info.name, "aten::");
  info.collective = absl::StartsWith(info.name, "c10d::") || absl::StartsWith(info.name, "_c10d_functional") ||
                    absl::StartsWith(info.name, "symm_mem::");
  const std::string full_name = schema.overload_name().empty() ? info.name : absl::StrCat(info.name, ".", schema.overload_name());
  info.special = special_of(op, full_name);
  info.reduction = op.hasTag(at::Tag::reduction) || is_untagged_reduction(info.name);
  return info;
}

}  // namespace

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  // One map a thread: no lock on the way of every operator. Schemas live as long as their operators.
  thread_local absl::node_hash_map<const c10::FunctionSchema*, OperatorInfo> known;
  const c10::FunctionSchema* key = &op.schema();
  if (auto found = known.find(key); found != known.end()) return found->second;
  return known.emplace(key, read(op)).first->second;
}

}  // namespace rebind::runtime
