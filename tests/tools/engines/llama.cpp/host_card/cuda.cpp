// The functions of the CUDA runtime that the devices KEYHOLE0, ... call, over host memory: streams do everything at
// once, but for what is captured (graphs.h), memory is as large as KEYHOLE_HOST_CARD_MIB says, and addresses without
// memory are closed to everybody.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t kPage = 4096;

struct HostCard {
  std::mutex mutex;
  size_t total = [] {
    const char* mib = std::getenv("KEYHOLE_HOST_CARD_MIB");
    return (mib != nullptr ? std::strtoull(mib, nullptr, 10) : 4096ULL) << 20U;
  }();
  size_t used = 0;
  std::map<void*, size_t> pieces;  // of cudaMalloc
};
HostCard& card() {
  static auto* const c = new HostCard;
  return *c;
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp* /*of*/,
                     CUmemAllocationGranularity_flags /*kind*/) {
  *bytes = kPage;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* to, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* made = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *to = reinterpret_cast<CUdeviceptr>(made);
  return CUDA_SUCCESS;
}
CUresult free_addresses(CUdeviceptr at, size_t bytes) {
  munmap(reinterpret_cast<void*>(at), bytes);
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
  const std::lock_guard lock(card().mutex);
  if (card().used + bytes > card().total) return CUDA_ERROR_OUT_OF_MEMORY;
  card().used += bytes;
  *handle = bytes;
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(card().mutex);
  card().used -= handle;
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr at, size_t bytes) {
  void* made = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return made == MAP_FAILED ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0
             ? CUDA_SUCCESS
             : CUDA_ERROR_UNKNOWN;
}

struct Entry {
  const char* name;
  void* function;
};

}  // namespace

extern "C" {

cudaError_t cudaSetDevice(int /*ordinal*/) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "the card made of host memory"; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(card().mutex);
  *total = card().total;
  *free = card().total - card().used;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** to, size_t bytes) {
  const std::lock_guard lock(card().mutex);
  if (card().used + bytes > card().total) return cudaErrorMemoryAllocation;
  *to = std::malloc(bytes);
  card().pieces[*to] = bytes;
  card().used += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
  const std::lock_guard lock(card().mutex);
  card().used -= card().pieces[at];
  card().pieces.erase(at);
  std::free(at);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const Entry entries[] = {
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(free_addresses)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)}};
  *to = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    *to = entry.function;
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

}  // extern "C"
