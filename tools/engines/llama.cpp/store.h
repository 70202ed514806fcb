// Sessions kept by Keyhole. store.cpp is the only file of this folder that calls the library.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/parallel_for.h"
#include "tools/engines/llama.cpp/session.h"
#include "tools/engines/llama.cpp/settings.h"

namespace keyhole::llama_cpp {

/// Attention of a layer.
struct LayerShape {
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  float scale = 0;
  /// 0: none.
  float softcap = 0;
  /// Learned sinks, a logit of each query head that stands in its softmax without key and value. Empty: none.
  std::vector<float> sinks = {};
  bool operator==(const LayerShape&) const = default;
};

struct StoreShape {
  /// Those that Keyhole takes, in rising order of the model's.
  std::vector<LayerShape> layers;
  /// Of K and V as llama.cpp's cache has them.
  Number number = Number::kF16;
  /// The longest sequence.
  uint32_t max_tokens = 0;
  /// Of the pool. 0: one per core.
  uint32_t threads = 0;
  /// Runs the parallel work, by up to `threads` threads, in place of a pool; it outlives the store. Null: a pool.
  ParallelFor* parallel = nullptr;
  /// A CUDA device, and a cudaStream_t of it in whose order sessions work on what lies there; none: the host.
  std::optional<uint32_t> device;
  void* stream = nullptr;
  /// Bytes of that device's memory that a session may take which is made now. Null: half of what is free.
  std::function<uint64_t()> room = nullptr;
};

/// Makes sessions, and attends with prompts whose keys and values somebody else keeps.
class Store : public SessionSource {
 public:
  /// Session::attend() of several different sessions of this store, which share the work: tokens starts[i] to
  /// starts[i + 1] of the rows go on with sessions[i]. Where that fails for one of them none is of any use.
  virtual void attend_together(uint32_t layer, std::span<Session* const> sessions,
                               std::span<const uint32_t> starts, const Rows& q, const Rows& k,
                               const Rows& v, const Rows& out) = 0;
  /// Session::announce() of several different sessions with calls in the same graph: of all, or of none.
  [[nodiscard]] virtual bool announce_together(std::span<Session* const> sessions,
                                               uint64_t graph) = 0;
  /// Causal attention of the last tokens of a sequence, as many as q has, to all of k and v, by the pattern of the
  /// settings, which is not "none"; q, k and v in 16 bits, all on the device, in the order of `stream`, a cudaStream_t
  /// of it. Not on the host. Throws
  /// std::runtime_error with the library's text.
  virtual void attend_prompt(uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
                             const Rows& out, void* stream) = 0;
};

/// The library refuses a layer of this shape, or sessions of it with these settings, on that device or on the host:
/// what it says. "": it takes it.
[[nodiscard]] std::string refusal(const Settings& settings, const LayerShape& shape,
                                  std::optional<uint32_t> device = {});

/// Throws std::runtime_error with the library's text where a setting has a value that the library refuses.
void check_settings(const Settings& settings);

/// An engine, and sessions as the settings say. Throws std::runtime_error with the library's text.
[[nodiscard]] std::unique_ptr<Store> make_store(const Settings& settings, const StoreShape& shape);

/// What one sequence takes at its most tokens, in bytes, and which index that is ("auto" stands for one).
struct SequenceMemory {
  uint64_t host = 0;
  uint64_t device = 0;
  std::string index;
};
/// Of the device as much as the shape's `room` says. Throws std::runtime_error with the library's text.
[[nodiscard]] SequenceMemory memory_of(const Settings& settings, const StoreShape& shape);

}  // namespace keyhole::llama_cpp
