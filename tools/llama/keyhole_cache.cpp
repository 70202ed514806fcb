#include "tools/llama/keyhole_cache.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "runtime/files/float16.h"

namespace keyhole::tools {
namespace {

// A session waits for the device, in whose stream the ranks' gathers are, by this much longer than the ranks wait for
// each other.
constexpr uint32_t kBeyondRanksMs = 10000;

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
  uint32_t sliding = model.full_layers();
  for (const auto& place : model.places_among_full()) {
    cache.places_.push_back(place ? *place : sliding++);
  }
  cache.format_ = options.kv_format;
  if (cache.format_ && cache.head_dim_ % kKvFormatBlock != 0) {
    throw std::runtime_error("K and V in blocks of 32 numbers: head_dim is " +
                             std::to_string(cache.head_dim_) + "; allowed: multiples of 32");
  }
  if (options.aging) {
    cache.aging_.emplace(options.aging, static_cast<uint32_t>(cache.places_.size()),
                         model.full_layers(), cache.kv_heads_, cache.head_dim_);
  }
  keyhole_engine_config engine = engine_config(model);
  if (options.kv_dtype) engine.kv_dtype = *options.kv_dtype;
  cache.kv_type_ = element_of(engine.kv_dtype);
  cache.own_q_heads_ = engine.q_heads;
  cache.own_kv_heads_ = engine.kv_heads;
  cache.writes_ = keyhole_communicator_get_rank(options.ranks.communicator) == 0;
  if (options.ranks.communicator != nullptr && options.ranks.by_heads) {
    const uint32_t size = keyhole_communicator_get_size(options.ranks.communicator);
    if (engine.kv_heads % size != 0) {
      throw std::runtime_error("the model has " + std::to_string(engine.kv_heads) +
                               " KV heads, which " + std::to_string(size) +
                               " ranks cannot share equally; allowed: a number of ranks that "
                               "divides them");
    }
    cache.heads_of_ranks_ = options.ranks.communicator;
    engine.q_heads = cache.own_q_heads_ /= size;
    engine.kv_heads = cache.own_kv_heads_ /= size;
    cache.share_.heads = cache.own_kv_heads_;
    cache.share_.first_head =
        cache.own_kv_heads_ * keyhole_communicator_get_rank(options.ranks.communicator);
  } else {
    engine.communicator = options.ranks.communicator;
    engine.context_block = options.ranks.block;
  }
  // Steps stand behind gathers, which wait for the other ranks.
  if (cache.shares_heads() && options.ranks.on_device) {
    engine.timeout_ms = options.ranks.timeout_ms + kBeyondRanksMs;
  }
  engine.threads = options.threads;
  engine.device = options.device;
  if (!options.classifiers.empty()) engine.classifiers = options.classifiers.c_str();
  std::vector<keyhole_layer_config> layers;  // to which the config points
  if (model.full_layers() != model.layers) layers = add_sliding_layers(model, engine);
  cache.engine_ = make_engine(engine);
  keyhole_engine_config made;
  keyhole_engine_config_init(&made);
  check(keyhole_engine_get_config(cache.engine_.get(), &made));
  if (engine.communicator != nullptr) {
    cache.share_.block = made.context_block;
    cache.share_.rank = keyhole_communicator_get_rank(engine.communicator);
    cache.share_.ranks = keyhole_communicator_get_size(engine.communicator);
  }
  // A format works on host memory, so the rows of a step come through it. The same holds for ranks whose transport
  // gathers host memory alone.
  cache.on_device_ = made.device == KEYHOLE_DEVICE_CUDA && !cache.format_ && !cache.aging_ &&
                     (options.ranks.communicator == nullptr || options.ranks.on_device);
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

namespace {

[[noreturn]] void refuse_heads() {
  throw std::runtime_error(
      "sessions whose heads are shared by ranks are neither saved nor loaded; allowed: one "
      "process, "
      "or ranks that share the tokens (--parallel context)");
}

}  // namespace

KeyholeCache KeyholeCache::load(const LlamaConfig& model, const KeyholeCacheOptions& options,
                                const std::string& path, const Contents* contents) {
  if (options.kv_format || options.aging)
    throw std::runtime_error("a saved session has K and V of its own");
  if (options.ranks.communicator != nullptr && options.ranks.by_heads) refuse_heads();
  KeyholeCache cache = with_engine(model, options);
  keyhole_session* session = nullptr;
  keyhole_load_options expected;
  keyhole_load_options_init(&expected);
  if (contents != nullptr) {
    expected.model = contents->model.c_str();
    expected.tokens = contents->tokens.data();
    expected.token_count = contents->tokens.size();
  }
  check(keyhole_session_load(cache.engine_.get(), path.c_str(), &expected, &session));
  cache.session_.reset(session);
  cache.audited_ = cache.config().audit_share > 0.0;
  return cache;
}

void KeyholeCache::save(const std::string& path, const Contents* contents) const {
  if (shares_heads()) refuse_heads();
  if (contents != nullptr) {
    const std::vector<int32_t>& tokens = contents->tokens;
    check(keyhole_session_set_identity(session_.get(), contents->model.c_str(),
                                       tokens.empty() ? nullptr : tokens.data(), tokens.size()));
  }
  check(keyhole_session_save(session_.get(), path.c_str()));
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
  copy.heads_of_ranks_ = heads_of_ranks_;
  copy.own_q_heads_ = own_q_heads_;
  copy.own_kv_heads_ = own_kv_heads_;
  copy.share_ = share_;
  copy.writes_ = writes_;
  copy.audited_ = audited_;
  copy.on_device_ = on_device_;
  copy.kv_type_ = kv_type_;
  copy.places_ = places_;
  copy.format_ = format_;
  copy.aging_ = aging_;
  copy.given_ = given_;
  copy.given_settled_ = given_settled_;
  copy.given_all_ = given_all_;
  keyhole_session* session = nullptr;
  check(keyhole_session_fork(session_.get(), &session));
  copy.session_.reset(session);
  return copy;
}

void KeyholeCache::prefill(const LayerChunk& chunk) {
  if (aging_) return hold(chunk);
  const size_t numbers = chunk.tokens * kv_heads_ * head_dim_;
  const float* const keys = stored(chunk.k, numbers, Kind::keys);
  const float* const values = stored(chunk.v, numbers, Kind::values);
  const keyhole_tensor k = own_rows(keys, kv_heads_, own_kv_heads_, chunk.tokens);
  const keyhole_tensor v = own_rows(values, kv_heads_, own_kv_heads_, chunk.tokens);
  const keyhole_tensor q = own_rows(chunk.q, q_heads_, own_q_heads_, chunk.tokens);
  append(places_[chunk.layer], k, v, q);
}

void KeyholeCache::prefill(const DeviceLayerChunk& chunk) {
  const keyhole_dtype dtype = dtype_of(chunk.type);
  const auto rows = [&](const void* data) {
    if (!chunk.kv_on_host) {
      return own_rows(data, kv_heads_, own_kv_heads_, chunk.tokens, KEYHOLE_DEVICE, dtype);
    }
    const int64_t shape[] = {static_cast<int64_t>(chunk.tokens), own_kv_heads_, head_dim_};
    keyhole_tensor t = keyhole_tensor_host(data, dtype, 3, shape);
    t.memory = KEYHOLE_PINNED;
    return t;
  };
  append(places_[chunk.layer], rows(chunk.k), rows(chunk.v),
         own_rows(chunk.q, q_heads_, own_q_heads_, chunk.tokens, KEYHOLE_DEVICE,
                  dtype == KEYHOLE_F32 ? KEYHOLE_F32 : KEYHOLE_F16));
}

void KeyholeCache::append(uint32_t layer, const keyhole_tensor& k, const keyhole_tensor& v,
                          const keyhole_tensor& q) {
  const auto start = std::chrono::steady_clock::now();
  check(keyhole_session_append(session_.get(), layer, &k, &v, &q));
  prefill_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void KeyholeCache::build(keyhole_progress_fn progress, void* user) {
  deliver();
  check(keyhole_session_build(session_.get(), progress, user));
}

void KeyholeCache::attend(uint32_t layer, const float* q, const float* k, const float* v,
                          float* out) {
  deliver();
  const size_t numbers = size_t{kv_heads_} * head_dim_;
  const float* const new_k = stored(k, numbers, Kind::keys);
  const float* const new_v = stored(v, numbers, Kind::values);
  const keyhole_tensor queries = own_rows(q, q_heads_, own_q_heads_, 1);
  const keyhole_tensor keys = own_rows(new_k, kv_heads_, own_kv_heads_, 1);
  const keyhole_tensor values = own_rows(new_v, kv_heads_, own_kv_heads_, 1);
  const keyhole_tensor result = heads(own_out(out, 1), own_q_heads_);
  check(keyhole_session_attend(session_.get(), places_[layer], &queries, &keys, &values, &result,
                               nullptr));
  if (aging_) aging_->add(places_[layer], k, v, 1);
  gather_heads(out, 1);
}

keyhole_tensor KeyholeCache::own_rows(const void* data, uint32_t heads, uint32_t own, size_t tokens,
                                      keyhole_memory memory, keyhole_dtype dtype) const {
  const size_t head = size_t{head_dim_} * (dtype == KEYHOLE_F32 ? 4 : 2);
  const size_t first = size_t{keyhole_communicator_get_rank(heads_of_ranks_)} * own;
  const int64_t shape[] = {static_cast<int64_t>(tokens), own, head_dim_};
  keyhole_tensor t =
      keyhole_tensor_host(static_cast<const std::byte*>(data) + first * head, dtype, 3, shape);
  t.strides[0] = int64_t{heads} * head_dim_;
  t.memory = memory;
  return t;
}

float* KeyholeCache::own_out(float* out, size_t tokens) {
  if (!shares_heads()) return out;
  own_out_.resize(tokens * own_q_heads_ * head_dim_);
  return own_out_.data();
}

void KeyholeCache::gather_heads(float* out, size_t tokens) {
  if (!shares_heads()) return;
  const uint32_t ranks = keyhole_communicator_get_size(heads_of_ranks_);
  const size_t row = size_t{own_q_heads_} * head_dim_;
  all_out_.resize(ranks * own_out_.size());
  check(keyhole_communicator_gather(heads_of_ranks_, own_out_.data(), all_out_.data(),
                                    own_out_.size() * sizeof(float)));
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t t = 0; t < tokens; ++t) {
      std::copy_n(all_out_.data() + (r * tokens + t) * row, row, out + (t * ranks + r) * row);
    }
  }
}

void KeyholeCache::extend(const LayerChunk& chunk, float* out) {
  deliver();
  const size_t n = chunk.tokens, numbers = n * kv_heads_ * head_dim_;
  const int64_t out_shape[] = {static_cast<int64_t>(n), own_q_heads_, head_dim_};
  const keyhole_tensor q = own_rows(chunk.q, q_heads_, own_q_heads_, n);
  const keyhole_tensor k =
      own_rows(stored(chunk.k, numbers, Kind::keys), kv_heads_, own_kv_heads_, n);
  const keyhole_tensor v =
      own_rows(stored(chunk.v, numbers, Kind::values), kv_heads_, own_kv_heads_, n);
  const keyhole_tensor result = keyhole_tensor_host(own_out(out, n), KEYHOLE_F32, 3, out_shape);
  check(keyhole_session_extend(session_.get(), places_[chunk.layer], &q, &k, &v, nullptr, &result,
                               nullptr));
  if (aging_) aging_->add(places_[chunk.layer], chunk.k, chunk.v, n);
  gather_heads(out, n);
}

void KeyholeCache::set_extend_pattern(const std::string& pattern) {
  check(keyhole_session_set_extend_pattern(session_.get(),
                                           pattern.empty() ? nullptr : pattern.c_str(), 1));
}

PromptBlocks KeyholeCache::extend_blocks() const {
  PromptBlocks blocks;
  check(keyhole_session_get_extend_blocks(session_.get(), &blocks.attended, &blocks.seen));
  return blocks;
}

void KeyholeCache::attend(uint32_t layer, const float* q, float* out) {
  deliver();
  const keyhole_tensor queries = own_rows(q, q_heads_, own_q_heads_, 1);
  const keyhole_tensor result = heads(own_out(out, 1), own_q_heads_);
  check(keyhole_session_attend(session_.get(), places_[layer], &queries, nullptr, nullptr, &result,
                               nullptr));
  gather_heads(out, 1);
}

void KeyholeCache::truncate(uint32_t tokens) {
  if (aging_) return truncate_aging(tokens);
  check(keyhole_session_truncate(session_.get(), tokens));
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
  check(keyhole_session_get_statistics(session_.get(), &statistics));
  return statistics;
}

keyhole_audit KeyholeCache::audit() const {
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  check(keyhole_session_get_audit(session_.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
  return audit;
}

void KeyholeCache::reset_statistics() { check(keyhole_session_reset_statistics(session_.get())); }

keyhole_layer_tokens KeyholeCache::layer_tokens(uint32_t layer) const {
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  check(keyhole_session_get_layer_tokens(session_.get(), places_[layer], &tokens));
  return tokens;
}

const float* KeyholeCache::stored(const float* data, size_t count, Kind kind) {
  if (!format_ && !aging_) return data;
  std::vector<float>& room = kind == Kind::keys ? stored_k_ : stored_v_;
  room.assign(data, data + count);
  if (aging_) {  // the newest tokens are in 16 bits
    for (float& x : room) x = f16_to_f32(f32_to_f16(x));
    return room.data();
  }
  pass_rows(*format_, room.data(), count, head_dim_, kind == Kind::values);
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
