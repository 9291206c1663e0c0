#include "lib/plan/text.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include <absl/strings/str_cat.h>

namespace rebind::plan {

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kBool: return "bool";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(dtype);
  }
}

std::string count_text(int64_t count) {
  std::string text = std::to_string(count);
  const int64_t first = text.front() == '-' ? 1 : 0;
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > first; at -= 3) text.insert(static_cast<size_t>(at), ",");
  return text;
}

std::string count_text(int64_t count, const std::string& noun) {
  return absl::StrCat(count_text(count), " ", noun, count == 1 ? "" : "s");
}

std::string bytes_text(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", value, kUnits[unit]);
  return text;
}

std::string interval_text(int64_t begin, int64_t end) { return begin == end ? "-" : absl::StrCat("[", begin, ", ", end, ")"); }

std::string some_of(const std::vector<std::string>& names, size_t shown) {
  std::string text;
  const size_t last = std::min(shown, names.size());
  for (size_t i = 0; i < last; ++i) absl::StrAppend(&text, i == 0 ? "" : ", ", "'", names[i], "'");
  if (names.size() > last) absl::StrAppend(&text, " and ", count_text(static_cast<int64_t>(names.size() - last)), " more");
  return text;
}

}  // namespace rebind::plan
