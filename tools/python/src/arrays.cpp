#include "tools/python/src/arrays.h"

#include <string>

#include "tools/python/src/errors.h"

namespace nb = nanobind;

namespace keyhole::python {
namespace {

// Device types of DLPack.
enum { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

keyhole_memory memory_of(int device_type, const char* name) {
  switch (device_type) {
    case kCpu: return KEYHOLE_HOST;
    case kCudaHost: return KEYHOLE_PINNED;
    case kCuda:
    case kCudaManaged: return KEYHOLE_DEVICE;
    default:
      raise(KEYHOLE_UNSUPPORTED, std::string(name) + " lies on a device of DLPack type " +
                                     std::to_string(device_type) +
                                     "; the host (1, 3) and CUDA (2, 13) are allowed");
  }
}

keyhole_dtype dtype_of(nb::dlpack::dtype dtype, const char* name) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes == 1 && code == Code::Float && dtype.bits == 32) return KEYHOLE_F32;
  if (dtype.lanes == 1 && code == Code::Float && dtype.bits == 16) return KEYHOLE_F16;
  if (dtype.lanes == 1 && code == Code::Bfloat && dtype.bits == 16) return KEYHOLE_BF16;
  static const char* const kinds[] = {"int",    "uint",    "float", "handle",
                                      "bfloat", "complex", "bool"};
  const std::string kind =
      dtype.code < 7 ? kinds[dtype.code] : "code " + std::to_string(dtype.code) + " of ";
  raise(KEYHOLE_INVALID_ARGUMENT, std::string(name) + " has dtype " + kind +
                                      std::to_string(dtype.bits) +
                                      "; float32, float16 and bfloat16 are allowed");
}

[[noreturn]] void refuse(nb::handle object, const char* name, Array::Use use) {
  const bool gradient = nb::hasattr(object, "requires_grad") &&
                        nb::cast<bool>(nb::bool_(object.attr("requires_grad")));
  const std::string kind =
      nb::cast<std::string>(nb::str(nb::handle(object.type().attr("__name__"))));
  std::string text =
      std::string(name) + ": an array is needed (DLPack or the buffer protocol), not " + kind;
  if (gradient)
    text = std::string(name) +
           " requires gradients: pass its .detach(), or call under torch.no_grad()";
  else if (nb::hasattr(object, "__dlpack__"))
    text = std::string(name) + ": its " + kind + " cannot be handed over" +
           (use == Array::kWrite
                ? " to be written: is it read-only, or of a dtype that DLPack does not know?"
                : ": is it of a dtype that DLPack does not know?");
  throw nb::type_error(text.c_str());
}

}  // namespace

Array::Array(nb::handle object, const char* name, Use use) {
  if (object.is_none()) {
    none_ = true;
    return;
  }
  if (use == kRead) {
    if (!nb::try_cast(object, read_, false)) refuse(object, name, use);
    take(read_, name);
  } else {
    if (!nb::try_cast(object, written_, false)) refuse(object, name, use);
    take(written_, name);
  }
}

template <class Imported>
void Array::take(const Imported& array, const char* name) {
  if (array.ndim() < 1 || array.ndim() > 4)
    raise(KEYHOLE_INVALID_ARGUMENT,
          std::string(name) + " has " + std::to_string(array.ndim()) + " axes; 1 to 4 are allowed");
  tensor_.data = const_cast<void*>(static_cast<const void*>(array.data()));
  tensor_.dtype = dtype_of(array.dtype(), name);
  tensor_.memory = memory_of(array.device_type(), name);
  tensor_.rank = static_cast<int32_t>(array.ndim());
  for (size_t axis = 0; axis < array.ndim(); ++axis) {
    tensor_.shape[axis] = static_cast<int64_t>(array.shape(axis));
    tensor_.strides[axis] = array.stride(axis);
  }
}

int64_t Array::rows() const {
  int64_t rows = none_ ? 0 : 1;
  for (int32_t axis = 0; !none_ && axis + 1 < tensor_.rank; ++axis) rows *= tensor_.shape[axis];
  return rows;
}

float* Array::floats(const char* name, int64_t count) const {
  if (none_) return nullptr;
  int64_t elements = 1, expected = 1;
  bool dense = tensor_.dtype == KEYHOLE_F32;
  for (int32_t axis = tensor_.rank - 1; axis >= 0; --axis) {
    dense = dense && (tensor_.shape[axis] <= 1 || tensor_.strides[axis] == expected);
    expected *= tensor_.shape[axis];
    elements *= tensor_.shape[axis];
  }
  if (!dense || elements != count)
    raise(KEYHOLE_INVALID_ARGUMENT,
          std::string(name) + " must be a dense float32 array of " + std::to_string(count) +
              " elements (one for each query head and token), not one of " +
              std::to_string(elements));
  return static_cast<float*>(tensor_.data);
}

}  // namespace keyhole::python
