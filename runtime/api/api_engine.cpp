#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

extern "C" {

void keyhole_engine_config_init_sized(keyhole_engine_config* config, size_t size) {
  keyhole_engine_config value{};
  value.kv_dtype = KEYHOLE_F16;
  init_struct(config, size, value);
}

void keyhole_layer_config_init_sized(keyhole_layer_config* layer, size_t size,
                                     const keyhole_engine_config* engine) {
  keyhole_layer_config value{};
  if (engine != nullptr) {
    // Of an engine config of another version what it has; a size that none has gives zeros.
    try {
      value = layer_of(read_struct(engine, keyhole_engine_config{}, "engine"));
    } catch (...) {  // NOLINT: init functions report nothing
    }
  }
  init_struct(layer, size, value);
}

keyhole_status keyhole_engine_create(const keyhole_engine_config* config, keyhole_engine** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    keyhole_engine_config defaults;
    keyhole_engine_config_init(&defaults);
    const auto c = read_struct(config, defaults, "config");
    if (c.communicator != nullptr) require(c.communicator, "config.communicator");
    auto handle = std::make_unique<keyhole_engine>();
    handle->engine = std::make_shared<const Engine>(c);
    *out = handle.release();
  });
}

void keyhole_engine_destroy(keyhole_engine* engine) { destroy(engine); }

keyhole_status keyhole_engine_get_config(const keyhole_engine* engine,
                                         keyhole_engine_config* config) {
  return guarded([&] {
    require(engine, "engine");
    write_struct(config, engine->engine->effective_config(), "config");
  });
}

}  // extern "C"
