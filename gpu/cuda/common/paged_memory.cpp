#include "gpu/cuda/common/paged_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/driver.h"

namespace keyhole::gpu {
namespace {

struct Driver {
  template <class Function>
  static void find(const char* name, Function& to) {
    to = driver_function<Function>(name);
  }
  Driver() {
    find("cuMemGetAllocationGranularity", granularity);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", free_addresses);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
  }
  [[nodiscard]] bool is_there() const {
    return granularity != nullptr && reserve != nullptr && free_addresses != nullptr &&
           create != nullptr && release != nullptr && map != nullptr && unmap != nullptr &&
           set_access != nullptr;
  }

  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_addresses = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void check_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const Status status =
      result == CUDA_ERROR_OUT_OF_MEMORY ? Status::out_of_device_memory : Status::device_error;
  throw Error(status, std::string(what) + ": the CUDA driver's error " +
                          std::to_string(static_cast<int>(result)));
}

int current_device() {
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "the current CUDA device");
  return ordinal;
}

CUmemAllocationProp properties(int ordinal) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = ordinal;
  return p;
}

/// 0: the device does not map pages.
size_t page_bytes(int ordinal) {
  if (!driver().is_there()) return 0;
  int maps = 0;
  // Known to the driver's API by its number, which the runtime's does not name.
  constexpr auto kMapsPages =
      static_cast<cudaDeviceAttr>(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  if (cudaDeviceGetAttribute(&maps, kMapsPages, ordinal) != cudaSuccess || maps == 0) {
    (void)cudaGetLastError();
    return 0;
  }
  size_t bytes = 0;
  const CUmemAllocationProp p = properties(ordinal);
  const CUresult result = driver().granularity(&bytes, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  return result == CUDA_SUCCESS ? bytes : 0;
}

CUdeviceptr address(const std::byte* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

/// Memory of one page, given back when its last owner is gone.
struct PagedMemory::Page {
  Page(int ordinal, size_t bytes) {
    const CUmemAllocationProp p = properties(ordinal);
    check_driver(driver().create(&handle, bytes, &p, 0), "a page of device memory");
  }
  ~Page() { (void)driver().release(handle); }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  CUmemGenericAllocationHandle handle = 0;
};

PagedMemory::PagedMemory(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  page_ = page_bytes(current_device());
  if (page_ == 0) {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), "allocating device memory");
    data_ = static_cast<std::byte*>(data);
    return;
  }
  pages_.resize((bytes + page_ - 1) / page_);
  is_shared_.resize(pages_.size());
  CUdeviceptr data = 0;
  check_driver(driver().reserve(&data, pages_.size() * page_, 0, 0, 0),
               "addresses of device memory");
  data_ = reinterpret_cast<std::byte*>(data);
}

PagedMemory::~PagedMemory() {
  if (data_ == nullptr) return;
  if (page_ == 0) {
    (void)cudaFree(data_);
    return;
  }
  (void)cudaDeviceSynchronize();
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i] != nullptr) (void)driver().unmap(address(data_ + i * page_), page_);
  }
  (void)driver().free_addresses(address(data_), pages_.size() * page_);
}

bool PagedMemory::is_own(size_t page) const {
  return pages_[page] != nullptr && pages_[page].use_count() == 1;
}

size_t PagedMemory::held_bytes() const {
  if (page_ == 0) return bytes_;
  size_t held = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    held += pages_[i] != nullptr && is_shared_[i] == 0 ? page_ : 0;
  }
  return std::min(held, bytes_);
}

void PagedMemory::map(size_t page, std::shared_ptr<Page> memory) {
  const CUdeviceptr at = address(data_ + page * page_);
  if (pages_[page] != nullptr) {
    check_driver(driver().unmap(at, page_), "exchanging a page of device memory");
    pages_[page] = nullptr;
  }
  check_driver(driver().map(at, page_, 0, memory->handle, 0), "mapping a page of device memory");
  pages_[page] = std::move(memory);
  CUmemAccessDesc access{};
  access.location = properties(current_device()).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver().set_access(at, page_, &access, 1), "mapping a page of device memory");
}

PagedMemory::Stretch PagedMemory::share(const PagedMemory& from, size_t begin, size_t end) {
  const Stretch none{begin, begin};
  if (page_ == 0 || from.page_ != page_ || from.bytes_ != bytes_) return none;
  const size_t first = (begin + page_ - 1) / page_, last = end / page_;
  if (first >= last) return none;
  for (size_t i = first; i < last; ++i) {
    if (from.pages_[i] == nullptr) return none;
  }
  for (size_t i = first; i < last; ++i) {
    if (pages_[i] == from.pages_[i]) continue;
    map(i, from.pages_[i]);
    is_shared_[i] = 1;
  }
  return {first * page_, last * page_};
}

bool PagedMemory::owns(size_t begin, size_t end) const {
  if (page_ == 0 || begin >= end) return true;
  for (size_t i = begin / page_; i < (end + page_ - 1) / page_; ++i) {
    if (!is_own(i)) return false;
  }
  return true;
}

size_t PagedMemory::missing_bytes(size_t begin, size_t end) const {
  if (page_ == 0 || begin >= end) return 0;
  size_t missing = 0;
  for (size_t i = begin / page_; i < (end + page_ - 1) / page_; ++i) {
    missing += pages_[i] == nullptr || is_shared_[i] != 0 ? page_ : 0;
  }
  return missing;
}

void PagedMemory::own(size_t begin, size_t end) {
  if (page_ == 0 || begin >= end) return;
  const int ordinal = current_device();
  for (size_t i = begin / page_; i < (end + page_ - 1) / page_; ++i) {
    if (is_own(i)) {
      is_shared_[i] = 0;
      continue;
    }
    auto memory = std::make_shared<Page>(ordinal, page_);
    if (pages_[i] != nullptr) {
      // What is there goes to the new page while that has other addresses.
      PagedMemory copy(page_);
      copy.map(0, memory);
      check(cudaMemcpy(copy.data_, data_ + i * page_, page_, cudaMemcpyDeviceToDevice),
            "copying a page of device memory");
      check(cudaDeviceSynchronize(), "copying a page of device memory");
    }
    map(i, std::move(memory));
    is_shared_[i] = 0;
  }
}

}  // namespace keyhole::gpu
