#include "tools/engines/llama.cpp/buffer.h"

#include <ggml-backend-impl.h>
#include <ggml.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "tools/engines/llama.cpp/cache.h"
#include "tools/engines/llama.cpp/device.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"
#include "tools/engines/llama.cpp/random_rows.h"

namespace keyhole::llama_cpp {
namespace {

struct Buffer {
  std::byte* base = nullptr;
  size_t size = 0;
  std::unique_ptr<Cache> cache;
};

Buffer& of(ggml_backend_buffer_t buffer) { return *static_cast<Buffer*>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
  Buffer& b = of(buffer);
  b.cache.reset();
  munmap(b.base, b.size);
  delete &b;
}

void* get_base(ggml_backend_buffer_t buffer) { return of(buffer).base; }

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  if (tensor->view_src != nullptr) return GGML_STATUS_SUCCESS;
  const auto name = cache_name(tensor);
  if (!name) return GGML_STATUS_SUCCESS;
  try {
    Buffer& b = of(buffer);
    if (!b.cache) b.cache = std::make_unique<Cache>(configuration().settings);
    b.cache->add(tensor, *name);
    return GGML_STATUS_SUCCESS;
  } catch (const std::exception& error) {
    log(Level::kError, error.what());
    return GGML_STATUS_ALLOC_FAILED;
  }
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
  const auto name = cache_name(tensor);
  if (Cache* cache = of(buffer).cache.get(); name && cache != nullptr) {
    cache->restored(*name, tensor->view_offs + offset, size);
    try {
      std::byte* room =
          cache->room_for_restored(root(tensor), *name, tensor->view_offs + offset, size);
      if (room != nullptr) std::memset(room, value, size);
    } catch (const std::exception& error) {
      log(Level::kError, error.what());
    }
    if (!cache->holds(*name)) return;
  }
  std::memset(static_cast<std::byte*>(tensor->data) + offset, value, size);
}

/// A stream of the cache is copied to another one: of its cells those that were filled, as memory is taken for all that
/// is written.
void copy_stream(Cache& cache, const CacheName& name, const ggml_tensor* whole, size_t from,
                 size_t to) {
  const Cells& cells = *cache.cells();
  auto* data = static_cast<std::byte*>(whole->data);
  if (!cache.taken()) {
    std::memcpy(data + to * whole->nb[2], data + from * whole->nb[2], whole->nb[2]);
  } else if (cache.holds(name)) {
    const size_t row = whole->nb[1];
    for (uint32_t cell = 0; cell < cells.cells(); ++cell) {
      if (cells.stamp(static_cast<uint32_t>(from), cell) == 0) continue;
      std::memcpy(data + to * whole->nb[2] + cell * row, data + from * whole->nb[2] + cell * row,
                  row);
    }
  }
  cache.copied(name, static_cast<uint32_t>(from), static_cast<uint32_t>(to));
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  Buffer& b = of(buffer);
  const auto name = cache_name(tensor);
  if (!name || !b.cache) {
    std::memcpy(static_cast<std::byte*>(tensor->data) + offset, data, size);
    return;
  }
  // ggml copies one tensor of a host buffer to another by this call: then the data are a stream of the same tensor.
  const ggml_tensor* whole = root(tensor);
  const ptrdiff_t at =
      static_cast<const std::byte*>(data) - static_cast<const std::byte*>(whole->data);
  if (at >= 0 && static_cast<size_t>(at) < ggml_nbytes(whole) && size == whole->nb[2]) {
    copy_stream(*b.cache, *name, whole, static_cast<size_t>(at) / whole->nb[2],
                (tensor->view_offs + offset) / whole->nb[2]);
    return;
  }
  const size_t at_bytes = tensor->view_offs + offset;
  b.cache->restored(*name, at_bytes, size);
  try {
    std::byte* room = b.cache->room_for_restored(whole, *name, at_bytes, size);
    if (room != nullptr && !rows_are_random()) std::memcpy(room, data, size);
  } catch (const std::exception& error) {  // batches that see these cells are refused
    log(Level::kError, error.what());
  }
  if (!b.cache->holds(*name)) return;
  std::memcpy(static_cast<std::byte*>(tensor->data) + offset, data, size);
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
  Buffer& b = of(buffer);
  const auto name = cache_name(tensor);
  if (name && b.cache && !b.cache->holds(*name)) {
    try {
      return b.cache->read(root(tensor), *name, tensor->view_offs + offset, size,
                           static_cast<std::byte*>(data));
    } catch (const std::exception& error) {
      // llama.cpp catches what is thrown while it writes a file, and says that it failed. Where it copies a state to
      // memory it cannot be told, and ends: zeros in the place of K and V would be worse.
      const std::string text =
          std::string("the state of '") + tensor->name + "' cannot be saved: " + error.what();
      log(Level::kError, text);
      throw std::runtime_error("keyhole: " + text);
    }
  }
  std::memcpy(data, static_cast<const std::byte*>(tensor->data) + offset, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  Buffer& b = of(buffer);
  if (b.cache) b.cache->cleared();
  if (value == 0) {
    madvise(b.base, b.size, MADV_DONTNEED);  // pages of zeros again
  } else {
    std::memset(b.base, value, b.size);
  }
}

const char* type_name(ggml_backend_buffer_type_t /*type*/) { return "KEYHOLE"; }
size_t alignment(ggml_backend_buffer_type_t /*type*/) { return 64; }
/// llama.cpp's CPU backend may compute on these buffers: what Keyhole does not take, it does.
bool is_host(ggml_backend_buffer_type_t /*type*/) { return true; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
  if (!configuration().error.empty()) {
    log(Level::kError, configuration().error);
    return nullptr;
  }
  auto buffer = std::make_unique<Buffer>();
  buffer->size = std::max<size_t>(size, 4096);
  void* base = mmap(nullptr, buffer->size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    log(Level::kError, "no address space for a buffer of " + std::to_string(size) + " bytes");
    return nullptr;
  }
  buffer->base = static_cast<std::byte*>(base);
  ggml_backend_buffer_i functions{};
  functions.free_buffer = free_buffer;
  functions.get_base = get_base;
  functions.init_tensor = init_tensor;
  functions.memset_tensor = memset_tensor;
  functions.set_tensor = set_tensor;
  functions.get_tensor = get_tensor;
  functions.clear = clear;
  return ggml_backend_buffer_init(type, functions, buffer.release(), size);
}

}  // namespace

ggml_backend_buffer_type_t buffer_type() {
  static ggml_backend_buffer_type type = [] {
    ggml_backend_buffer_type t{};
    t.iface.get_name = type_name;
    t.iface.alloc_buffer = alloc_buffer;
    t.iface.get_alignment = alignment;
    t.iface.is_host = is_host;
    t.device = device();
    return t;
  }();
  return &type;
}

bool in_cache(const ggml_tensor* tensor) {
  if (tensor == nullptr || !cache_name(tensor)) return false;
  const ggml_backend_buffer_t buffer = root(tensor)->buffer;
  return buffer != nullptr && buffer->buft == buffer_type();
}

Cache* cache_of(const ggml_tensor* tensor) {
  if (!in_cache(tensor)) return nullptr;
  const ggml_backend_buffer_t buffer = root(tensor)->buffer;
  return buffer->context != nullptr ? of(buffer).cache.get() : nullptr;
}

}  // namespace keyhole::llama_cpp
