#include "tools/engines/llama.cpp/cuda/card_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

/// Functions of the driver's API by way of the runtime's, so that nothing has to be linked with libcuda.
struct Driver {
  template <class Function>
  static void find(const char* name, Function& to) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned int kVersion = 12000;
    if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(std::string("the CUDA driver has no ") + name);
    }
    to = reinterpret_cast<Function>(found);
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

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(what) + ": error " +
                             std::to_string(static_cast<int>(result)) + " of the CUDA driver");
  }
}

CUmemAllocationProp properties(int ordinal) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = ordinal;
  return p;
}

CUdeviceptr address(const std::byte* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

CardMemory::CardMemory(int ordinal, size_t bytes, size_t spare)
    : ordinal_(ordinal), bytes_(bytes), spare_(spare) {
  check(cudaSetDevice(ordinal), "choosing the card");
  check(cudaFree(nullptr), "opening the card");  // makes the context that the driver's calls need
  const CUmemAllocationProp p = properties(ordinal);
  check(driver().granularity(&page_, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "the size of the card's pages");
  has_memory_.resize((bytes + page_ - 1) / page_);
  CUdeviceptr data = 0;
  check(driver().reserve(&data, has_memory_.size() * page_, 0, 0, 0), "addresses on the card");
  data_ = reinterpret_cast<std::byte*>(data);
}

CardMemory::~CardMemory() {
  (void)cudaSetDevice(ordinal_);
  (void)cudaDeviceSynchronize();
  let_go_all();
  for (const auto handle : prepared_) (void)driver().release(handle);
  (void)driver().free_addresses(address(data_), has_memory_.size() * page_);
}

bool CardMemory::prepare(size_t bytes) {
  check(cudaSetDevice(ordinal_), "choosing the card");
  const CUmemAllocationProp p = properties(ordinal_);
  const size_t pages = (bytes + page_ - 1) / page_;
  const size_t before = prepared_.size();
  while (prepared_.size() < before + pages) {
    CUmemGenericAllocationHandle handle = 0;
    const CUresult created = driver().create(&handle, page_, &p, 0);
    if (created == CUDA_SUCCESS) {
      prepared_.push_back(handle);
      continue;
    }
    for (; prepared_.size() > before; prepared_.pop_back()) {
      (void)driver().release(prepared_.back());
    }
    if (created == CUDA_ERROR_OUT_OF_MEMORY) return false;
    check(created, "memory of the card");
  }
  return true;
}

bool CardMemory::map(size_t first, size_t pages) {
  for (; pages > 0 && !prepared_.empty(); ++first, --pages) {
    const auto handle = prepared_.back();
    prepared_.pop_back();
    map({first, 1, handle});
  }
  if (pages == 0) return true;
  const size_t bytes = pages * page_;
  if (free_on_card() < bytes + spare_) return false;
  const CUmemAllocationProp p = properties(ordinal_);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult created = driver().create(&handle, bytes, &p, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY) return false;
  check(created, "memory of the card");
  map({first, pages, handle});
  return true;
}

void CardMemory::map(const Piece& piece) {
  const size_t bytes = piece.pages * page_;
  std::byte* at = data_ + piece.first * page_;
  const CUresult mapped = driver().map(address(at), bytes, 0, piece.handle, 0);
  if (mapped != CUDA_SUCCESS) {
    (void)driver().release(piece.handle);
    check(mapped, "mapping memory of the card");
  }
  pieces_.push_back(piece);
  std::fill_n(has_memory_.begin() + static_cast<ptrdiff_t>(piece.first), piece.pages, 1);
  held_ += bytes;
  CUmemAccessDesc access{};
  access.location = properties(ordinal_).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(driver().set_access(address(at), bytes, &access, 1), "mapping memory of the card");
  check(cudaMemsetAsync(at, 0, bytes, cudaStreamPerThread), "clearing memory of the card");
}

bool CardMemory::hold(size_t begin, size_t end) {
  if (begin >= end) return true;
  check(cudaSetDevice(ordinal_), "choosing the card");
  const size_t last = (end + page_ - 1) / page_;
  bool all = true;
  bool changed = false;
  for (size_t i = begin / page_; i < last && all;) {
    size_t lacking = 0;
    while (i + lacking < last && has_memory_[i + lacking] == 0) ++lacking;
    if (lacking > 0) {
      all = map(i, lacking);
      changed = true;
    }
    i += std::max<size_t>(lacking, 1);
  }
  if (changed) check(cudaStreamSynchronize(cudaStreamPerThread), "clearing memory of the card");
  return all;
}

void CardMemory::let_go(size_t begin, size_t end) {
  (void)cudaSetDevice(ordinal_);
  std::erase_if(pieces_, [&](const Piece& piece) {
    const size_t first = piece.first * page_;
    const size_t bytes = piece.pages * page_;
    if (first < begin || first + bytes > end) return false;
    unmap(piece);
    return true;
  });
}

void CardMemory::let_go_since(size_t pieces) {
  (void)cudaSetDevice(ordinal_);
  while (pieces_.size() > pieces) {
    unmap(pieces_.back());
    pieces_.pop_back();
  }
}

void CardMemory::unmap(const Piece& piece) {
  const size_t bytes = piece.pages * page_;
  (void)driver().unmap(address(data_ + piece.first * page_), bytes);
  (void)driver().release(piece.handle);
  std::fill_n(has_memory_.begin() + static_cast<ptrdiff_t>(piece.first), piece.pages, 0);
  held_ -= bytes;
}

size_t CardMemory::free_on_card() const {
  check(cudaSetDevice(ordinal_), "choosing the card");
  size_t free = 0;
  size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "the card's free memory");
  return free;
}

void CardMemory::read(size_t begin, size_t bytes, std::byte* out) const {
  check(cudaSetDevice(ordinal_), "choosing the card");
  for (size_t at = begin; at < begin + bytes;) {
    const char has = has_memory_[at / page_];
    size_t end = at;
    while (end < begin + bytes && has_memory_[end / page_] == has) end = (end / page_ + 1) * page_;
    end = std::min(end, begin + bytes);
    std::byte* to = out + (at - begin);
    if (has == 0) {
      std::fill_n(to, end - at, std::byte{0});
    } else {
      check(cudaMemcpyAsync(to, data_ + at, end - at, cudaMemcpyDefault, cudaStreamPerThread),
            "copying from the card");
    }
    at = end;
  }
  check(cudaStreamSynchronize(cudaStreamPerThread), "copying from the card");
}

void CardMemory::write(size_t begin, size_t bytes, const std::byte* from) {
  check(cudaSetDevice(ordinal_), "choosing the card");
  check(cudaMemcpyAsync(data_ + begin, from, bytes, cudaMemcpyDefault, cudaStreamPerThread),
        "copying to the card");
  check(cudaStreamSynchronize(cudaStreamPerThread), "copying to the card");
}

}  // namespace keyhole::llama_cpp
