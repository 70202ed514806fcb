#include "keyhole/attention.h"
#include "tools/python/src/arrays.h"
#include "tools/python/src/callbacks.h"
#include "tools/python/src/fields.h"
#include "tools/python/src/handles.h"

#include <memory>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace keyhole::python {
namespace {

// An engine's config with the arrays that it points to.
struct EngineConfig {
  keyhole_engine_config config;
  std::vector<keyhole_layer_config> layers;

  EngineConfig(nb::dict values, nb::handle layer_configs) {
    keyhole_engine_config_init(&config);
    fill(config, values);
    if (layer_configs.is_none()) return;
    for (nb::handle layer : layer_configs) {
      keyhole_layer_config_init(&layers.emplace_back(), &config);
      fill(layers.back(), nb::cast<nb::dict>(layer));
    }
    config.layer_configs = layers.data();
    config.layer_count = static_cast<uint32_t>(layers.size());
  }
};

Engine* create(nb::dict values, nb::handle layer_configs, nb::handle sink_logits) {
  EngineConfig config(values, layer_configs);
  size_t sinks = 0;
  if (config.layers.empty())
    sinks = static_cast<size_t>(config.config.layers) * config.config.q_heads;
  for (const keyhole_layer_config& layer : config.layers)
    sinks += layer.q_heads ? layer.q_heads : config.config.q_heads;
  const Elements<const float> logits(sink_logits, "sink_logits",
                                     "a dense float32 array in host memory", sinks);
  config.config.sink_logits = logits.data();
  config.config.log = log;
  keyhole_engine* engine = nullptr;
  run([&] { return keyhole_engine_create(&config.config, &engine); });
  return new Engine(engine, "the engine");
}

nb::dict config_of(Engine& self) {
  Engine::Use use(self);
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  check(keyhole_engine_get_config(use.get(), &config));
  return as_dict(config);
}

nb::dict memory_of(Engine& self) {
  Engine::Use use(self);
  keyhole_memory_use memory;
  keyhole_memory_use_init(&memory);
  run([&] { return keyhole_engine_get_memory(use.get(), &memory); });
  return as_dict(memory);
}

nb::dict plan(nb::dict engine, nb::handle layer_configs, nb::dict session,
              const std::vector<uint32_t>& dense_layers, uint64_t context, uint64_t device_limit,
              uint64_t host_limit) {
  EngineConfig engine_config(engine, layer_configs);
  keyhole_session_config session_config;
  keyhole_session_config_init(&session_config);
  fill(session_config, session);
  session_config.dense_layers = dense_layers.data();
  session_config.dense_layer_count = static_cast<uint32_t>(dense_layers.size());
  keyhole_memory_plan result;
  keyhole_memory_plan_init(&result);
  run([&] {
    return keyhole_plan(&engine_config.config, &session_config, context, device_limit, host_limit,
                        &result);
  });
  return as_dict(result);
}

void merge_states(nb::list outputs, nb::list sums, nb::handle out, nb::handle out_lse,
                  int32_t base) {
  using Floats = Elements<const float>;
  const Elements<float> merged(out, "out", "a writable dense float32 array in host memory");
  const Elements<float> merged_lse(out_lse, "out_lse",
                                   "a writable dense float32 array in host memory");
  const size_t heads = merged_lse.size();
  if (heads == 0 || merged.size() % heads != 0)
    throw nb::value_error("out must be [heads, head_dim], out_lse [heads], heads at least 1");
  if (outputs.size() != sums.size()) throw nb::value_error("there must be one lse for each o");
  std::vector<Floats> kept;
  kept.reserve(2 * outputs.size());
  std::vector<const float*> o, lse;
  for (size_t i = 0; i < outputs.size(); ++i) {
    o.push_back(
        kept.emplace_back(outputs[i], "o", "a dense float32 array in host memory", merged.size())
            .data());
    lse.push_back(
        kept.emplace_back(sums[i], "lse", "a dense float32 array in host memory", heads).data());
  }
  run([&] {
    return keyhole_merge_states(
        static_cast<uint32_t>(o.size()), o.data(), lse.data(), static_cast<uint32_t>(heads),
        static_cast<uint32_t>(merged.size() / heads), base, merged.data(), merged_lse.data());
  });
}

// The device's tensors are contiguous: what is handed over is their pointers.
void* device_data(const Array& array, const std::string& name, int64_t rows, int64_t width) {
  if (array.none()) throw nb::type_error((name + " is None").c_str());
  const keyhole_tensor& tensor = array.tensor();
  if (tensor.memory != KEYHOLE_DEVICE)
    raise(KEYHOLE_INVALID_ARGUMENT,
          name + " lies in host memory; arrays in device memory are merged on the device");
  int64_t elements = 1;
  for (int32_t axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] != elements)
      raise(KEYHOLE_INVALID_ARGUMENT, name + " is not contiguous");
    elements *= tensor.shape[axis];
  }
  if (elements != rows * width)
    raise(KEYHOLE_INVALID_ARGUMENT, name + " has " + std::to_string(elements) + " elements; " +
                                        std::to_string(rows * width) + " are needed");
  return tensor.data;
}

void merge_states_device(nb::list outputs, nb::list sums, nb::handle out, nb::handle out_lse,
                         int32_t base, uintptr_t stream) {
  const Array merged(out, "out", Array::kWrite), merged_lse(out_lse, "out_lse", Array::kWrite);
  if (outputs.size() != sums.size()) throw nb::value_error("there must be one lse for each o");
  const int64_t rows = merged.rows();
  if (rows < 1) throw nb::value_error("out must be [..., head_dim] with a row at least");
  const int64_t width = merged.tensor().shape[merged.tensor().rank - 1];
  void* const to = device_data(merged, "out", rows, width);
  const auto floats = [&](const Array& array, const char* name) {
    (void)device_data(array, name, rows, 1);
    return array.floats(name, rows);
  };
  float* const to_lse = floats(merged_lse, "out_lse");
  std::vector<std::unique_ptr<Array>> kept;
  std::vector<const void*> o;
  std::vector<const float*> lse;
  keyhole_dtype o_dtype = merged.tensor().dtype;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Array& part = *kept.emplace_back(std::make_unique<Array>(outputs[i], "o", Array::kRead));
    o.push_back(device_data(part, "o[" + std::to_string(i) + "]", rows, width));
    if (i == 0) o_dtype = part.tensor().dtype;
    if (part.tensor().dtype != o_dtype)
      raise(KEYHOLE_INVALID_ARGUMENT, "the arrays of o differ in dtype");
    const Array& sum = *kept.emplace_back(std::make_unique<Array>(sums[i], "lse", Array::kRead));
    lse.push_back(floats(sum, "lse"));
  }
  run([&] {
    return keyhole_merge_states_device(static_cast<uint32_t>(o.size()), o.data(), lse.data(),
                                       static_cast<uint32_t>(rows), static_cast<uint32_t>(width),
                                       o_dtype, base, to, merged.tensor().dtype, to_lse,
                                       reinterpret_cast<void*>(stream));
  });
}

}  // namespace

void define_engine(nb::module_& module) {
  nb::class_<Engine>(module, "Engine")
      .def("close", &Engine::close)
      .def_prop_ro("closed", &Engine::closed);
  module.def("engine_create", create, nb::arg("values"), nb::arg("layer_configs").none(),
             nb::arg("sink_logits").none());
  module.def("engine_config", config_of);
  module.def("engine_memory", memory_of);
  module.def("plan", plan, nb::arg("engine"), nb::arg("layer_configs").none(), nb::arg("session"),
             nb::arg("dense_layers"), nb::arg("context"), nb::arg("device_limit"),
             nb::arg("host_limit"));
  module.def("merge_states", merge_states);
  module.def("merge_states_device", merge_states_device, nb::arg("o"), nb::arg("lse"),
             nb::arg("out"), nb::arg("out_lse"), nb::arg("base"), nb::arg("stream"));
}

}  // namespace keyhole::python
