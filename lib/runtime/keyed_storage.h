// The memory behind every tensor that rebind hands out: it knows which parameter it belongs to and can be taken away.
//
// In: a parameter's record, a role, a size. Out: a StorageImpl with which LibTorch works as with any other, that
//   - is found again from any tensor over it (views, detach(), data() share it), by KeyedStorage::of
//   - while hidden has no memory and makes every raw access throw an error with the parameter's name
//   - tells the runtime when the last tensor over it is gone (that is how zero_grad is noticed: it calls no operator)
// It must not know how memory is gathered.
//
// Note: One storage per parameter. Windows of one unit lie in one gathered buffer, yet each has a StorageImpl of its own whose
// pointer goes into that buffer. So a raw access can name the parameter, a view cannot reach its neighbours or the padding,
// torch::save of a shard writes the shard and not the whole buffer, and zero_grad of one parameter is seen alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>

namespace rebind::runtime {

class Sharding;
struct Parameter;
struct Slice;

enum class Role : uint8_t {
  kWindow,         // a model parameter on its unit's gathered parameters; hidden unless an operator runs
  kFacade,         // its .grad, on the unit's gathered gradients; hidden unless an operator runs
  kShard,          // a slice of the flat shard, which the optimizer holds
  kShardGradient,  // the .grad of that; hidden until it is reduced
  kInterrupted,    // stands for a gradient that may not be used; always hidden, of no parameter
};

class KeyedStorage final : public c10::StorageImpl {
 public:
  // Hidden, with the size of `nbytes`. A window keeps its sharding alive, the others do not.
  KeyedStorage(Role role, Parameter& parameter, const std::shared_ptr<Sharding>& sharding, int64_t nbytes,
               const std::string& message);
  KeyedStorage(Role role, Slice& slice, const std::shared_ptr<Sharding>& sharding, int64_t nbytes, const std::string& message);
  KeyedStorage(int64_t nbytes, const std::string& message);  // kInterrupted
  ~KeyedStorage() override { tell_released(); }

  // The storage behind `tensor` if it is one of ours, else null.
  static KeyedStorage* of(const c10::TensorImpl& tensor);
  static KeyedStorage* of(const at::Tensor& tensor) { return of(*tensor.unsafeGetTensorImpl()); }

  Role role() const { return role_; }
  // Valid while lock() is not null. Of a slice the first parameter in it.
  Parameter& parameter() const { return *parameter_; }
  Slice& slice() const { return *slice_; }  // of kShard and kShardGradient
  std::shared_ptr<Sharding> lock() const { return strong_ ? strong_ : weak_.lock(); }
  Sharding* kept() const { return strong_.get(); }  // of a window: it lives as long as this storage

  // Raw accesses reach `memory`, which outlives the next hide(), or `keep_alive` holds it.
  void expose(void* memory, std::shared_ptr<void> keep_alive = nullptr);
  void hide();
  bool hidden() const { return hidden_; }
  // While hidden: the error of a raw access.
  void throw_message() const { data(); }

  // Operators running on it; exposed while there are any. Guarded by the sharding's mutex.
  int pins = 0;

  // Called instead of the destructor while weak references are left.
  void release_resources() override;

 private:
  void tell_released();

  const Role role_;
  Parameter* const parameter_;
  Slice* const slice_ = nullptr;
  std::shared_ptr<Sharding> strong_;
  std::weak_ptr<Sharding> weak_;
  bool hidden_ = true;
};

// A leaf tensor over `storage`, with the key that makes operators call the touch fallback.
at::Tensor make_keyed_tensor(c10::intrusive_ptr<KeyedStorage> storage, at::ScalarType dtype, at::IntArrayRef sizes,
                             at::IntArrayRef strides);

// Shaped like `tensor`; any use throws `message`.
at::Tensor make_interrupted(const at::Tensor& tensor, const std::string& message);

// The key on all of them. LibTorch reserves it for out-of-tree libraries and has no kernels for it.
constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::Fake;

}  // namespace rebind::runtime
