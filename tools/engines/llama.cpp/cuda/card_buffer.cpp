#include "tools/engines/llama.cpp/cuda/card_buffer.h"

#include <cuda_runtime_api.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/cuda/card_memory.h"
#include "tools/engines/llama.cpp/device.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/random_rows.h"

namespace keyhole::llama_cpp {
namespace {

struct Buffer {
  Buffer(size_t size, CardStreams& streams)
      : ordinal(streams.sessions.ordinal()),
        memory(ordinal, size),
        cache(configuration().settings, memory, streams.sessions, streams.prompts) {}
  int ordinal;
  CardMemory memory;
  CardCache cache;
  std::map<const ggml_tensor*, CacheName> names;
};

Buffer& of(ggml_backend_buffer_t buffer) { return *static_cast<Buffer*>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) { delete &of(buffer); }

void* get_base(ggml_backend_buffer_t buffer) { return of(buffer).memory.data(); }

bool is_card_buffer(ggml_backend_buffer_t buffer) {
  return buffer != nullptr && buffer->iface.free_buffer == free_buffer;
}

/// ggml's functions on buffers have no way to fail.
[[noreturn]] void give_up(const ggml_tensor* tensor, const std::string& why) {
  GGML_ABORT("keyhole: '%s': %s\n", tensor->name, why.c_str());
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// Copies, and waits for it.
void copy(const Buffer& b, void* to, const void* from, size_t bytes) {
  check(cudaSetDevice(b.ordinal));
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStreamPerThread));
  check(cudaStreamSynchronize(cudaStreamPerThread));
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  if (tensor->view_src != nullptr) return GGML_STATUS_SUCCESS;
  const auto name = cache_name(tensor);
  if (!name) return GGML_STATUS_FAILED;
  try {
    of(buffer).names[tensor] = *name;
    of(buffer).cache.add(tensor, *name);
    return GGML_STATUS_SUCCESS;
  } catch (const std::exception& error) {
    log(Level::kError, error.what());
    return GGML_STATUS_ALLOC_FAILED;
  }
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
  const auto place = card_place(tensor);
  try {
    std::byte* host = place->cache->open_to_write(place->name, tensor->view_offs + offset, size);
    if (host != nullptr) {
      std::memset(host, value, size);
      return;
    }
    check(cudaSetDevice(of(buffer).ordinal));
    check(cudaMemsetAsync(static_cast<std::byte*>(tensor->data) + offset, value, size,
                          cudaStreamPerThread));
    check(cudaStreamSynchronize(cudaStreamPerThread));
  } catch (const std::exception& error) {
    give_up(tensor, error.what());
  }
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  const auto place = card_place(tensor);
  try {
    std::byte* host = place->cache->open_to_write(place->name, tensor->view_offs + offset, size);
    if (host != nullptr) {
      if (!rows_are_random()) std::memcpy(host, data, size);
      return;
    }
    copy(of(buffer), static_cast<std::byte*>(tensor->data) + offset, data, size);
  } catch (const std::exception& error) {
    give_up(tensor, error.what());
  }
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
  const auto place = card_place(tensor);
  try {
    if (place->cache->read(place->name, tensor->view_offs + offset, size,
                           static_cast<std::byte*>(data))) {
      return;
    }
  } catch (const std::exception& error) {
    // llama.cpp catches what is thrown while it writes a file, and says that it failed. Where it copies a state to
    // memory it cannot be told, and ends: zeros in the place of K and V would be worse.
    const std::string text =
        std::string("the state of '") + tensor->name + "' cannot be saved: " + error.what();
    log(Level::kError, text);
    throw std::runtime_error("keyhole: " + text);
  }
  try {
    copy(of(buffer), data, static_cast<const std::byte*>(tensor->data) + offset, size);
  } catch (const std::exception& error) {
    give_up(tensor, error.what());
  }
}

/// A stream of the cache is copied to another one of the same tensor. Else false: ggml copies by way of the host.
bool copy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* from, ggml_tensor* to) {
  const ggml_tensor* whole = root(to);
  if (root(from) != whole || ggml_nbytes(from) != whole->nb[2] ||
      from->view_offs % whole->nb[2] != 0 || to->view_offs % whole->nb[2] != 0) {
    return false;
  }
  const auto place = card_place(to);
  try {
    const uint32_t cells =
        place->cache->copied(place->name, static_cast<uint32_t>(from->view_offs / whole->nb[2]),
                             static_cast<uint32_t>(to->view_offs / whole->nb[2]));
    if (cells > 0) copy(of(buffer), to->data, from->data, cells * whole->nb[1]);
    return true;
  } catch (const std::exception& error) {
    give_up(to, error.what());
  }
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  Buffer& b = of(buffer);
  if (value != 0) log(Level::kWarning, "a cache is cleared to another value than 0");
  (void)cudaSetDevice(b.ordinal);
  (void)cudaDeviceSynchronize();
  b.cache.cleared();      // first: a thread of its own may read the cells
  b.memory.let_go_all();  // what is held next has zeros
}

}  // namespace

ggml_backend_buffer_t make_card_buffer(ggml_backend_buffer_type_t type, size_t size,
                                       CardStreams& streams) {
  try {
    auto buffer = std::make_unique<Buffer>(size, streams);
    ggml_backend_buffer_i functions{};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.init_tensor = init_tensor;
    functions.memset_tensor = memset_tensor;
    functions.set_tensor = set_tensor;
    functions.get_tensor = get_tensor;
    functions.cpy_tensor = copy_tensor;
    functions.clear = clear;
    return ggml_backend_buffer_init(type, functions, buffer.release(), size);
  } catch (const std::exception& error) {
    log(Level::kError, std::string("a cache on the card: ") + error.what());
    return nullptr;
  }
}

std::optional<CardPlace> card_place(const ggml_tensor* tensor) {
  const ggml_tensor* whole = root(tensor);
  if (!is_card_buffer(whole->buffer)) return std::nullopt;
  Buffer& b = of(whole->buffer);
  const auto found = b.names.find(whole);
  if (found == b.names.end()) return std::nullopt;
  return CardPlace{&b.cache, found->second};
}

}  // namespace keyhole::llama_cpp
