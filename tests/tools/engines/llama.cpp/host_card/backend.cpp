// A registry CUDA with one device CUDA0, which is made of host memory, and computes with llama.cpp's CPU backend: what
// the devices KEYHOLE0, ... are put around where there is no card. Attention is computed without rounding sums to 16
// bits.
#include <ggml-backend-impl.h>
#include <ggml-impl.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "tests/tools/engines/llama.cpp/host_card/attention.h"
#include "tests/tools/engines/llama.cpp/host_card/buffers.h"
#include "tests/tools/engines/llama.cpp/host_card/graphs.h"
#include "tools/engines/llama.cpp/cpu_backend.h"
#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {
namespace {

ggml_backend_dev_t card_device();

ggml_backend_buffer_type_t card_buffers() {
  static ggml_backend_buffer_type type = [] {
    ggml_backend_buffer_type t = host_card_buffers();
    t.device = card_device();
    return t;
  }();
  return &type;
}

// ---- The backend

CpuBackend& cpu_of(ggml_backend_t backend) { return *static_cast<CpuBackend*>(backend->context); }

const char* card_backend_name(ggml_backend_t /*backend*/) { return "CUDA0"; }
void free_card_backend(ggml_backend_t backend) {
  delete &cpu_of(backend);
  delete backend;
}
void set_async(ggml_backend_t /*backend*/, ggml_tensor* tensor, const void* data, size_t offset,
               size_t size) {
  std::memcpy(static_cast<std::byte*>(tensor->data) + offset, data, size);
}
void get_async(ggml_backend_t /*backend*/, const ggml_tensor* tensor, void* data, size_t offset,
               size_t size) {
  std::memcpy(data, static_cast<const std::byte*>(tensor->data) + offset, size);
}
bool copy_async(ggml_backend_t, ggml_backend_t, const ggml_tensor*, ggml_tensor*) { return false; }
void synchronize(ggml_backend_t /*backend*/) {}
void record(ggml_backend_t, ggml_backend_event_t) {}

/// Nodes [first, end) of a graph, by the CPU backend.
void compute_part(ggml_backend_t backend, const ggml_cgraph* graph, int first, int end) {
  if (first == end) return;
  ggml_cgraph part = *graph;
  part.size = 0;
  part.n_nodes = end - first;
  part.n_leafs = 0;
  part.nodes = graph->nodes + first;
  part.grads = nullptr;
  part.grad_accs = nullptr;
  part.leafs = nullptr;
  part.uid = 0;
  cpu_of(backend).compute(&part);
}

void compute_now(ggml_backend_t backend, const ggml_cgraph* graph) {
  int first = 0;
  for (int i = 0; i < graph->n_nodes; ++i) {
    if (graph->nodes[i]->op != GGML_OP_FLASH_ATTN_EXT) continue;
    compute_part(backend, graph, first, i);
    attend_plainly(graph->nodes[i]);
    first = i + 1;
  }
  compute_part(backend, graph, first, graph->n_nodes);
}

ggml_status compute_on_card(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    if (host_capture() == 0) {
      compute_now(backend, graph);
    } else {
      keep_for_launches(graph, [=](ggml_cgraph* kept) { compute_now(backend, kept); });
    }
    return GGML_STATUS_SUCCESS;
  } catch (const std::exception& error) {
    log(Level::kError, error.what());
    return GGML_STATUS_FAILED;
  }
}

ggml_backend_t open_card(ggml_backend_dev_t device, const char* /*params*/) {
  static ggml_guid guid = {'k', 'e', 'y', 'h', 'o', 'l', 'e', 0, 'c', 'a', 'r', 'd', 0, 0, 0, 1};
  auto* backend = new ggml_backend{};
  backend->guid = &guid;
  backend->iface.get_name = card_backend_name;
  backend->iface.free = free_card_backend;
  backend->iface.set_tensor_async = set_async;
  backend->iface.get_tensor_async = get_async;
  backend->iface.cpy_tensor_async = copy_async;
  backend->iface.synchronize = synchronize;
  backend->iface.graph_compute = compute_on_card;
  backend->iface.event_record = record;
  backend->iface.event_wait = record;
  backend->device = device;
  auto* cpu = new CpuBackend;
  cpu->set_threads(2);
  backend->context = cpu;
  return backend;
}

// ---- The device

ggml_backend_dev_t host_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

const char* card_device_name(ggml_backend_dev_t /*device*/) { return "CUDA0"; }
const char* card_description(ggml_backend_dev_t /*device*/) { return "a card made of host memory"; }
void card_memory(ggml_backend_dev_t /*device*/, size_t* free, size_t* total) {
  *free = *total = size_t{8} << 30U;
}
enum ggml_backend_dev_type card_type(ggml_backend_dev_t /*device*/) {
  return GGML_BACKEND_DEVICE_TYPE_GPU;
}
void card_properties(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = card_device_name(device);
  props->description = card_description(device);
  props->type = card_type(device);
  card_memory(device, &props->memory_free, &props->memory_total);
  props->caps.async = true;
  props->caps.events = true;
}
ggml_backend_buffer_type_t card_buffer_type(ggml_backend_dev_t /*device*/) {
  return card_buffers();
}
bool computes(ggml_backend_dev_t /*device*/, const ggml_tensor* node) {
  return ggml_backend_dev_supports_op(host_device(), node);
}
bool takes_buffers(ggml_backend_dev_t /*device*/, ggml_backend_buffer_type_t type) {
  return type == card_buffers();
}
ggml_backend_event_t make_event(ggml_backend_dev_t device) {
  return new ggml_backend_event{device, nullptr};
}
void free_event(ggml_backend_dev_t /*device*/, ggml_backend_event_t event) { delete event; }
void wait_for_event(ggml_backend_dev_t /*device*/, ggml_backend_event_t /*event*/) {}

const char* cuda_name(ggml_backend_reg_t /*registry*/) { return "CUDA"; }
size_t count_cards(ggml_backend_reg_t /*registry*/) { return 1; }
ggml_backend_dev_t get_card(ggml_backend_reg_t /*registry*/, size_t /*index*/) {
  return card_device();
}
void* find_function(ggml_backend_reg_t /*registry*/, const char* /*name*/) { return nullptr; }

ggml_backend_reg_t host_card_registry() {
  static ggml_backend_reg registry = {
      GGML_BACKEND_API_VERSION, {cuda_name, count_cards, get_card, find_function}, nullptr};
  return &registry;
}

ggml_backend_dev_t card_device() {
  static ggml_backend_device device = [] {
    ggml_backend_device d{};
    d.iface.get_name = card_device_name;
    d.iface.get_description = card_description;
    d.iface.get_memory = card_memory;
    d.iface.get_type = card_type;
    d.iface.get_props = card_properties;
    d.iface.init_backend = open_card;
    d.iface.get_buffer_type = card_buffer_type;
    d.iface.supports_op = computes;
    d.iface.supports_buft = takes_buffers;
    d.iface.event_new = make_event;
    d.iface.event_free = free_event;
    d.iface.event_synchronize = wait_for_event;
    d.reg = host_card_registry();
    return d;
  }();
  return &device;
}

/// The registry is there before the backend is asked which cards there are.
const bool registered = [] {
  ggml_backend_register(host_card_registry());
  return true;
}();

}  // namespace
}  // namespace keyhole::llama_cpp
