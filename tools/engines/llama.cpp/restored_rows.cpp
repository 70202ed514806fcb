#include "tools/engines/llama.cpp/restored_rows.h"

#include <ggml.h>
#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

#include "tools/engines/llama.cpp/nodes.h"
#include "tools/engines/llama.cpp/random_rows.h"

namespace keyhole::llama_cpp {
namespace {

std::byte* make_region(const ggml_tensor* tensor) {
  if (rows_are_random()) {
    const auto name = cache_name(tensor);
    return map_random_rows(name && name->values, ggml_nbytes(tensor));
  }
  void* made = mmap(nullptr, ggml_nbytes(tensor), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw std::runtime_error("no address space for rows of a saved state");
  return static_cast<std::byte*>(made);
}

}  // namespace

std::byte* RestoredRows::write(const ggml_tensor* tensor, size_t offset, size_t bytes) {
  const size_t row = tensor->nb[1];
  if (marks_.empty()) marks_.resize(ggml_nbytes(tensor) / row);
  std::byte*& region = regions_[tensor];
  if (region == nullptr) {
    try {
      region = make_region(tensor);
    } catch (...) {
      regions_.erase(tensor);
      throw;
    }
  }
  for (size_t id = offset / row; id * row < offset + bytes; ++id) mark(id);
  return region + offset;
}

std::byte* RestoredRows::row(const ggml_tensor* tensor, size_t id) const {
  return regions_.at(tensor) + id * tensor->nb[1];
}

void RestoredRows::copy(const ggml_tensor* tensor, size_t from, size_t to, size_t count) {
  for (size_t i = 0; i < count && any(); ++i) {
    if (!has(from + i)) {
      forget(to + i);  // what was written there is not what lies there from now on
      continue;
    }
    if (regions_.count(tensor) == 0) continue;
    const size_t bytes = tensor->nb[1];
    std::memcpy(write(tensor, (to + i) * bytes, bytes), row(tensor, from + i), bytes);
  }
}

void RestoredRows::mark(size_t id) {
  count_ += marks_[id] == 0 ? 1 : 0;
  marks_[id] = 1;
}

void RestoredRows::forget(size_t id) {
  if (!has(id)) return;
  marks_[id] = 0;
  if (--count_ == 0) clear();
}

void RestoredRows::clear() {
  for (const auto& [tensor, region] : regions_) munmap(region, ggml_nbytes(tensor));
  regions_.clear();
  marks_.clear();
  count_ = 0;
}

}  // namespace keyhole::llama_cpp
