#include "lib/runtime/arena.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace rebind::runtime {
namespace {

at::Tensor bytes_from_allocator(int64_t bytes) { return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

Arena::Block& Arena::Block::operator=(Block&& other) noexcept {
  if (this == &other) return *this;
  reset();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  arena_ = std::exchange(other.arena_, nullptr);
  memory_ = std::move(other.memory_);
  return *this;
}

void Arena::Block::reset() {
  if (arena_ != nullptr) arena_->used_.erase(data_ - static_cast<char*>(arena_->memory_.data_ptr()));
  arena_ = nullptr;
  memory_.reset();
  data_ = nullptr;
  bytes_ = 0;
}

Arena::Block Arena::allocate(int64_t bytes) {
  const int64_t size = rounded(std::max<int64_t>(bytes, 1));
  int64_t begin = 0;
  for (const auto& [used_begin, used_end] : used_) {
    if (used_begin - begin >= size) break;
    begin = used_end;
  }
  Block block;
  if (capacity_ - begin < size) return block;
  if (!memory_.defined()) memory_ = bytes_from_allocator(capacity_);
  used_[begin] = begin + size;
  block.data_ = static_cast<char*>(memory_.data_ptr()) + begin;
  block.bytes_ = bytes;
  block.arena_ = this;
  return block;
}

Arena::Block Arena::outside(int64_t bytes) {
  Block block;
  block.memory_ = bytes_from_allocator(std::max<int64_t>(bytes, 1));
  block.data_ = static_cast<char*>(block.memory_.data_ptr());
  block.bytes_ = bytes;
  return block;
}

}  // namespace rebind::runtime
