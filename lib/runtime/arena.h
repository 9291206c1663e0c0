// A fixed amount of memory that is handed out in blocks and used again.
//
//   Arena arena(capacity);
//   Arena::Block block = arena.allocate(bytes);      // empty if there is no gap of that size
//   Arena::Block other = Arena::outside(bytes);      // from the allocator, for what does not fit
//
// Fresh memory costs a page fault every 4 KiB, ten times what writing it costs; gathered parameters and reduction buffers come and
// go every step. The capacity is also the bound on what may be gathered at a time. First fit; a few blocks at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>

namespace rebind::runtime {

class Arena {
 public:
  // Owns its bytes. The arena outlives it.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept;
    ~Block() { reset(); }

    explicit operator bool() const { return data_ != nullptr; }
    char* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    void reset();

   private:
    friend class Arena;
    char* data_ = nullptr;
    int64_t bytes_ = 0;
    Arena* arena_ = nullptr;  // null: `memory_` is its own
    at::Tensor memory_;
  };

  explicit Arena(int64_t capacity) : capacity_(rounded(capacity)) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int64_t capacity() const { return capacity_; }
  // What a block of `bytes` takes of the capacity.
  static int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // The memory itself is allocated with the first block. At least one byte.
  Block allocate(int64_t bytes);
  static Block outside(int64_t bytes);

 private:
  static constexpr int64_t kAlignment = 64;

  const int64_t capacity_;
  at::Tensor memory_;
  std::map<int64_t, int64_t> used_;  // begin, end
};

}  // namespace rebind::runtime
