#include "tools/engines/llama.cpp/cuda/proxy.h"

#include <ggml.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_buffer.h"
#include "tools/engines/llama.cpp/cuda/graph_memory.h"
#include "tools/engines/llama.cpp/cuda/host_inputs.h"
#include "tools/engines/llama.cpp/device.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

struct Proxy {
  ggml_backend_device device{};
  ggml_backend_buffer_type buffers{};
  ggml_backend_dev_t cuda = nullptr;
  ggml_backend_buffer_type_t cuda_buffers = nullptr;
  int ordinal = 0;
  std::string name;
  std::unique_ptr<CardStreams> streams;  // made with the first cache
};

Proxy& of(ggml_backend_dev_t device) { return *static_cast<Proxy*>(device->context); }
Proxy& of(ggml_backend_buffer_type_t buffers) { return *static_cast<Proxy*>(buffers->context); }

// ---- Buffers

/// ggml asks for the size of every tensor before it makes the buffer for them: by their names the next buffer is known
/// to be for a cache.
thread_local bool next_is_cache = false;
/// Or for a graph, and how large the largest of its masks is.
thread_local size_t mask_of_next = 0;

/// Whether a tensor that has no memory as yet is a weight, or part of a state: it is not computed, nor a copy of an
/// input, in whose name the scheduler puts '#'. llama.cpp's allocator asks for the masks of every graph, mostly without
/// making a buffer then, and the next buffer may be that of such tensors, as of a draft model's weights.
bool is_to_stay(const ggml_tensor* tensor) {
  return tensor->op == GGML_OP_NONE && tensor->view_src == nullptr && tensor->data == nullptr &&
         std::strchr(tensor->name, '#') == nullptr;
}

/// A model that lies on several cards copies tensors from one to the other, which a graph buffer is not made for.
std::atomic<int> only_card{-1};
std::atomic<bool> has_several_cards{false};

const char* buffers_name(ggml_backend_buffer_type_t buffers) { return of(buffers).name.c_str(); }
size_t alignment(ggml_backend_buffer_type_t buffers) {
  return ggml_backend_buft_get_alignment(of(buffers).cuda_buffers);
}
size_t max_size(ggml_backend_buffer_type_t buffers) {
  return ggml_backend_buft_get_max_size(of(buffers).cuda_buffers);
}
size_t alloc_size(ggml_backend_buffer_type_t buffers, const ggml_tensor* tensor) {
  next_is_cache = tensor->view_src == nullptr && tensor->op == GGML_OP_NONE &&
                  cache_name(tensor).has_value() && number_of(tensor).has_value();
  const size_t bytes = ggml_backend_buft_get_alloc_size(of(buffers).cuda_buffers, tensor);
  if (is_mask(tensor)) mask_of_next = std::max(mask_of_next, bytes);
  if (is_to_stay(tensor)) mask_of_next = 0;
  return bytes;
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buffers, size_t size) {
  Proxy& proxy = of(buffers);
  if (!configuration().error.empty()) {
    log(Level::kError, configuration().error);
    return nullptr;
  }
  const bool is_cache = next_is_cache;
  next_is_cache = false;
  const size_t of_mask = std::exchange(mask_of_next, 0);
  if (!is_cache) {
    ggml_backend_buffer_t buffer =
        of_mask == 0 || has_several_cards
            // CUDA's own buffer, which its own functions know.
            ? ggml_backend_buft_alloc_buffer(proxy.cuda_buffers, size)
            : make_graph_buffer(proxy.cuda_buffers, proxy.ordinal, size, of_mask);
    if (buffer != nullptr) watch_inputs(buffer);
    return buffer;
  }
  try {
    if (!proxy.streams) proxy.streams = std::make_unique<CardStreams>(proxy.ordinal, proxy.cuda);
  } catch (const std::exception& error) {
    log(Level::kError, error.what());
    return nullptr;
  }
  return make_card_buffer(buffers, size, *proxy.streams);
}

// ---- The device

const char* device_name(ggml_backend_dev_t device) { return of(device).name.c_str(); }
const char* description(ggml_backend_dev_t device) {
  return ggml_backend_dev_description(of(device).cuda);
}
void memory(ggml_backend_dev_t device, size_t* free, size_t* total) {
  ggml_backend_dev_memory(of(device).cuda, free, total);
}
enum ggml_backend_dev_type device_type(ggml_backend_dev_t device) {
  return ggml_backend_dev_type(of(device).cuda);
}
void properties(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  ggml_backend_dev_get_props(of(device).cuda, props);
  props->name = of(device).name.c_str();
}
ggml_backend_t init_backend(ggml_backend_dev_t device, const char* params) {
  int none = -1;
  const int ordinal = of(device).ordinal;
  if (!only_card.compare_exchange_strong(none, ordinal) && none != ordinal) {
    has_several_cards = true;
  }
  ggml_backend_t cuda = ggml_backend_dev_init(of(device).cuda, params);
  return cuda != nullptr ? make_proxy_backend(cuda, device) : nullptr;
}
ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device) { return &of(device).buffers; }
ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t device) {
  return ggml_backend_dev_host_buffer_type(of(device).cuda);
}
bool supports_op(ggml_backend_dev_t device, const ggml_tensor* node) {
  keep_masks(node);
  return ggml_backend_dev_supports_op(of(device).cuda, node);
}
bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffers) {
  return buffers == &of(device).buffers || ggml_backend_dev_supports_buft(of(device).cuda, buffers);
}
bool offload_op(ggml_backend_dev_t device, const ggml_tensor* node) {
  return ggml_backend_dev_offload_op(of(device).cuda, node);
}
// Events are CUDA's, and know its device.
ggml_backend_event_t event_new(ggml_backend_dev_t device) {
  return ggml_backend_event_new(of(device).cuda);
}
void event_free(ggml_backend_dev_t /*device*/, ggml_backend_event_t event) {
  ggml_backend_event_free(event);
}
void event_synchronize(ggml_backend_dev_t /*device*/, ggml_backend_event_t event) {
  ggml_backend_event_synchronize(event);
}

std::unique_ptr<Proxy> make_proxy(ggml_backend_reg_t registry, ggml_backend_dev_t cuda,
                                  int ordinal) {
  auto proxy = std::make_unique<Proxy>();
  proxy->cuda = cuda;
  proxy->cuda_buffers = ggml_backend_dev_buffer_type(cuda);
  proxy->ordinal = ordinal;
  proxy->name = "KEYHOLE" + std::to_string(ordinal);
  ggml_backend_device_i& f = proxy->device.iface;
  f.get_name = device_name;
  f.get_description = description;
  f.get_memory = memory;
  f.get_type = device_type;
  f.get_props = properties;
  f.init_backend = init_backend;
  f.get_buffer_type = buffer_type;
  f.get_host_buffer_type = host_buffer_type;
  f.supports_op = supports_op;
  f.supports_buft = supports_buft;
  f.offload_op = offload_op;
  f.event_new = event_new;
  f.event_free = event_free;
  f.event_synchronize = event_synchronize;
  proxy->device.reg = registry;
  proxy->device.context = proxy.get();
  ggml_backend_buffer_type_i& b = proxy->buffers.iface;
  b.get_name = buffers_name;
  b.alloc_buffer = alloc_buffer;
  b.get_alignment = alignment;
  b.get_max_size = max_size;
  b.get_alloc_size = alloc_size;
  proxy->buffers.device = &proxy->device;
  proxy->buffers.context = proxy.get();
  return proxy;
}

ggml_backend_reg_t cuda_registry() { return ggml_backend_reg_by_name("CUDA"); }

}  // namespace

std::span<const ggml_backend_dev_t> proxy_devices(ggml_backend_reg_t registry) {
  // They live as long as the process: ggml's registry keeps their addresses.
  static std::vector<std::unique_ptr<Proxy>>& proxies = *new std::vector<std::unique_ptr<Proxy>>;
  static const std::vector<ggml_backend_dev_t> devices = [&] {
    std::vector<ggml_backend_dev_t> made;
    ggml_backend_reg_t cuda = cuda_registry();
    const size_t count = cuda != nullptr ? ggml_backend_reg_dev_count(cuda) : 0;
    for (size_t i = 0; i < count; ++i) {
      proxies.push_back(
          make_proxy(registry, ggml_backend_reg_dev_get(cuda, i), static_cast<int>(i)));
      made.push_back(&proxies.back()->device);
    }
    return made;
  }();
  return devices;
}

void* proxy_address(const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
    return reinterpret_cast<void*>(set_proxy_threads);
  }
  return ggml_backend_reg_get_proc_address(cuda_registry(), name);
}

}  // namespace keyhole::llama_cpp
