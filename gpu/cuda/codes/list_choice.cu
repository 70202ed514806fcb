#include "gpu/cuda/codes/list_choice.cuh"

namespace keyhole::gpu::codes {
namespace {

template <int kDim>
const void* kernel_of(uint32_t group) {
  if (group <= 4) return reinterpret_cast<const void*>(&list_kernel<kDim, 1>);
  if (group <= 8) return reinterpret_cast<const void*>(&list_kernel<kDim, 2>);
  return reinterpret_cast<const void*>(&list_kernel<kDim, 4>);
}

template <int kDim>
size_t shared_of(uint32_t group) {
  if (group <= 4) return sizeof(ListShared<kDim, 1>);
  if (group <= 8) return sizeof(ListShared<kDim, 2>);
  return sizeof(ListShared<kDim, 4>);
}

}  // namespace

ListKernel list_kernel_of(uint32_t dim, uint32_t group) {
  switch (dim) {
    case 64: return {kernel_of<64>(group), shared_of<64>(group)};
    case 80: return {kernel_of<80>(group), shared_of<80>(group)};
    case 96: return {kernel_of<96>(group), shared_of<96>(group)};
    case 128: return {kernel_of<128>(group), shared_of<128>(group)};
    case 256: return {kernel_of<256>(group), shared_of<256>(group)};
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
