#include "runtime/plan/config.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/code_layout.h"
#include "index/types/factory.h"
#include "runtime/plan/auto_index.h"
#include "runtime/plan/budget_file.h"
#include "runtime/plan/layer_shape.h"
#include "runtime/plan/refusals.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kValueStep = 16;  // as head dimensions

void check_range(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value < low || value > high) {
    bad(std::string(field) + " is " + std::to_string(value) + ", allowed: " + std::to_string(low) +
        ".." + std::to_string(high));
  }
}

}  // namespace

void check_struct(const void* p, size_t struct_size, size_t known_size, const char* name) {
  if (p == nullptr) bad(std::string(name) + " is NULL");
  if (struct_size < sizeof(size_t) || struct_size > (size_t{1} << 16)) {
    bad(std::string(name) + ".struct_size is " + std::to_string(struct_size) +
        ": fill the struct with its init function first");
  }
  const auto* bytes = static_cast<const unsigned char*>(p);
  if (struct_size > known_size && std::any_of(bytes + known_size, bytes + struct_size,
                                              [](unsigned char b) { return b != 0; })) {
    throw Error(Status::version, std::string(name) + " has fields that version " +
                                     keyhole_version() + " does not know (struct_size " +
                                     std::to_string(struct_size) +
                                     ", known: " + std::to_string(known_size) + ")");
  }
}

bool SessionParams::is_dense(uint32_t layer) const {
  return std::binary_search(dense_layers.begin(), dense_layers.end(), layer) ||
         std::binary_search(sliding_layers.begin(), sliding_layers.end(), layer);
}

uint32_t ModelShape::resident_layers() const {
  uint32_t last = layers;
  while (last > 1 && slides(last - 1)) --last;
  return last;
}

std::vector<LayerShape> ModelShape::device_shapes() const {
  if (!layers_differ()) return {};
  std::vector<LayerShape> all(shapes.begin(), shapes.begin() + resident_layers());
  // A session has resident tokens of one layer at least.
  for (uint32_t layer = 0; layer < all.size() && all.size() > 1; ++layer) {
    if (slides(layer)) all[layer].kv_heads = 0;
  }
  return all;
}

uint32_t ModelShape::sliding_layers() const {
  uint32_t n = 0;
  for (const Window& w : windows) n += w.tokens != 0 ? 1 : 0;
  return n;
}

size_t ModelShape::first_q_head(uint32_t layer) const {
  if (shapes.empty()) return size_t{layer} * q_heads;
  size_t first = 0;
  for (uint32_t l = 0; l < layer; ++l) first += shapes[l].q_heads;
  return first;
}

LayerShape ModelShape::largest() const {
  LayerShape all = of(0);
  for (const LayerShape& s : shapes) {
    all.q_heads = std::max(all.q_heads, s.q_heads);
    all.kv_heads = std::max(all.kv_heads, s.kv_heads);
    all.head_dim = std::max(all.head_dim, s.head_dim);
    all.value_dim = std::max(all.value_dim, s.value_dim);
  }
  return all;
}

uint32_t ModelShape::largest_group() const {
  return static_cast<uint32_t>(most([](const LayerShape& s) { return s.group(); }));
}

HeadNumbers ModelShape::head_numbers() const {
  if (shapes.empty()) return {layers, kv_heads};
  std::vector<uint32_t> of_layers;
  for (const LayerShape& s : shapes) of_layers.push_back(s.kv_heads);
  return HeadNumbers(of_layers);
}

float ModelShape::largest_element() const {
  constexpr float kLargestHalf = 65504.0F;
  constexpr float kLargestBf16 = 0x1.FEp127F;
  if (kv_dtype == DType::f16) return kLargestHalf;
  return kv_dtype == DType::bf16 ? kLargestBf16 : std::numeric_limits<float>::max();
}

uint64_t SessionParams::offload_bytes(const ModelShape& model, uint32_t layer,
                                      uint64_t rows) const {
  static_assert(kScaleRows == kCodeBlock, "a block of codes has one set of scales");
  const LayerShape shape = model.of(layer);
  const uint64_t numbers = uint64_t{2} * shape.kv_heads * shape.head_dim;
  const DType dtype = offload_dtype(model);
  const uint64_t blocks = dtype == DType::i8 ? (rows + kScaleRows - 1) / kScaleRows : 0;
  return numbers * (rows * dtype_size(dtype) + blocks * sizeof(uint16_t));
}

uint64_t SessionParams::host_resident_bytes(const ModelShape& model) const {
  const uint64_t slots = uint64_t{sink} + window + flush_block;
  uint64_t bytes = 0;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (!model.slides(layer)) bytes += 2 * slots * model.of(layer).token_bytes(model.kv_dtype);
  }
  return bytes;
}

uint64_t SessionParams::staging_tokens() const {
  // What fills a window's last block of rows is staged behind it.
  const uint64_t block = row_block();
  return (uint64_t{window} + flush_block + block - 1) / block * block;
}

uint32_t SessionParams::row_block() const { return flush_block % kCodeBlock == 0 ? kCodeBlock : 1; }

gpu::ResidentShape SessionParams::resident_shape(const ModelShape& model) const {
  return {model.resident_layers(),
          model.q_heads,
          model.kv_heads,
          model.head_dim,
          model.kv_dtype,
          sink,
          window + flush_block,
          window,
          model.logits,
          audit_share > 0.0,
          model.layer_logits,
          model.device_shapes(),
          {}};
}

namespace {

/// The shape of a layer whose q_heads, kv_heads and head_dim are given; the last two numbers are the engine's.
LayerShape shape_of(const keyhole_layer_config& layer, uint32_t head_dim, uint32_t value_dim,
                    size_t number) {
  LayerShape shape{layer.q_heads, layer.kv_heads, layer.head_dim, value_dim};
  if (value_dim == head_dim) {
    shape.value_dim = shape.head_dim;  // values as wide as keys
  } else if (value_dim > shape.head_dim) {
    bad("layer_configs[" + std::to_string(number) + "].head_dim is " +
        std::to_string(shape.head_dim) +
        ", allowed: at least value_dim = " + std::to_string(value_dim));
  }
  return shape;
}

/// Where all layers are alike, their shape is the model's.
void take_common_shape(ModelShape& m) {
  const auto is_first = [&](const LayerShape& s) { return s == m.shapes.front(); };
  if (m.shapes.empty() || !std::all_of(m.shapes.begin(), m.shapes.end(), is_first)) return;
  const LayerShape all = m.shapes.front();
  m.q_heads = all.q_heads;
  m.kv_heads = all.kv_heads;
  m.head_dim = all.head_dim;
  m.value_dim = all.value_dim;
  m.shapes.clear();
}

}  // namespace

void check_heads(const LayerShape& shape, const std::string& prefix) {
  check_range((prefix + "q_heads").c_str(), shape.q_heads, 1, kMaxHeads);
  check_range((prefix + "kv_heads").c_str(), shape.kv_heads, 1, kMaxHeads);
  if (shape.q_heads % shape.kv_heads != 0 || shape.group() > kMaxGroup) {
    bad(prefix + "q_heads " + std::to_string(shape.q_heads) + " with kv_heads " +
        std::to_string(shape.kv_heads) + ": allowed are whole groups of 1.." +
        std::to_string(kMaxGroup) + " query heads per KV head");
  }
  if (!is_supported_head_dim(shape.head_dim)) {
    bad(prefix + "head_dim is " + std::to_string(shape.head_dim) + ", allowed: " + kHeadDims);
  }
}

ModelShape check_model(const keyhole_engine_config& c) {
  check_range("layers", c.layers, 1, kMaxLayers);
  check_heads({c.q_heads, c.kv_heads, c.head_dim}, "");
  const uint32_t value_dim = c.value_dim == KEYHOLE_AUTO ? c.head_dim : c.value_dim;
  if (value_dim > c.head_dim || value_dim % kValueStep != 0) {
    bad("value_dim is " + std::to_string(c.value_dim) + ", allowed: multiples of " +
        std::to_string(kValueStep) + " up to head_dim = " + std::to_string(c.head_dim) +
        ", KEYHOLE_AUTO (0)");
  }
  check_range("values_in_keys", static_cast<uint32_t>(c.values_in_keys), 0, 1);
  if (c.kv_dtype != KEYHOLE_F32 && c.kv_dtype != KEYHOLE_F16 && c.kv_dtype != KEYHOLE_BF16) {
    bad("kv_dtype is " + std::to_string(c.kv_dtype) +
        ", allowed: KEYHOLE_F32 (0), KEYHOLE_F16 (1), KEYHOLE_BF16 (2)");
  }
  ModelShape m;
  m.layers = c.layers;
  m.q_heads = c.q_heads;
  m.kv_heads = c.kv_heads;
  m.head_dim = c.head_dim;
  m.value_dim = value_dim;
  m.values_in_keys = c.values_in_keys != 0;
  m.kv_dtype = static_cast<DType>(c.kv_dtype);
  check_layer_shape(layer_of(c), "");
  m.logits.scale = c.scale > 0.0F ? c.scale : 1.0F / std::sqrt(static_cast<float>(c.head_dim));
  m.logits.softcap = c.softcap;
  m.has_rope = c.layer_configs == nullptr && c.rope_theta != 0.0F;
  for (const keyhole_layer_config& layer : read_layers(c)) {
    m.layer_logits.push_back({layer.scale, layer.softcap});
    m.has_rope = m.has_rope || layer.rope_theta != 0.0F;
    m.windows.push_back({layer.window, layer.window_slack});
    m.shapes.push_back(shape_of(layer, c.head_dim, value_dim, m.shapes.size()));
  }
  take_common_shape(m);
  if (c.sink_logits != nullptr) {
    m.sinks.assign(c.sink_logits, c.sink_logits + m.first_q_head(m.layers));
    const auto is_bad = [](float s) { return !std::isfinite(s) && s != kMinusInf; };
    const auto bad_sink = std::find_if(m.sinks.begin(), m.sinks.end(), is_bad);
    if (bad_sink != m.sinks.end()) {
      const auto at = static_cast<size_t>(bad_sink - m.sinks.begin());
      uint32_t layer = 0;
      while (m.first_q_head(layer + 1) <= at) ++layer;
      bad("sink_logits of layer " + std::to_string(layer) + ", head " +
          std::to_string(at - m.first_q_head(layer)) + " is " + std::to_string(*bad_sink) +
          ", allowed: finite numbers, and -inf for none");
    }
  }
  return m;
}

std::string unsupported_on_device(const ModelShape& model) {
  for (uint32_t layer = 0; layer < (model.layers_differ() ? model.layers : 1); ++layer) {
    const LayerShape s = model.of(layer);
    std::string why = gpu::unsupported_shape(s.q_heads, s.kv_heads, s.head_dim);
    if (why.empty() && s.value_dim != s.head_dim) {
      why = "there are no GPU kernels for values narrower than keys: value_dim " +
            std::to_string(s.value_dim) + ", head_dim " + std::to_string(s.head_dim);
    }
    if (why.empty()) continue;
    return model.layers_differ() ? "layer " + std::to_string(layer) + ": " + why : why;
  }
  return {};
}

void check_mode(keyhole_mode mode) {
  keyhole_session_config c{};
  c.mode = mode;
  check_setting(setting(kSessionSettings, "mode"), &c);
}

SessionParams::SessionParams(const keyhole_session_config& config)
    : keyhole_session_config(config) {
  auto& base = static_cast<keyhole_session_config&>(*this);
  complete(kSessionSettings, &base);
  base.struct_size = sizeof(keyhole_session_config);
  base.index = nullptr;
  base.budgets = nullptr;
  base.dense_layers = nullptr;
  base.dense_layer_count = 0;
}

SessionParams check_session(const keyhole_session_config& c, const ModelShape& model,
                            const CodeRoom& room) {
  for (const Setting& s : kSessionSettings) check_setting(s, &c);
  SessionParams p(c);
  const bool int8 = p.kv_host == KEYHOLE_KV_HOST_INT8;
  if (c.flush_block == KEYHOLE_AUTO && (room || int8)) p.flush_block = kCodeBlock;
  if (int8 && p.flush_block % kScaleRows != 0) {
    bad("flush_block is " + std::to_string(p.flush_block) + " with kv_host int8" +
        ", allowed: multiples of " + std::to_string(kScaleRows) + ", or KEYHOLE_AUTO (0) for " +
        std::to_string(kScaleRows));
  }
  p.budget = check_embedded_budget(c.budget);
  p.index = c.index == nullptr ? std::string(kAutoIndex) : c.index;
  if (c.dense_layer_count != 0 && c.dense_layers == nullptr) {
    bad("dense_layers is NULL with dense_layer_count " + std::to_string(c.dense_layer_count));
  }
  for (uint32_t i = 0; i < c.dense_layer_count; ++i) {
    check_range("dense_layers[i]", c.dense_layers[i], 0, model.layers - 1);
    p.dense_layers.push_back(c.dense_layers[i]);
  }
  std::sort(p.dense_layers.begin(), p.dense_layers.end());
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (model.slides(layer)) p.sliding_layers.push_back(layer);
  }
  p.dense_layers.erase(std::unique(p.dense_layers.begin(), p.dense_layers.end()),
                       p.dense_layers.end());
  if (p.index == kExactIndex) {
    if (p.mode == KEYHOLE_MODE_RESIDENT) {
      bad("index is \"exact\" with the mode KEYHOLE_MODE_RESIDENT (2), which reads no offloaded "
          "token; "
          "allowed: KEYHOLE_MODE_INDEXED (0) and KEYHOLE_MODE_EXACT (1)");
    }
    p.index = kExactType;
    p.mode = KEYHOLE_MODE_EXACT;
  }
  resolve_auto(p.index, p.budget, p, model, room);
  check_index(p.index);
  if (c.budgets != nullptr) apply_budgets(c.budgets, model, p);
  check_undone(p.index, model.has_rope);
  for (const HeadParams& head : p.heads) check_undone(head.index, model.has_rope);
  p.budget = completed(p.budget, p.index);
  check_codes(p.budget, p.index);
  return p;
}

void check_host_placement(const SessionParams& params) {
  if (params.offload_placement != KEYHOLE_PLACE_DEVICE) return;
  bad("offload_placement is KEYHOLE_PLACE_DEVICE (2), and the engine's device is the host, "
      "allowed: "
      "KEYHOLE_PLACE_AUTO (0), KEYHOLE_PLACE_HOST (1)");
}

keyhole_session_config public_config(const SessionParams& p) {
  keyhole_session_config c = p;
  c.index = p.index.c_str();
  c.budget = p.budget;
  c.budgets = p.budgets.empty() ? nullptr : p.budgets.c_str();
  c.dense_layers = p.dense_layers.empty() ? nullptr : p.dense_layers.data();
  c.dense_layer_count = static_cast<uint32_t>(p.dense_layers.size());
  return c;
}

keyhole_session_config initial_config() {
  keyhole_session_config c{};
  c.struct_size = sizeof c;
  set_initial(kSessionSettings, &c);
  c.budget.struct_size = sizeof c.budget;
  set_initial(kBudgetSettings, &c.budget);
  return c;
}

}  // namespace keyhole::runtime
