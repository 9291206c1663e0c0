#include "lib/base/error.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <c10/util/Exception.h>

namespace rebind {

std::string error_text(const Where& where, std::string_view what, std::string_view remedy) {
  std::string text = where.call;
  if (where.rank >= 0) absl::StrAppend(&text, text.empty() ? "rank " : ", rank ", where.rank);
  if (!text.empty()) text += ": ";

  std::string place;
  if (where.optimizer_index >= 0) {
    if (!where.optimizer.empty()) absl::StrAppend(&place, where.optimizer, ", ");
    absl::StrAppend(&place, "optimizers[", where.optimizer_index, "]");
    if (where.group >= 0) absl::StrAppend(&place, ", group ", where.group);
    if (where.index >= 0) absl::StrAppend(&place, ", params()[", where.index, "]");
  }
  std::vector<std::string> parts;
  if (!where.unit.empty()) parts.push_back(absl::StrCat("unit '", where.unit, "'"));
  if (!where.parameter.empty()) {
    parts.push_back(absl::StrCat("parameter '", where.parameter, "'", place.empty() ? "" : absl::StrCat(" (", place, ")")));
  } else if (!place.empty()) {
    parts.push_back(place);
  }
  if (!parts.empty()) absl::StrAppend(&text, absl::StrJoin(parts, ", "), ": ");

  absl::StrAppend(&text, absl::string_view(what.data(), what.size()), ".");
  if (!remedy.empty()) absl::StrAppend(&text, " ", absl::string_view(remedy.data(), remedy.size()), ".");
  return text;
}

absl::Status error(absl::StatusCode code, const Where& where, std::string_view what, std::string_view remedy) {
  return absl::Status(code, error_text(where, what, remedy));
}

void throw_error(const Where& where, std::string_view what, std::string_view remedy) {
  throw c10::Error(error_text(where, what, remedy), /*backtrace=*/nullptr);
}

std::string shape_text(const std::vector<int64_t>& sizes) { return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]"); }

}  // namespace rebind
