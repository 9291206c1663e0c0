// What ranks tell each other before any data moves: which collective this is. See "Note: Identity" in communicator.h.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "lib/comm/communicator.h"

namespace rebind::comm {

// Sent as it lies in memory; all ranks run the same program on the same kind of machine (another byte order fails on `magic`).
struct Header {
  static constexpr uint64_t kMagic = 0x726562696e643031;  // "rebind01": the version of this layout
  static constexpr int kInlineWords = 16;
  static constexpr int kNameBytes = 64;

  uint64_t magic = kMagic;
  uint64_t position = 0;
  uint64_t kind = 0, unit = 0, epoch = 0;
  uint64_t bytes = 0;         // of one part
  uint64_t element_type = 0;  // at::ScalarType of what is summed
  uint64_t word_count = 0;    // payload words; more than kInlineWords follow as data
  uint64_t words[kInlineWords] = {};
  char name[kNameBytes] = {};  // for messages; cut, zero-terminated
};
static_assert(sizeof(Header) == 256 && std::is_trivially_copyable_v<Header>);

Header make_header(const Identity& identity, uint64_t position, int64_t bytes, c10::ScalarType element_type, uint64_t word_count);

// Whether two ranks are in the same collective: everything but words and name.
bool same_collective(const Header& a, const Header& b);

// "all_gather for unit 'block.3'"
std::string call_text(uint64_t kind, const std::string& name);
// "all_gather for unit 'block.3' (collective 17, unit index 3, epoch 5, 4096 bytes a part)"
std::string in_words(const Header& header);

}  // namespace rebind::comm
