#include "tools/engines/llama.cpp/device.h"

#include <ggml-backend-impl.h>
#include <ggml.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>

#include "tools/engines/llama.cpp/buffer.h"
#include "tools/engines/llama.cpp/cuda/proxy.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/random_rows.h"
#include "tools/engines/llama.cpp/store.h"
#include "tools/engines/llama.cpp/version.h"

namespace keyhole::llama_cpp {
namespace {

const char* device_name(ggml_backend_dev_t /*device*/) { return "KEYHOLE"; }
const char* description(ggml_backend_dev_t /*device*/) { return "KV cache in Keyhole"; }

/// Of the machine: with pages that only cache files, which the system gives away. llama.cpp puts as many layers here as
/// have room.
void memory(ggml_backend_dev_t /*device*/, size_t* free, size_t* total) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *free = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  std::ifstream figures("/proc/meminfo");
  for (std::string line; std::getline(figures, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) *free = kib * 1024;
  }
}

/// llama.cpp puts the cache of layers on devices of this type, and there alone.
enum ggml_backend_dev_type device_type(ggml_backend_dev_t /*device*/) {
  return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void properties(ggml_backend_dev_t dev, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(dev);
  props->description = description(dev);
  props->type = device_type(dev);
  memory(dev, &props->memory_free, &props->memory_total);
  props->caps.mmap_support = true;  // weights stay with the CPU, which maps them
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char* /*params*/) {
  return make_backend(dev);
}
ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t /*device*/) { return buffer_type(); }
bool supports_op(ggml_backend_dev_t /*device*/, const ggml_tensor* node) { return takes(node); }
bool supports_buft(ggml_backend_dev_t /*device*/, ggml_backend_buffer_type_t buffers) {
  return buffers == buffer_type() || ggml_backend_buft_is_host(buffers);
}

const char* registry_name(ggml_backend_reg_t /*registry*/) { return "KEYHOLE"; }
// Where llama.cpp has cards, there is a device for each of them; else one for the host.
size_t device_count(ggml_backend_reg_t registry) {
  return std::max<size_t>(proxy_devices(registry).size(), 1);
}
ggml_backend_dev_t get_device(ggml_backend_reg_t registry, size_t index) {
  const auto proxies = proxy_devices(registry);
  return index < proxies.size() ? proxies[index] : device();
}
void* proc_address(ggml_backend_reg_t registry, const char* name) {
  if (std::strcmp(name, "keyhole_random_rows") == 0) {
    return reinterpret_cast<void*>(set_random_rows);
  }
  if (!proxy_devices(registry).empty()) return proxy_address(name);
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
    return reinterpret_cast<void*>(set_backend_threads);
  }
  return nullptr;
}

ggml_backend_reg* registry() {
  static ggml_backend_reg r = {
      GGML_BACKEND_API_VERSION, {registry_name, device_count, get_device, proc_address}, nullptr};
  return &r;
}

}  // namespace

ggml_backend_dev_t device() {
  static ggml_backend_device d = [] {
    ggml_backend_device result{};
    result.iface.get_name = device_name;
    result.iface.get_description = description;
    result.iface.get_memory = memory;
    result.iface.get_type = device_type;
    result.iface.get_props = properties;
    result.iface.init_backend = init_backend;
    result.iface.get_buffer_type = get_buffer_type;
    result.iface.supports_op = supports_op;
    result.iface.supports_buft = supports_buft;
    result.reg = registry();
    return result;
  }();
  return &d;
}

const Configuration& configuration() {
  static const Configuration result = [] {
    Configuration c;
    c.error = version_error(KEYHOLE_GGML_VERSION, ggml_version());
    if (!c.error.empty()) return c;
    try {
      const char* text = std::getenv("KEYHOLE_GGML");
      c.settings = parse_settings(text != nullptr ? text : "");
      check_settings(c.settings);
    } catch (const std::exception& error) {
      c.error = error.what();
    }
    return c;
  }();
  return result;
}

}  // namespace keyhole::llama_cpp

/// What ggml_backend_load() looks for. With settings that are wrong, or built for another ggml, the device is there,
/// and gives no buffer: programs stop, where one without the device would go on and look as if all were well.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  using namespace keyhole::llama_cpp;
  if (!configuration().error.empty()) log(Level::kError, configuration().error);
  return device()->reg;
}
