#include "tools/llama/keyhole_cache.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace keyhole::tools {

keyhole_dtype kv_dtype_of(const LlamaConfig& model) {
  if (model.dtype == "bfloat16") return KEYHOLE_BF16;
  return model.dtype == "float32" ? KEYHOLE_F32 : KEYHOLE_F16;
}

// An engine knows the shape of the model. K and q reach the library after RoPE; its parameters are
// given so that an index may undo it.
keyhole_engine_config engine_config(const LlamaConfig& model) {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  config.layers = std::max(1U, model.full_layers());
  config.q_heads = model.q_heads;
  config.kv_heads = model.kv_heads;
  config.head_dim = model.head_dim;
  config.kv_dtype = kv_dtype_of(model);
  config.scale = static_cast<float>(model.attention_scale);
  config.softcap = static_cast<float>(model.attention_softcap);
  if (model.rope.dims != model.head_dim) return config;
  const RopeScaling& scaling = model.rope.scaling;
  switch (scaling.kind) {
    case RopeScaling::Kind::none: break;
    case RopeScaling::Kind::linear:
      config.rope_scaling = KEYHOLE_ROPE_LINEAR;
      config.rope_factor = static_cast<float>(scaling.factor);
      break;
    case RopeScaling::Kind::llama3:
      config.rope_scaling = KEYHOLE_ROPE_LLAMA3;
      config.rope_factor = static_cast<float>(scaling.factor);
      config.rope_low_freq_factor = static_cast<float>(scaling.low_freq_factor);
      config.rope_high_freq_factor = static_cast<float>(scaling.high_freq_factor);
      config.rope_original_context = scaling.original_context;
      break;
    case RopeScaling::Kind::yarn:
    case RopeScaling::Kind::longrope: return config;
  }
  config.rope_theta = static_cast<float>(model.rope.theta);
  return config;
}

namespace {

ElementType element_of(keyhole_dtype dtype) {
  if (dtype == KEYHOLE_BF16) return ElementType::bf16;
  return dtype == KEYHOLE_F32 ? ElementType::f32 : ElementType::f16;
}
keyhole_dtype dtype_of(ElementType type) {
  if (type == ElementType::bf16) return KEYHOLE_BF16;
  return type == ElementType::f32 ? KEYHOLE_F32 : KEYHOLE_F16;
}

}  // namespace

KeyholeCache KeyholeCache::with_engine(const LlamaConfig& model,
                                       const KeyholeCacheOptions& options) {
  KeyholeCache cache;
  cache.q_heads_ = model.q_heads;
  cache.kv_heads_ = model.kv_heads;
  cache.head_dim_ = model.head_dim;
  cache.places_ = model.places_among_full();
  cache.has_full_layers_ = model.full_layers() > 0;
  cache.format_ = options.kv_format;
  if (cache.format_ && cache.head_dim_ % kKvFormatBlock != 0) {
    throw std::runtime_error("K and V in blocks of 32 numbers: head_dim is " +
                             std::to_string(cache.head_dim_) + "; allowed: multiples of 32");
  }
  keyhole_engine_config engine = engine_config(model);
  if (options.kv_dtype) engine.kv_dtype = *options.kv_dtype;
  cache.kv_type_ = element_of(engine.kv_dtype);
  engine.threads = options.threads;
  engine.device = options.device;
  if (!options.classifiers.empty()) engine.classifiers = options.classifiers.c_str();
  cache.engine_ = make_engine(engine);
  check(keyhole_engine_get_config(cache.engine_.get(), &engine));
  // A format works on host memory, which the rows of a step then come through.
  cache.on_device_ = engine.device == KEYHOLE_DEVICE_CUDA && !cache.format_;
  if (model.full_layers() == model.layers) return cache;
  if (cache.on_device_) {
    cache.device_windows_ =
        std::make_unique<DeviceWindows>(model, cache.kv_type_, options.max_tokens);
  } else {
    cache.windows_.emplace(model, cache.kv_type_, options.max_tokens);
  }
  return cache;
}

KeyholeCache::KeyholeCache(const LlamaConfig& model, const KeyholeCacheOptions& options)
    : KeyholeCache(with_engine(model, options)) {
  audited_ = options.audit_share > 0.0;
  // A session is one sequence. Sessions of the same engine share its threads.
  keyhole_session_config session;
  keyhole_session_config_init(&session);
  session.max_tokens = options.max_tokens;
  session.sink = options.sink;
  session.window = options.window;
  session.index = options.index.c_str();
  session.budget.top_k = options.top_k;
  if (options.budget) session.budget = *options.budget;
  session.mode = options.mode;
  session.dense_layers = options.dense_layers.data();
  session.dense_layer_count = static_cast<uint32_t>(options.dense_layers.size());
  session.tail_partition = options.tail_partition;
  if (!options.budgets.empty()) session.budgets = options.budgets.c_str();
  session.kv_host = options.kv_host;
  session.audit_share = options.audit_share;
  session.audit_action = options.audit_action;
  session.audit_bound = options.audit_bound;
  apply_settings(options.settings, &session);
  session_ = make_session(engine_, session);
}

void apply_settings(const std::vector<SettingValue>& values, void* config) {
  for (const auto& [setting, value] : values) {
    visit_number(*setting, config, [number = value](auto& field) {
      field = static_cast<std::decay_t<decltype(field)>>(number);
    });
  }
}

KeyholeCache KeyholeCache::load(const LlamaConfig& model, const KeyholeCacheOptions& options,
                                const std::string& path) {
  if (options.kv_format) throw std::runtime_error("a saved session has K and V of its own");
  check_can_be_saved(model);
  KeyholeCache cache = with_engine(model, options);
  keyhole_session* session = nullptr;
  check(keyhole_load(cache.engine_.get(), path.c_str(), &session));
  cache.session_.reset(session);
  cache.audited_ = cache.config().audit_share > 0.0;
  return cache;
}

void KeyholeCache::check_can_be_saved(const LlamaConfig& model) {
  if (model.full_layers() == model.layers) return;
  throw std::runtime_error("sessions of models with sliding windows cannot be saved: " +
                           std::to_string(model.layers - model.full_layers()) + " of " +
                           std::to_string(model.layers) + " layers keep their tokens beside them");
}

void KeyholeCache::save(const std::string& path) const {
  if (windows_ || device_windows_)
    throw std::runtime_error("a cache with sliding windows cannot be saved");
  check(keyhole_save(session_.get(), path.c_str()));
}

keyhole_session_config KeyholeCache::config() const {
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  check(keyhole_session_get_config(session_.get(), &config));
  return config;
}

KeyholeCache KeyholeCache::fork() const {
  KeyholeCache copy;
  copy.q_heads_ = q_heads_;
  copy.kv_heads_ = kv_heads_;
  copy.head_dim_ = head_dim_;
  copy.audited_ = audited_;
  copy.on_device_ = on_device_;
  copy.kv_type_ = kv_type_;
  copy.places_ = places_;
  copy.has_full_layers_ = has_full_layers_;
  if (windows_) copy.windows_.emplace(*windows_);
  if (device_windows_) copy.device_windows_ = std::make_unique<DeviceWindows>(*device_windows_);
  copy.format_ = format_;
  keyhole_session* session = nullptr;
  check(keyhole_fork(session_.get(), &session));
  copy.session_.reset(session);
  return copy;
}

void KeyholeCache::prefill(const LayerChunk& chunk) {
  const auto n = static_cast<int64_t>(chunk.tokens);
  const int64_t kv_shape[] = {n, kv_heads_, head_dim_};
  const int64_t q_shape[] = {n, q_heads_, head_dim_};
  const size_t numbers = chunk.tokens * kv_heads_ * head_dim_;
  const float* const keys = stored(chunk.k, numbers, stored_k_);
  const float* const values = stored(chunk.v, numbers, stored_v_);
  const std::optional<uint32_t> layer = place(chunk.layer);
  if (!layer && device_windows_) {
    device_windows_->append(chunk.layer, chunk.tokens, keys, values);
    return;
  }
  if (!layer) {
    windows_->append(chunk.layer, chunk.tokens, keys, values);
    return;
  }
  const keyhole_tensor k = keyhole_tensor_host(keys, KEYHOLE_F32, 3, kv_shape);
  const keyhole_tensor v = keyhole_tensor_host(values, KEYHOLE_F32, 3, kv_shape);
  const keyhole_tensor q = keyhole_tensor_host(chunk.q, KEYHOLE_F32, 3, q_shape);
  append(*layer, k, v, q);
}

void KeyholeCache::prefill(const DeviceLayerChunk& chunk) {
  if (!place(chunk.layer)) return device_windows_->append(chunk, stream_);
  const auto n = static_cast<int64_t>(chunk.tokens);
  const int64_t kv_shape[] = {n, kv_heads_, head_dim_};
  const int64_t q_shape[] = {n, q_heads_, head_dim_};
  const keyhole_dtype dtype = dtype_of(chunk.type);
  const auto on_device = [](const void* data, keyhole_dtype numbers, const int64_t* shape) {
    keyhole_tensor tensor = keyhole_tensor_host(data, numbers, 3, shape);
    tensor.memory = KEYHOLE_DEVICE;
    return tensor;
  };
  append(*place(chunk.layer), on_device(chunk.k, dtype, kv_shape),
         on_device(chunk.v, dtype, kv_shape),
         on_device(chunk.q, dtype == KEYHOLE_F32 ? KEYHOLE_F32 : KEYHOLE_F16, q_shape));
}

void KeyholeCache::append(uint32_t layer, const keyhole_tensor& k, const keyhole_tensor& v,
                          const keyhole_tensor& q) {
  const auto start = std::chrono::steady_clock::now();
  check(keyhole_prefill(session_.get(), layer, &k, &v, &q));
  prefill_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void KeyholeCache::build(keyhole_progress_fn progress, void* user) {
  if (has_full_layers_) check(keyhole_build(session_.get(), progress, user));
}

void KeyholeCache::attend(uint32_t layer, const float* q, const float* k, const float* v,
                          float* out, Team* team) {
  const size_t numbers = size_t{kv_heads_} * head_dim_;
  const float* const new_k = stored(k, numbers, stored_k_);
  const float* const new_v = stored(v, numbers, stored_v_);
  const std::optional<uint32_t> number = place(layer);
  if (!number && device_windows_) {
    device_windows_->attend(layer, q, new_k, new_v, out);
    return;
  }
  if (!number) {
    windows_->append(layer, 1, new_k, new_v);
    windows_->attend(layer, q, out, team);
    return;
  }
  const keyhole_tensor queries = heads(q, q_heads_);
  const keyhole_tensor keys = heads(new_k, kv_heads_);
  const keyhole_tensor values = heads(new_v, kv_heads_);
  const keyhole_tensor result = heads(out, q_heads_);
  check(keyhole_attend(session_.get(), *number, &queries, &keys, &values, &result, nullptr));
}

void KeyholeCache::attend(uint32_t layer, const float* q, float* out) {
  const std::optional<uint32_t> number = place(layer);
  if (!number && device_windows_) {
    return device_windows_->attend(layer, q, nullptr, nullptr, out);
  }
  if (!number) return windows_->attend(layer, q, out, nullptr);
  const keyhole_tensor queries = heads(q, q_heads_);
  const keyhole_tensor result = heads(out, q_heads_);
  check(keyhole_attend(session_.get(), *number, &queries, nullptr, nullptr, &result, nullptr));
}

void KeyholeCache::use_stream(void* stream) {
  check(keyhole_session_set_stream(session_.get(), stream));
  stream_ = stream;
}

void KeyholeCache::enqueue_attend(uint32_t layer, const float* q, const float* k, const float* v,
                                  float* out, const uint32_t* position) {
  const std::optional<uint32_t> number = place(layer);
  if (!number) {
    device_windows_->enqueue_attend(layer, q, k, v, out, position, stream_);
    return;
  }
  const keyhole_tensor queries = heads(q, q_heads_, KEYHOLE_DEVICE);
  const keyhole_tensor keys = heads(k, kv_heads_, KEYHOLE_DEVICE);
  const keyhole_tensor values = heads(v, kv_heads_, KEYHOLE_DEVICE);
  const keyhole_tensor result = heads(out, q_heads_, KEYHOLE_DEVICE);
  check(keyhole_attend(session_.get(), *number, &queries, &keys, &values, &result, nullptr));
}

void KeyholeCache::will_hold(uint32_t tokens) {
  if (device_windows_) device_windows_->will_hold(tokens);
}

void KeyholeCache::synchronize() { check(keyhole_session_synchronize(session_.get())); }

bool KeyholeCache::can_be_captured() const {
  return on_device_ && std::string_view(statistics().signal) == "wait";
}

bool KeyholeCache::announce() {
  if (!has_full_layers_) return true;  // the session has no part in it
  const keyhole_status status = keyhole_session_announce(session_.get());
  if (status == KEYHOLE_INVALID_ARGUMENT) return false;
  check(status);
  return true;
}

void KeyholeCache::truncate(uint32_t tokens) {
  if (windows_) windows_->truncate(tokens);  // first: it may refuse
  if (device_windows_) device_windows_->truncate(tokens);
  if (has_full_layers_) check(keyhole_truncate(session_.get(), tokens));
}

void KeyholeCache::set_index(const std::string& spec) {
  check(keyhole_session_set_index(session_.get(), spec.c_str()));
}

void KeyholeCache::set_mode(keyhole_mode mode, uint32_t top_k) {
  check(keyhole_session_set_mode(session_.get(), mode, top_k));
}

void KeyholeCache::set_attend(keyhole_attend_mode attend, float min_weight) {
  check(keyhole_session_set_attend(session_.get(), attend, min_weight));
}

void KeyholeCache::set_budget(const keyhole_budget& budget) {
  check(keyhole_session_set_budget(session_.get(), KEYHOLE_ALL, KEYHOLE_ALL, &budget));
}

keyhole_statistics KeyholeCache::statistics() const {
  keyhole_statistics statistics;
  keyhole_statistics_init(&statistics);
  check(keyhole_get_statistics(session_.get(), &statistics));
  return statistics;
}

keyhole_audit KeyholeCache::audit() const {
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  check(keyhole_get_audit(session_.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
  return audit;
}

void KeyholeCache::reset_statistics() { check(keyhole_reset_statistics(session_.get())); }

keyhole_layer_tokens KeyholeCache::layer_tokens(uint32_t layer) const {
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  check(keyhole_get_layer_tokens(session_.get(), *place(layer), &tokens));
  return tokens;
}

const float* KeyholeCache::stored(const float* data, size_t count, std::vector<float>& room) const {
  if (!format_) return data;
  room.assign(data, data + count);
  pass_through(*format_, room.data(), count);
  return room.data();
}

// A tensor is borrowed for the call: making one allocates nothing.
keyhole_tensor KeyholeCache::heads(const float* data, uint32_t heads, keyhole_memory memory) const {
  const int64_t shape[] = {heads, head_dim_};
  keyhole_tensor tensor = keyhole_tensor_host(data, KEYHOLE_F32, 2, shape);
  tensor.memory = memory;
  return tensor;
}

}  // namespace keyhole::tools
