#include "tools/engines/llama.cpp/restored_rows.h"

#include <ggml.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
  if (marks_.empty()) {
    marks_.resize(ggml_nbytes(tensor) / row);
    marked_.resize((marks_.size() + kBlock - 1) / kBlock);
  }
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
  if (marks_[id] != 0) return;
  marks_[id] = 1;
  ++count_;
  ++marked_[id / kBlock];
}

void RestoredRows::forget(size_t id) {
  if (!has(id)) return;
  marks_[id] = 0;
  --marked_[id / kBlock];
  if (--count_ == 0) {
    clear();
  } else if (marked_[id / kBlock] == 0) {
    give_back(id / kBlock);
  }
}

/// Of a page that a block shares with the next one the memory goes with the last of the two.
void RestoredRows::give_back(size_t block) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const bool is_after_empty = block > 0 && marked_[block - 1] == 0;
  const bool is_before_empty = block + 1 < marked_.size() && marked_[block + 1] == 0;
  for (const auto& [tensor, region] : regions_) {
    const size_t bytes = kBlock * tensor->nb[1];
    if (bytes < page) continue;  // a page has more than two blocks
    size_t begin = block * bytes;
    size_t end = std::min(begin + bytes, ggml_nbytes(tensor));
    begin = is_after_empty ? begin / page * page : (begin + page - 1) / page * page;
    end = is_before_empty ? (end + page - 1) / page * page : end / page * page;
    if (begin < end) madvise(region + begin, end - begin, MADV_DONTNEED);
  }
}

void RestoredRows::clear() {
  for (const auto& [tensor, region] : regions_) munmap(region, ggml_nbytes(tensor));
  regions_.clear();
  marks_.clear();
  marked_.clear();
  count_ = 0;
}

}  // namespace keyhole::llama_cpp
