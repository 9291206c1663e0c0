// How plans and messages spell dtypes, numbers, sizes in bytes and lists of names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace rebind::plan {

std::string dtype_text(at::ScalarType dtype);                    // "float32"
std::string count_text(int64_t count);                           // "1,048,576"
std::string count_text(int64_t count, const std::string& noun);  // "1 tensor", "2 tensors"
std::string bytes_text(int64_t bytes);                           // "512 B", "1.50 MiB"
std::string interval_text(int64_t begin, int64_t end);           // "[0, 16)", "-" if empty
// "'a', 'b', 'c' and 7 more"
std::string some_of(const std::vector<std::string>& names, size_t shown = 3);

}  // namespace rebind::plan
