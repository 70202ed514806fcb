// Stands in for the partitions on the device until they are there; delete with their arrival.
#include "gpu/cuda/cuda_front.h"
#include "gpu/device.h"

namespace keyhole::gpu {

struct CudaFront::Impl {};

CudaFront::CudaFront(const FrontShape&) {
  throw Error(Status::unsupported, "partitions on a CUDA device");
}
CudaFront::~CudaFront() = default;
void CudaFront::upload(uint32_t, uint32_t, uint32_t, const PartitionRows&) {}
uint32_t CudaFront::count(uint32_t, uint32_t) const { return 0; }
void CudaFront::set(uint32_t, uint32_t, uint32_t, FrontTail) {}
size_t CudaFront::bytes() const { return 0; }
void CudaFront::choose(uint32_t, const DeviceRows&, const uint32_t*, Stream) {}
void CudaFront::attend(uint32_t, Stream) {}
const float* CudaFront::tail_o() const { return nullptr; }
const float* CudaFront::tail_lse() const { return nullptr; }
bool CudaFront::await(uint32_t, uint32_t, uint32_t, uint64_t, const std::atomic<bool>&, Chosen&) {
  return false;
}

std::unique_ptr<Front> make_cuda_front(Resident&, const FrontShape& shape) {
  return std::make_unique<CudaFront>(shape);
}

}  // namespace keyhole::gpu
