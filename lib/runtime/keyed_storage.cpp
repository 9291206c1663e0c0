#include "lib/runtime/keyed_storage.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include <typeinfo>

#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

// LibTorch can set the flag that makes raw accesses throw (release_data_and_set_meta_custom_data_ptr_error_msg_) but not clear it:
// the member is private. Explicit instantiation may name private members, so this gets hold of it. The only such place;
// "facts: a storage that throws on raw access can be made readable again" guards it.
using Flag = bool c10::StorageImpl::*;
Flag throw_flag();
template <Flag flag>
struct FlagAccess {
  friend Flag throw_flag() { return flag; }
};
template struct FlagAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void drop_keep_alive(void* context) { delete static_cast<std::shared_ptr<void>*>(context); }

}  // namespace

KeyedStorage::KeyedStorage(Role role, Parameter& parameter, const std::shared_ptr<Sharding>& sharding, int64_t nbytes,
                           const std::string& message)
    : c10::StorageImpl(use_byte_size_t(), nbytes, at::DataPtr(nullptr, at::Device(at::kCPU)), /*allocator=*/nullptr,
                       /*resizable=*/false),
      role_(role),
      parameter_(&parameter) {
  if (role == Role::kWindow) {
    strong_ = sharding;
  } else {
    weak_ = sharding;
  }
  release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

KeyedStorage::KeyedStorage(Role role, Slice& slice, const std::shared_ptr<Sharding>& sharding, int64_t nbytes,
                           const std::string& message)
    : c10::StorageImpl(use_byte_size_t(), nbytes, at::DataPtr(nullptr, at::Device(at::kCPU)), /*allocator=*/nullptr,
                       /*resizable=*/false),
      role_(role),
      parameter_(slice.members.front()),
      slice_(&slice),
      weak_(sharding) {
  release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

KeyedStorage::KeyedStorage(int64_t nbytes, const std::string& message)
    : c10::StorageImpl(use_byte_size_t(), nbytes, at::DataPtr(nullptr, at::Device(at::kCPU)), /*allocator=*/nullptr,
                       /*resizable=*/false),
      role_(Role::kInterrupted),
      parameter_(nullptr) {
  release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

KeyedStorage* KeyedStorage::of(const c10::TensorImpl& tensor) {
  if (!tensor.has_storage()) return nullptr;
  c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || typeid(*storage) != typeid(KeyedStorage)) return nullptr;
  return static_cast<KeyedStorage*>(storage);
}

void KeyedStorage::expose(void* memory, std::shared_ptr<void> keep_alive) {
  this->*throw_flag() = false;
  hidden_ = false;
  at::DataPtr pointer = keep_alive == nullptr
                            ? at::DataPtr(memory, at::Device(at::kCPU))
                            : at::DataPtr(memory, new std::shared_ptr<void>(std::move(keep_alive)), &drop_keep_alive,
                                          at::Device(at::kCPU));
  set_data_ptr_noswap(std::move(pointer));  // also recomputes what depends on the flag
}

void KeyedStorage::hide() {
  this->*throw_flag() = true;
  hidden_ = true;
  set_data_ptr_noswap(at::DataPtr(nullptr, at::Device(at::kCPU)));
}

void KeyedStorage::tell_released() {
  // A copy: this may hold the last reference to the sharding, which must outlive the call.
  std::shared_ptr<Sharding> sharding = lock();
  strong_.reset();
  weak_.reset();
  if (sharding != nullptr) sharding->storage_released(*this);
}

void KeyedStorage::release_resources() {
  tell_released();
  c10::StorageImpl::release_resources();
}

at::Tensor make_keyed_tensor(c10::intrusive_ptr<KeyedStorage> storage, at::ScalarType dtype, at::IntArrayRef sizes,
                             at::IntArrayRef strides) {
  c10::InferenceMode ordinary(false);  // a parameter must not become an inference tensor because of where prepare was called
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))),
      c10::DispatchKeySet({c10::DispatchKey::CPU, kTouchKey}), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor make_interrupted(const at::Tensor& tensor, const std::string& message) {
  auto storage = c10::make_intrusive<KeyedStorage>(static_cast<int64_t>(tensor.nbytes()), message);
  return make_keyed_tensor(std::move(storage), tensor.scalar_type(), tensor.sizes(), tensor.strides());
}

}  // namespace rebind::runtime
