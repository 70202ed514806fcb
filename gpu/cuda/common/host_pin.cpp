#include "gpu/cuda/common/host_pin.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <iterator>
#include <string>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/supported_device.h"

namespace keyhole::gpu {
namespace {

/// Takes the memory that is still missing, as the system takes it fastest. The driver would take it page by page, and
/// other threads' launches wait for the driver: 3 GB/s of fresh memory, where memory that is there is pinned at 30 to
/// 50.
void populate(std::byte* data, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  (void)madvise(data, bytes, MADV_POPULATE_WRITE);  // where it cannot, the driver will say so
#else
  (void)data;
  (void)bytes;
#endif
}

[[noreturn]] void refuse_addresses(const std::string& what) {
  throw Error(Status::unsupported,
              "host memory for a CUDA device: " + what +
                  "; needed is a device that uses the host's addresses for memory pinned later");
}

}  // namespace

HostPin::HostPin(int ordinal) : ordinal_(ordinal) {
  require_device(ordinal, "host memory for a CUDA device");
  int same = 0;
  check(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal),
        "the device's addresses");
  if (same == 0) {
    refuse_addresses("device " + std::to_string(ordinal) + " has addresses of its own for it");
  }
}

HostPin::~HostPin() { HostPin::drop(nullptr, nullptr); }

void HostPin::add(const std::byte* data, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(data) % kPinAlignment != 0 || bytes % kPinAlignment != 0) {
    throw Error(Status::invalid_argument,
                "pinned host memory: " + std::to_string(bytes) + " bytes at " +
                    std::to_string(reinterpret_cast<uintptr_t>(data) % kPinAlignment) +
                    " bytes into a page; both must be multiples of " +
                    std::to_string(kPinAlignment));
  }
  if (bytes == 0) return;
  const auto after = ranges_.lower_bound(data);
  const bool meets_next = after != ranges_.end() && after->first < data + bytes;
  const auto before = after == ranges_.begin() ? ranges_.end() : std::prev(after);
  const bool meets_last = before != ranges_.end() && before->first + before->second > data;
  if (meets_next || meets_last) {
    throw Error(Status::invalid_argument, "pinned host memory: " + std::to_string(bytes) +
                                              " bytes of which some are pinned already");
  }
  const DeviceScope device(ordinal_);
  const BesideCapture beside;
  const auto entry = ranges_.emplace(data, bytes).first;
  auto* memory = const_cast<std::byte*>(data);
  populate(memory, bytes);
  const cudaError_t error =
      cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    ranges_.erase(entry);
    const std::string text = "pinned host memory: " + std::to_string(bytes) + " bytes, after " +
                             std::to_string(bytes_) + " of this store: CUDA says '" +
                             cudaGetErrorString(error) + "' (" + cudaGetErrorName(error) + ")";
    throw Error(error == cudaErrorMemoryAllocation ? Status::out_of_memory
                : error == cudaErrorNotSupported   ? Status::unsupported
                                                   : Status::device_error,
                text);
  }
  void* there = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&there, memory, 0);
  if (mapped != cudaSuccess || there != memory) {
    (void)cudaGetLastError();
    (void)cudaHostUnregister(memory);
    ranges_.erase(entry);
    check(mapped, "mapping pinned host memory");
    refuse_addresses("it got another address there");
  }
  bytes_ += bytes;
}

void HostPin::drop(const std::byte* from, const std::byte* to) noexcept {
  const BesideCapture beside;
  auto it = ranges_.lower_bound(from);
  while (it != ranges_.end() && (to == nullptr || it->first < to)) {
    // An error here is one of earlier work, or of a driver on its way out: nothing that a caller could mend.
    if (cudaHostUnregister(const_cast<std::byte*>(it->first)) != cudaSuccess) {
      (void)cudaGetLastError();
    }
    bytes_ -= it->second;
    it = ranges_.erase(it);
  }
}

}  // namespace keyhole::gpu
