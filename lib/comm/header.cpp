#include "lib/comm/header.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <cstring>

namespace rebind::comm {
namespace {

const char* kind_name(uint64_t kind) {
  switch (static_cast<Kind>(kind)) {
    case Kind::kAllGather: return "all_gather";
    case Kind::kReduceScatter: return "reduce_scatter";
    case Kind::kBroadcast: return "broadcast";
    case Kind::kExchange: return "exchange";
  }
  return "an unknown collective";
}

}  // namespace

Header make_header(const Identity& identity, uint64_t position, int64_t bytes, c10::ScalarType element_type, uint64_t word_count) {
  Header header;
  header.position = position;
  header.kind = static_cast<uint64_t>(identity.kind);
  header.unit = identity.unit;
  header.epoch = identity.epoch;
  header.bytes = static_cast<uint64_t>(bytes);
  header.element_type = static_cast<uint64_t>(element_type);
  header.word_count = word_count;
  std::memcpy(header.name, identity.name.data(), std::min<size_t>(identity.name.size(), Header::kNameBytes - 1));
  return header;
}

bool same_collective(const Header& a, const Header& b) {
  return a.magic == b.magic && a.position == b.position && a.kind == b.kind && a.unit == b.unit && a.epoch == b.epoch &&
         a.bytes == b.bytes && a.element_type == b.element_type && a.word_count == b.word_count;
}

std::string call_text(uint64_t kind, const std::string& name) {
  return name.empty() ? kind_name(kind) : absl::StrCat(kind_name(kind), " for ", name);
}

std::string in_words(const Header& header) {
  if (header.magic != Header::kMagic) return "a message of another program, or of another version of rebind";
  const std::string name(header.name, strnlen(header.name, Header::kNameBytes));
  std::string text = absl::StrCat(call_text(header.kind, name), " (collective ", header.position, ", unit index ", header.unit,
                                  ", epoch ", header.epoch, ", ", header.bytes, " bytes a part");
  if (header.kind == static_cast<uint64_t>(Kind::kReduceScatter)) {
    absl::StrAppend(&text, " of ", c10::toString(static_cast<c10::ScalarType>(header.element_type)));
  }
  if (header.word_count > 0) absl::StrAppend(&text, ", ", header.word_count, " words");
  return text + ")";
}

}  // namespace rebind::comm
