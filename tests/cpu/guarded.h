// Memory that ends right before an unreadable page: one byte too far crashes, also under vector loads that
// a sanitizer does not see.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>
#include <utility>

namespace keyhole::cpu::test {

class GuardedBytes {
 public:
  explicit GuardedBytes(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t usable = (bytes + page - 1) / page * page;
    mapped_ = usable + page;
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<std::byte*>(map_) + usable, page, PROT_NONE);
    data_ = static_cast<std::byte*>(map_) + (usable - bytes);
  }
  ~GuardedBytes() {
    if (map_ != nullptr) munmap(map_, mapped_);
  }
  GuardedBytes(GuardedBytes&& o) noexcept
      : map_(std::exchange(o.map_, nullptr)), mapped_(o.mapped_), data_(o.data_) {}
  GuardedBytes& operator=(GuardedBytes&& o) noexcept {
    std::swap(map_, o.map_);
    std::swap(mapped_, o.mapped_);
    std::swap(data_, o.data_);
    return *this;
  }

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  void* map_ = nullptr;
  size_t mapped_ = 0;
  std::byte* data_ = nullptr;
};

/// Guarded memory for n objects of a plain type.
template <class T>
class GuardedArray {
 public:
  explicit GuardedArray(size_t n, T fill = T{}) : bytes_(n * sizeof(T)), n_(n) {
    for (size_t i = 0; i < n; ++i) data()[i] = fill;
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(bytes_.data()); }
  [[nodiscard]] size_t size() const { return n_; }
  T& operator[](size_t i) const { return data()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + n_; }

 private:
  GuardedBytes bytes_;
  size_t n_;
};

}  // namespace keyhole::cpu::test
