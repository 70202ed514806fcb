#include "tools/engines/llama.cpp/store.h"

#include <keyhole/batch.h>
#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>
#include <keyhole/layers.h>
#include <keyhole/prefill.h>
#include <keyhole/save.h>
#include <keyhole/stream.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {
namespace {

void check(keyhole_status status) {
  if (status != KEYHOLE_OK) throw std::runtime_error(keyhole_last_error());
}

struct DestroyEngine {
  void operator()(keyhole_engine* engine) const { keyhole_engine_destroy(engine); }
};
struct DestroySession {
  void operator()(keyhole_session* session) const { keyhole_session_destroy(session); }
};
struct DestroyPrompt {
  void operator()(keyhole_prompt* prompt) const { keyhole_prompt_destroy(prompt); }
};
using Prompt = std::unique_ptr<keyhole_prompt, DestroyPrompt>;
using Engine = std::unique_ptr<keyhole_engine, DestroyEngine>;
using Handle = std::unique_ptr<keyhole_session, DestroySession>;

keyhole_dtype dtype(Number number) {
  switch (number) {
    case Number::kF16: return KEYHOLE_F16;
    case Number::kBf16: return KEYHOLE_BF16;
    default: return KEYHOLE_F32;
  }
}

/// The rows as the library wants them: rank 3, or rank 2 of a single token's.
keyhole_tensor tensor(const Rows& rows, bool single) {
  const int64_t size = rows.number == Number::kF32 ? 4 : 2;
  keyhole_tensor t{};
  t.data = const_cast<void*>(rows.data);
  t.dtype = dtype(rows.number);
  t.memory = rows.on_device ? KEYHOLE_DEVICE : KEYHOLE_HOST;
  const std::array shape{rows.tokens, rows.heads, rows.components};
  const std::array strides{rows.token_stride / size, rows.head_stride / size, int64_t{1}};
  t.rank = single ? 2 : 3;
  std::copy(shape.begin() + (single ? 1 : 0), shape.end(), t.shape);
  std::copy(strides.begin() + (single ? 1 : 0), strides.end(), t.strides);
  return t;
}

void to_log(void* /*user*/, int32_t level, const char* text) {
  log(level == KEYHOLE_LOG_WARNING ? Level::kWarning : Level::kDebug, text);
}

/// Whether two layers differ in their learned sinks alone, which are no part of a layer's configuration.
bool same_kind(const LayerShape& a, LayerShape b) {
  b.sinks = a.sinks;
  return a == b;
}

/// The learned sinks of all layers one after the other, -inf where a layer has none. Empty: no layer has any.
std::vector<float> all_sinks(const StoreShape& shape) {
  if (std::all_of(shape.layers.begin(), shape.layers.end(),
                  [](const LayerShape& layer) { return layer.sinks.empty(); })) {
    return {};
  }
  std::vector<float> all;
  for (const LayerShape& layer : shape.layers) {
    std::vector<float> own = layer.sinks;
    own.resize(layer.q_heads, -std::numeric_limits<float>::infinity());
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

/// The configuration of an engine, and the arrays that it points to.
class EngineConfig {
 public:
  explicit EngineConfig(const StoreShape& shape) : sinks_(all_sinks(shape)) {
    const LayerShape& first = shape.layers.front();
    keyhole_engine_config_init(&config_);
    config_.layers = static_cast<uint32_t>(shape.layers.size());
    config_.q_heads = first.q_heads;
    config_.kv_heads = first.kv_heads;
    config_.head_dim = first.head_dim;
    config_.scale = first.scale;
    config_.softcap = first.softcap;
    config_.kv_dtype = dtype(shape.number);
    config_.threads = shape.threads;
    if (shape.parallel != nullptr) {
      config_.run_user = shape.parallel;
      config_.run = [](void* parallel, keyhole_task_fn task, void* context, uint32_t count) {
        static_cast<ParallelFor*>(parallel)->run(task, context, count);
      };
    }
    config_.device = shape.device ? KEYHOLE_DEVICE_CUDA : KEYHOLE_DEVICE_HOST;
    config_.device_ordinal = shape.device.value_or(0);
    if (!sinks_.empty()) config_.sink_logits = sinks_.data();
    if (std::all_of(shape.layers.begin(), shape.layers.end(),
                    [&](const LayerShape& layer) { return same_kind(layer, first); })) {
      return;
    }
    for (const LayerShape& layer : shape.layers) {
      keyhole_layer_config& own = layers_.emplace_back();
      keyhole_layer_config_init(&own, &config_);
      own.q_heads = layer.q_heads;
      own.kv_heads = layer.kv_heads;
      own.head_dim = layer.head_dim;
      own.scale = layer.scale;
      own.softcap = layer.softcap;
    }
    config_.layer_configs = layers_.data();
    config_.layer_count = config_.layers;
  }
  EngineConfig(const EngineConfig&) = delete;
  EngineConfig& operator=(const EngineConfig&) = delete;
  keyhole_engine_config& get() { return config_; }

 private:
  keyhole_engine_config config_{};
  std::vector<float> sinks_;
  std::vector<keyhole_layer_config> layers_;
};

Engine make_engine(const StoreShape& shape, bool logs) {
  EngineConfig config(shape);
  if (logs) config.get().log = to_log;
  keyhole_engine* engine = nullptr;
  check(keyhole_engine_create(&config.get(), &engine));
  return Engine(engine);
}

keyhole_tail_mode tail_mode(const std::string& word) {
  if (word == "mean") return KEYHOLE_TAIL_MEAN;
  if (word == "centroid") return KEYHOLE_TAIL_CENTROID;
  if (word == "second") return KEYHOLE_TAIL_SECOND;
  if (word == "codes") return KEYHOLE_TAIL_CODES;
  return KEYHOLE_TAIL_NONE;
}

/// As many as the library reads where a budget says nothing.
constexpr uint32_t kExactRows = 16;

/// Points to texts of the settings.
keyhole_session_config session_config(const Settings& settings, uint32_t max_tokens) {
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  config.max_tokens = max_tokens;
  config.sink = settings.sink;
  config.window = settings.window;
  if (settings.index == "exact") {
    config.mode = KEYHOLE_MODE_EXACT;
    config.index = "auto";
  } else {
    config.index = settings.index.c_str();
  }
  // The library completes a budget that nobody has touched by what suits codes. One of which a part is set is set as a
  // whole: with `top_k` alone the tokens that are not read would weigh nothing.
  if (settings.index.starts_with("codes") && (settings.tail.empty() || settings.tail == "codes")) {
    config.budget.top_k = kExactRows;
    config.budget.tail = KEYHOLE_TAIL_CODES;
  }
  if (!settings.tail.empty()) config.budget.tail = tail_mode(settings.tail);
  if (settings.top_k != 0) config.budget.top_k = settings.top_k;
  if (settings.int8) config.kv_host = KEYHOLE_KV_HOST_INT8;
  if (!settings.budgets.empty()) config.budgets = settings.budgets.c_str();
  return config;
}

/// device_bytes: that it may take at most; 0: half of what is free.
Handle make_handle(keyhole_engine* engine, const Settings& settings, uint32_t max_tokens,
                   uint64_t device_bytes = 0) {
  keyhole_session_config config = session_config(settings, max_tokens);
  config.device_memory_limit = device_bytes;
  keyhole_session* session = nullptr;
  check(keyhole_session_create(engine, &config, &session));
  Handle handle(session);
  if (settings.prompt != "none") {
    check(
        keyhole_session_set_extend_pattern(session, settings.prompt.c_str(), settings.prompt_from));
  }
  // Its graph is guided by the prompt's queries, and built when all of them are known.
  if (settings.index.starts_with("roargraph")) {
    check(keyhole_session_set_prompt_chunk(session, settings.prompt_from));
  }
  return handle;
}

class KeyholeSession final : public Session {
 public:
  KeyholeSession(Handle handle, bool indexed, const StoreShape& shape)
      : handle_(std::move(handle)),
        indexed_(indexed),
        device_(shape.device),
        stream_(shape.stream) {
    if (device_) check(keyhole_session_set_stream(handle_.get(), stream_));
  }

  [[nodiscard]] keyhole_session* handle() const { return handle_.get(); }

  [[nodiscard]] uint32_t tokens(uint32_t layer) const override {
    keyhole_layer_tokens tokens;
    keyhole_layer_tokens_init(&tokens);
    check(keyhole_session_get_layer_tokens(handle_.get(), layer, &tokens));
    return tokens.total;
  }
  void attend(uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
              const Rows& out) override {
    const bool one = q.tokens == 1;
    const keyhole_tensor tq = tensor(q, one);
    const keyhole_tensor tk = tensor(k, one);
    const keyhole_tensor tv = tensor(v, one);
    const keyhole_tensor to = tensor(out, one);
    check(one ? keyhole_session_attend(handle_.get(), layer, &tq, &tk, &tv, &to, nullptr)
              : keyhole_session_extend(handle_.get(), layer, &tq, &tk, &tv, nullptr, &to, nullptr));
  }
  void append(uint32_t layer, const Rows& k, const Rows& v) override {
    const keyhole_tensor tk = tensor(k, false);
    const keyhole_tensor tv = tensor(v, false);
    check(keyhole_session_append(handle_.get(), layer, &tk, &tv, nullptr));
  }
  void truncate(uint32_t tokens) override {
    check(keyhole_session_truncate(handle_.get(), tokens));
  }
  void read(uint32_t layer, uint32_t first, const Rows& k, const Rows& v) override {
    const keyhole_tensor tk = tensor(k, false);
    const keyhole_tensor tv = tensor(v, false);
    check(keyhole_session_get_rows(handle_.get(), layer, first, k.data != nullptr ? &tk : nullptr,
                                   v.data != nullptr ? &tv : nullptr));
  }
  void build() override {
    if (indexed_) check(keyhole_session_build(handle_.get(), nullptr, nullptr));
  }
  void settle() override { check(keyhole_session_synchronize(handle_.get())); }
  [[nodiscard]] uint64_t graph() const override {
    uint64_t number = 0;
    check(keyhole_session_get_graph(handle_.get(), &number));
    return number;
  }
  [[nodiscard]] bool announce(uint64_t graph) override {
    const keyhole_status status = keyhole_session_announce_graph(handle_.get(), graph);
    if (status == KEYHOLE_INVALID_ARGUMENT) return false;
    check(status);
    return true;
  }
  [[nodiscard]] std::unique_ptr<Session> fork() override {
    keyhole_session* copy = nullptr;
    check(keyhole_session_fork(handle_.get(), &copy));
    StoreShape shape;
    shape.device = device_;
    shape.stream = stream_;
    return std::make_unique<KeyholeSession>(Handle(copy), indexed_, shape);
  }
  [[nodiscard]] std::string describe() const override {
    keyhole_statistics s;
    keyhole_statistics_init(&s);
    check(keyhole_session_get_statistics(handle_.get(), &s));
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    check(keyhole_session_get_config(handle_.get(), &c));
    keyhole_layer_tokens t;
    keyhole_layer_tokens_init(&t);
    check(keyhole_session_get_layer_tokens(handle_.get(), 0, &t));
    constexpr double kMiB = 1048576;
    std::array<char, 100> memory{};
    if (device_) {
      std::snprintf(memory.data(), memory.size(), "%.1f MiB of the card, %.1f of the host",
                    static_cast<double>(s.device_bytes) / kMiB,
                    static_cast<double>(s.host_bytes) / kMiB);
    } else {
      std::snprintf(memory.data(), memory.size(), "%.1f MiB of the host",
                    static_cast<double>(s.host_bytes + s.device_bytes) / kMiB);
    }
    const auto attends = static_cast<double>(s.attends);
    // Of a device's steps the host knows no times, nor which heads gave up.
    std::array<char, 250> steps{};
    int length = device_ || s.attends == 0
                     ? std::snprintf(steps.data(), steps.size(), "%llu steps",
                                     static_cast<unsigned long long>(s.attends))
                     : std::snprintf(steps.data(), steps.size(),
                                     "%llu steps of %.0f us a layer, %.2f MiB read in each",
                                     static_cast<unsigned long long>(s.attends),
                                     s.attend_seconds / attends * 1e6,
                                     static_cast<double>(s.bytes_read) / attends / kMiB);
    if (s.codes_doubted > 0 && length > 0) {
      const auto doubted = static_cast<double>(s.codes_doubted);
      length += std::snprintf(steps.data() + length, steps.size() - static_cast<size_t>(length),
                              ", %.2f heads in doubt in each, %.0f rows read for one",
                              doubted / static_cast<double>(std::max<uint64_t>(s.attends, 1)),
                              static_cast<double>(s.keys_opened) / doubted);
      if (!device_) {
        std::snprintf(steps.data() + length, steps.size() - static_cast<size_t>(length),
                      ", all for %.0f %%", 100 * static_cast<double>(s.codes_given_up) / doubted);
      }
    }
    std::array<char, 500> line{};
    std::snprintf(line.data(), line.size(),
                  "%u tokens (sink %u, window %u, indexed %u, pending %u), index %s%s, %s (index "
                  "%.1f), %s, build %.2f s",
                  t.total, t.sink, t.window, t.indexed, t.pending,
                  c.mode == KEYHOLE_MODE_EXACT ? "exact" : c.index,
                  c.kv_host == KEYHOLE_KV_HOST_INT8 ? ", K and V in int8" : "", memory.data(),
                  static_cast<double>(s.index_bytes) / kMiB, steps.data(), s.build_seconds);
    return line.data();
  }

 private:
  Handle handle_;
  bool indexed_;
  std::optional<uint32_t> device_;
  void* stream_;
};

class KeyholeStore final : public Store {
 public:
  KeyholeStore(const Settings& settings, const StoreShape& shape)
      : settings_(settings), shape_(shape), engine_(make_engine(shape, true)) {
    if (!shape.device || settings.prompt == "none") return;
    keyhole_prompt* prompt = nullptr;
    check(keyhole_prompt_create(engine_.get(), settings.prompt.c_str(), &prompt));
    prompt_.reset(prompt);
  }

  [[nodiscard]] std::unique_ptr<Session> make() override {
    return std::make_unique<KeyholeSession>(
        make_handle(engine_.get(), settings_, shape_.max_tokens, shape_.room ? shape_.room() : 0),
        settings_.index != "exact", shape_);
  }
  void attend_together(uint32_t layer, std::span<Session* const> sessions,
                       std::span<const uint32_t> starts, const Rows& q, const Rows& k,
                       const Rows& v, const Rows& out) override {
    const std::vector<keyhole_session*> handles = handles_of(sessions);
    const keyhole_tensor tq = tensor(q, false);
    const keyhole_tensor tk = tensor(k, false);
    const keyhole_tensor tv = tensor(v, false);
    const keyhole_tensor to = tensor(out, false);
    check(keyhole_session_extend_batch(handles.data(), static_cast<uint32_t>(handles.size()), layer,
                                       &tq, &tk, &tv, starts.data(), &to, nullptr, nullptr));
  }
  [[nodiscard]] bool announce_together(std::span<Session* const> sessions,
                                       uint64_t graph) override {
    const std::vector<keyhole_session*> handles = handles_of(sessions);
    const keyhole_status status = keyhole_session_announce_batch(
        handles.data(), static_cast<uint32_t>(handles.size()), graph);
    if (status == KEYHOLE_INVALID_ARGUMENT) return false;
    check(status);
    return true;
  }
  void attend_prompt(uint32_t layer, const Rows& q, const Rows& k, const Rows& v, const Rows& out,
                     void* stream) override {
    const keyhole_tensor tq = tensor(q, false);
    const keyhole_tensor tk = tensor(k, false);
    const keyhole_tensor tv = tensor(v, false);
    const keyhole_tensor to = tensor(out, false);
    check(keyhole_prompt_attend(prompt_.get(), layer, &tq, &tk, &tv, &to, nullptr, stream));
  }

 private:
  /// They are all made by make(), or copies of such.
  static std::vector<keyhole_session*> handles_of(std::span<Session* const> sessions) {
    std::vector<keyhole_session*> handles;
    for (Session* session : sessions) {
      handles.push_back(static_cast<KeyholeSession*>(session)->handle());
    }
    return handles;
  }

  Settings settings_;
  StoreShape shape_;
  Engine engine_;
  Prompt prompt_;
};

}  // namespace

std::string refusal(const Settings& settings, const LayerShape& shape,
                    std::optional<uint32_t> device) {
  try {
    Settings any_layer = settings;
    any_layer.budgets.clear();  // a file is for all layers of a model
    const Engine engine =
        make_engine({{shape}, Number::kF16, 0, 1, nullptr, device, nullptr}, false);
    (void)make_handle(engine.get(), any_layer, 1024);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void check_settings(const Settings& settings) {
  if (keyhole_abi_version() != KEYHOLE_ABI_VERSION) {
    throw std::runtime_error("libkeyhole has ABI version " + std::to_string(keyhole_abi_version()) +
                             ", this backend was built for " + std::to_string(KEYHOLE_ABI_VERSION));
  }
  Settings any_model = settings;
  any_model.budgets.clear();  // a file is for one model, and is read when there is one
  const Engine engine =
      make_engine({{{1, 1, 64, 0, 0}}, Number::kF16, 0, 1, nullptr, {}, nullptr}, false);
  (void)make_handle(engine.get(), any_model, 1024);
}

std::unique_ptr<Store> make_store(const Settings& settings, const StoreShape& shape) {
  return std::make_unique<KeyholeStore>(settings, shape);
}

SequenceMemory memory_of(const Settings& settings, const StoreShape& shape) {
  EngineConfig engine(shape);
  keyhole_session_config session = session_config(settings, shape.max_tokens);
  if (session.mode == KEYHOLE_MODE_EXACT) session.index = "exact";  // plans ask for no mode
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  const uint64_t room = shape.room ? shape.room() : 0;
  check(keyhole_plan(&engine.get(), &session, shape.max_tokens, room, 0, &plan));
  return {plan.host_bytes, plan.device_bytes, plan.index};
}

}  // namespace keyhole::llama_cpp
