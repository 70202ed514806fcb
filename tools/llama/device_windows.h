// K and V of sliding layers in the memory of a GPU, for a session that lies there, too. No CUDA in this header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "runtime/files/safetensors.h"
#include "tools/llama/config.h"
#include "tools/llama/prefill.h"

namespace keyhole::tools {

/// One ring for each sliding layer, with WindowSpan::kSlack tokens behind the window. Steps may be enqueued, and captured in graphs: then they take their token's position
/// from device memory, and will_hold() tells how far the sequence goes. One thread and one stream at a time; copies go on by
/// themselves, and want that nothing enqueued is under way. Throws std::runtime_error with what CUDA says.
class DeviceWindows {
 public:
  /// K and V are stored as `type`: f32, f16 or bf16. `max_tokens`: the longest sequence; 0: not known.
  DeviceWindows(const LlamaConfig& model, ElementType type, uint32_t max_tokens);
  DeviceWindows(const DeviceWindows& other);
  DeviceWindows& operator=(const DeviceWindows&) = delete;
  ~DeviceWindows();

  /// Appends k and v `[tokens, Hkv, d]` in host memory to a sliding layer. Throws for more than max_tokens.
  void append(uint32_t layer, size_t tokens, const float* k, const float* v);
  /// The same from device memory, in the rings' type, made by work on `stream` (a cudaStream_t); waits for it.
  void append(const DeviceLayerChunk& chunk, void* stream);

  /// One token in host memory: appends k and v `[Hkv, d]`, unless they are null, and attends with q `[Hq, d]`.
  void attend(uint32_t layer, const float* q, const float* k, const float* v, float* out);
  /// The same, enqueued with arrays in device memory, where the token's position lies as well.
  void enqueue_attend(uint32_t layer, const float* q, const float* k, const float* v, float* out,
                      const uint32_t* position, void* stream);
  /// What is enqueued next brings the sequence to so many tokens. Throws for more than max_tokens.
  void will_hold(uint32_t tokens);

  /// Forgets all tokens from `tokens` on. Throws std::runtime_error, and changes nothing, where a window would begin before
  /// what is kept; to 0 it can always go.
  void truncate(uint32_t tokens);

 private:
  class Rings;
  std::unique_ptr<Rings> rings_;
};

}  // namespace keyhole::tools
