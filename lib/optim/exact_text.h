// The shortest text that reads back as exactly this number: 0.1 and the next double after it differ.
#pragma once

#include <charconv>
#include <string>

namespace rebind::optim {

inline std::string exact_text(double value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

}  // namespace rebind::optim
