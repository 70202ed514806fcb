#include "gpu/cuda/common/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/driver.h"

namespace keyhole::gpu {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
  static const auto found = driver_function<Encode>("cuTensorMapEncodeTiled");
  return found;
}

}  // namespace

CUtensorMap make_tensor_map(const BoxedTensor& t) {
  const Encode encode = encoder();
  if (encode == nullptr) {
    throw Error(Status::unsupported,
                "the CUDA driver has no tensor maps; it must be of CUDA 12.0 or newer");
  }
  constexpr cuuint32_t kElementStrides[3] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode(&map, t.is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             3, const_cast<void*>(t.data), t.sizes.data(), t.strides.data(), t.box.data(),
             kElementStrides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::device_error,
                "the CUDA driver refuses a tensor [" + std::to_string(t.sizes[2]) + ", " +
                    std::to_string(t.sizes[1]) + ", " + std::to_string(t.sizes[0]) +
                    "] with strides of " + std::to_string(t.strides[1]) + " and " +
                    std::to_string(t.strides[0]) + " bytes: error " +
                    std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace keyhole::gpu
