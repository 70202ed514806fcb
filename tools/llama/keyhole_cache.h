// Everything that a decoder says to Keyhole, in one place. Read this file before embedding the library.
//
// A decoder without Keyhole keeps a KV cache: it appends each token's K and V, and attends to all
// of them with each query. KeyholeCache has the same two verbs, prefill and attend; behind them a
// keyhole_session keeps sink and window resident and finds the rest through an index.
//
// Layers that attend only to a sliding window (Mistral, Gemma) have nothing to search. The session's first layers are
// the others, counted from 0; sliding ones follow them. Here layers are named by their number in the model; in
// dense_layers, classifiers and budgets, which go to the library as they are, by that of the session.
#pragma once

#include <keyhole/inspect.h>
#include <keyhole/layers.h>
#include <keyhole/parallel.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/files/settings.h"
#include "tools/api/handles.h"
#include "tools/caches/kv_format.h"
#include "tools/llama/aging_rows.h"
#include "tools/llama/config.h"
#include "tools/llama/engine_config.h"
#include "tools/llama/kv_share.h"
#include "tools/llama/prefill.h"

namespace keyhole::tools {

/// A value for a number of the table of settings.
struct SettingValue {
  const Setting* setting = nullptr;
  double value = 0.0;
};

/// The ranks that have one cache together; all make the same calls.
struct CacheRanks {
  keyhole_communicator* communicator = nullptr;  ///< null: there is one
  /// Whether each rank holds its share of the heads, and gets those of the others with every answer; otherwise it
  /// holds its share of the tokens.
  bool by_heads = false;
  uint32_t block = 0;  ///< of shares of tokens, see keyhole_engine_config.context_block
  /// Whether the communicator gathers device memory in the order of a stream.
  bool on_device = false;
  uint32_t timeout_ms = 0;  ///< of the communicator
};

struct KeyholeCacheOptions {
  uint32_t max_tokens =
      0;  ///< capacity for prompt and generated tokens together; 0: the library's default
  uint32_t sink = 128;
  uint32_t window = 512;
  std::string index = "auto";
  uint32_t top_k = 100;
  std::optional<keyhole_budget> budget;  ///< of every head, in place of top_k
  keyhole_mode mode = KEYHOLE_MODE_INDEXED;
  std::optional<keyhole_dtype> kv_dtype;  ///< absent: that of the model
  keyhole_kv_host kv_host = KEYHOLE_KV_HOST_SAME;
  /// K and V pass through this format as they enter the cache, so that attention sees what a cache in that format
  /// would give back. Keyhole itself stores them in kv_dtype (f32 adds no rounding of its own). Steps then come
  /// through host memory, even where sink and window lie on a GPU: on_device() is false.
  std::optional<KvFormat> kv_format;
  /// In place of kv_format: a format whose tokens age. Those of layers with a sliding window stay in 16 bits. What is
  /// said of kv_format holds, too; rows come to Keyhole when the first step (or build()) behind them asks for them, and
  /// those that age between steps are taken out and appended again. mode is KEYHOLE_MODE_EXACT.
  std::shared_ptr<const AgingFormat> aging;
  uint32_t threads = 0;                         ///< the library's workers; 0: its default
  keyhole_device device = KEYHOLE_DEVICE_HOST;  ///< where sink and window lie
  std::vector<uint32_t> dense_layers;
  std::string classifiers;  ///< a file of `keyhole train-saap`; empty: none
  std::string budgets;      ///< a file of `keyhole calibrate`; empty: none
  uint32_t tail_partition = KEYHOLE_AUTO;
  double audit_share = 0.0;
  keyhole_audit_action audit_action = KEYHOLE_AUDIT_REPORT;
  float audit_bound = 0.0F;  ///< 0: the library's default
  CacheRanks ranks;
  std::vector<SettingValue>
      settings;  ///< of keyhole_session_config, in place of what is said above
};

/// Puts the values into a struct of their table.
void apply_settings(const std::vector<SettingValue>& values, void* config);

/// The KV cache of one sequence. Throws LibraryError with the library's own text. One thread at a time.
class KeyholeCache {
 public:
  KeyholeCache(const LlamaConfig& model, const KeyholeCacheOptions& options);
  /// The content of a saved cache, for the library to check: the model's id and the tokens that it holds.
  struct Contents {
    std::string model;
    std::vector<int32_t> tokens;
  };
  /// Loads the cache that save() wrote to `path`. Of the options only the engine's count: kv_dtype, threads, device,
  /// classifiers; all others are the saved ones. kv_format and aging are not allowed. Other contents than these are
  /// refused; null: any are taken.
  [[nodiscard]] static KeyholeCache load(const LlamaConfig& model,
                                         const KeyholeCacheOptions& options,
                                         const std::string& path,
                                         const Contents* contents = nullptr);
  /// Whether this process shall write the files that accompany the cache.
  [[nodiscard]] bool writes() const { return writes_; }
  /// Writes tokens, indexes and settings to `path` by keyhole_session_save(), with their contents where they are known.
  void save(const std::string& path, const Contents* contents = nullptr) const;
  /// The session's settings in effect. Its texts and layers are valid until the next call that changes them.
  [[nodiscard]] keyhole_session_config config() const;

  /// Appends a chunk of the prompt to one layer. Its queries guide index types that learn from them.
  void prefill(const LayerChunk& chunk);
  /// Appends a chunk from a GPU, where on_device(). The chunk is complete, its type is kv_type(), and what of it lies
  /// on the host is of kv_share().
  void prefill(const DeviceLayerChunk& chunk);
  /// What of a prompt's keys and values this rank stores on its host.
  [[nodiscard]] const KvShare& kv_share() const { return share_; }
  /// Seconds of wall time of the calls of prefill().
  [[nodiscard]] double prefill_seconds() const { return prefill_seconds_; }
  /// Brings what the prefill appended into the index. `progress` may be null.
  void build(keyhole_progress_fn progress, void* user);

  /// One layer of one decoding step: appends k and v `[Hkv, d]`, attends with q `[Hq, d]`, writes
  /// out `[Hq, d]`; all fp32 after RoPE.
  void attend(uint32_t layer, const float* q, const float* k, const float* v, float* out);
  /// attend() for several tokens, each of which attends to those before it: out `[tokens, Hq, d]`.
  void extend(const LayerChunk& chunk, float* out);
  /// Sets the pattern by which such calls attend from now on, see keyhole_session_set_extend_pattern; empty: none.
  /// extend_blocks() counts the blocks of tokens that all of them attended.
  void set_extend_pattern(const std::string& pattern);
  [[nodiscard]] PromptBlocks extend_blocks() const;
  /// Attends again without appending.
  void attend(uint32_t layer, const float* q, float* out);

  /// The type in which K and V are stored: f32, f16 or bf16.
  [[nodiscard]] ElementType kv_type() const { return kv_type_; }
  /// Whether sink and window lie on a GPU, so that steps may come from there. Then a step may be enqueued on a stream
  /// of it (a cudaStream_t; null: the default one), with arrays as in attend(), but in device memory. synchronize()
  /// waits for all that was enqueued, and throws its errors.
  [[nodiscard]] bool on_device() const { return on_device_; }
  void use_stream(void* stream);
  /// room: device memory as large as out, where shares_heads(); otherwise it may be null.
  void enqueue_attend(uint32_t layer, const float* q, const float* k, const float* v, float* out,
                      float* room);
  /// Whether ranks share the heads. Then the other ranks' answers come with this one's, and several tokens are not
  /// enqueued at once.
  [[nodiscard]] bool shares_heads() const { return heads_of_ranks_ != nullptr; }
  /// Call it on all ranks where shares_heads(): throws where one of them has failed (why: this rank's reason) or does
  /// not come; then nothing on the stream waits for it any more.
  void meet_ranks(const std::exception* why = nullptr);
  /// enqueue_attend() for n tokens behind those that are there, each of which attends to those before it: q, out `[n,
  /// Hq, d]`, k, v `[n, Hkv, d]`.
  void enqueue_extend(uint32_t layer, uint32_t n, const float* q, const float* k, const float* v,
                      float* out);
  void synchronize();
  /// Whether steps on the stream may be captured in a graph. announce() comes before each launch of it, and returns
  /// false where the session has changed since: then the steps must be captured again, after synchronize().
  [[nodiscard]] bool can_be_captured() const;
  [[nodiscard]] bool announce();

  /// Forgets all tokens from `tokens` on. Throws std::runtime_error, and changes nothing, where a sliding window
  /// would begin before the kept tokens (kWindowSlack behind it).
  void truncate(uint32_t tokens);

  /// Change how the same tokens are attended. set_index() needs a build() before the index is used.
  void set_index(const std::string& spec);
  void set_mode(keyhole_mode mode, uint32_t top_k);
  void set_attend(keyhole_attend_mode attend, float min_weight);
  /// Sets the budget of every head. A tail or target needs a build() where the heads had none before.
  void set_budget(const keyhole_budget& budget);

  /// Copies the sequence; the copy goes on by itself.
  [[nodiscard]] KeyholeCache fork() const;

  [[nodiscard]] keyhole_statistics statistics() const;
  /// Whether steps are audited; audit() gives the findings, and waits for audits under way.
  [[nodiscard]] bool audited() const { return audited_; }
  [[nodiscard]] keyhole_audit audit() const;
  void reset_statistics();
  [[nodiscard]] keyhole_layer_tokens layer_tokens(uint32_t layer) const;

 private:
  KeyholeCache() = default;
  /// Makes a cache that has no session yet.
  static KeyholeCache with_engine(const LlamaConfig& model, const KeyholeCacheOptions& options);
  void append(uint32_t layer, const keyhole_tensor& k, const keyhole_tensor& v,
              const keyhole_tensor& q);
  [[nodiscard]] keyhole_tensor heads(const float* data, uint32_t heads,
                                     keyhole_memory memory = KEYHOLE_HOST) const;
  enum class Kind : uint8_t { keys, values };
  /// The `count` numbers as kv_format gives them back: `data` itself without a format, otherwise in memory that is
  /// valid until the next call for the same kind.
  const float* stored(const float* data, size_t count, Kind kind);

  // Of a cache whose tokens age, in keyhole_cache_aging.cpp.
  /// Takes rows of a prompt, which deliver() appends.
  void hold(const LayerChunk& chunk);
  /// Brings the session to what the cache holds between two steps; does nothing without aging, and within a step.
  void deliver();
  /// Takes back the session's rows that may still change; deliver() appends them again.
  void withdraw(uint32_t settled);
  /// truncate(), before the session's.
  void truncate_aging(uint32_t tokens);

  /// Describes heads [first, first + own) of rows of `heads` heads, for n tokens.
  [[nodiscard]] keyhole_tensor own_rows(const void* data, uint32_t heads, uint32_t own,
                                        size_t tokens, keyhole_memory memory = KEYHOLE_HOST,
                                        keyhole_dtype dtype = KEYHOLE_F32) const;
  /// Where the own heads' answers to n tokens are written: `out`, or memory from which gather_heads() puts them there
  /// with the others'.
  [[nodiscard]] float* own_out(float* out, size_t tokens);
  void gather_heads(float* out, size_t tokens);

  uint32_t q_heads_ = 0, kv_heads_ = 0, head_dim_ = 0;
  // The ranks that share the heads, where the session has only some of them.
  keyhole_communicator* heads_of_ranks_ = nullptr;  ///< null: it has all
  uint32_t own_q_heads_ = 0, own_kv_heads_ = 0;
  KvShare share_;
  std::vector<float> own_out_, all_out_;
  bool writes_ = true;
  bool audited_ = false;
  bool on_device_ = false;
  void* stream_ = nullptr;
  ElementType kv_type_ = ElementType::f32;
  double prefill_seconds_ = 0.0;
  std::vector<uint32_t> places_;  ///< the session's number of each layer
  std::optional<KvFormat> format_;
  std::optional<AgingRows> aging_;
  AgingRows::State given_;      ///< which the session has
  uint32_t given_settled_ = 0;  ///< rows before it stay as they are in the session
  bool given_all_ =
      false;  ///< the session has all tokens of aging_, not just those before given_settled_
  std::vector<float> stored_k_, stored_v_;  ///< of a chunk or a step, with a format
  Engine engine_;  ///< null in a fork: its session keeps what it needs of the engine
  Session session_;
};

}  // namespace keyhole::tools
