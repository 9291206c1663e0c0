#include "lib/comm/host_list.h"

namespace rebind::comm {

std::optional<std::string> first_host(std::string_view list) {
  constexpr std::string_view kDigits = "0123456789";
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ',';) {
    if (list[at] == ']' || list[at] == ' ') return std::nullopt;
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const size_t close = list.find(']', at);
    if (close == std::string_view::npos) return std::nullopt;
    const std::string_view inside = list.substr(at + 1, close - at - 1);
    const std::string_view first = inside.substr(0, inside.find_first_of(",-"));
    if (first.empty() || inside.find_first_not_of("0123456789,-") != std::string_view::npos) return std::nullopt;
    if (kDigits.find(inside.back()) == std::string_view::npos) return std::nullopt;
    host += first;  // leading zeros belong to the name
    at = close + 1;
  }
  if (host.empty()) return std::nullopt;
  return host;
}

}  // namespace rebind::comm
