// The memory that a model takes on a GPU beside its session: the sizes by which the code allocates, known before
// anything of the model is read. No CUDA here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "tools/llama/config.h"
#include "tools/llama/kv_share.h"

namespace keyhole::tools {

/// The device memory that an allocation of `bytes` takes from the card: cudaMalloc gives 512 bytes at a time, and
/// large ones in pages of 2 MiB.
[[nodiscard]] uint64_t on_card(uint64_t bytes);

/// Device memory that products of matrices may use beside their arrays, in bytes.
inline constexpr size_t kProductWorkspace = size_t{32} << 20;

/// Elements of the device buffers for the layers of a chunk of tokens.
struct GpuChunkSizes {
  size_t chunk = 0;  ///< tokens
  size_t wide = 0;   ///< float `[chunk, qkv]`, `[chunk, gate and up]` or `[chunk, hidden]`
  size_t normed = 0, attended = 0, inner = 0;  ///< two __nv_bfloat16 each, `[chunk, ...]`

  /// Bytes of all of them, with the products' workspace.
  [[nodiscard]] uint64_t device_bytes() const;
};
[[nodiscard]] GpuChunkSizes gpu_chunk_sizes(const LlamaConfig& config, size_t tokens);

/// Elements of the device buffers of gpu_prefill().
struct GpuPrefillSizes {
  GpuChunkSizes rows;  ///< of the tokens whose activations exist at a time
  size_t tokens = 0;   ///< uint32_t
  size_t hidden = 0;   ///< float `[n, hidden]`
  size_t table = 0;    ///< float2 `[n, pairs]`, of all kinds of layers
  bool fine =
      false;      ///< attention is given f32, which the library takes as sums of two fp16, not f16
  size_t kv = 0;  ///< f16 or f32 `[n, kv_heads, d]`, once for K and once for V
  size_t q = 0;   ///< `[chunk, q_heads, d]`, likewise
  size_t exported =
      0;  ///< `[chunk, qkv]`, `exports` times; to a sink on the host as much pinned memory
  size_t brought =
      0;  ///< `[2, chunk, kv_heads of the sink's share, d]`, in pinned memory to a sink on the GPU
  size_t export_bytes = 0;  ///< of one of these
  /// Chunks that may be enqueued before the sink has taken them: what a sink takes longer for than the device needs for
  /// a layer's first chunks, whose attention is short, it makes up for beside the later ones.
  size_t exports = 0;
  size_t logits = 0;  ///< float `[vocab]`
  size_t lists = 0;   ///< bytes that the library takes to choose blocks

  /// Bytes of a number in attention.
  [[nodiscard]] size_t attended_bytes() const { return fine ? 4 : 2; }
  [[nodiscard]] uint64_t device_bytes() const;
  /// Bytes of pinned host memory, to a sink on the GPU or on the host.
  [[nodiscard]] uint64_t pinned_bytes(bool to_device) const {
    return uint64_t{exports} * export_bytes * (to_device ? brought : exported);
  }
};
/// Attention of prompts up to this many tokens, and of all prompts of a model in fp32, is computed as in fp32, with
/// operands of two fp16. It takes three times as long as with one, but for so short a prompt that is a tenth of the
/// whole.
inline constexpr size_t kFineTokens = 4096;

/// The sizes for a prompt of `tokens` tokens. A sink takes q, K and V of every layer in numbers of `export_bytes`
/// bytes: 4 or 2, or 0 without a sink. Chunks are the same for all of them.
/// pattern: that of the prompt's attention, as the library takes it; others than "dense" have operands of one fp16, and
/// lists of blocks. chunk: GpuModel::set_prefill_chunk(). share: that of a sink on the GPU.
[[nodiscard]] GpuPrefillSizes gpu_prefill_sizes(const LlamaConfig& config, size_t tokens,
                                                size_t export_bytes, std::string_view pattern,
                                                size_t chunk = 0, const KvShare& share = {});

/// Number of tokens that a GpuDecoder takes at once behind those that are there: enough that the weights, and the
/// offloaded keys and values, are read seldom, and few enough that a person who interrupts waits only a moment.
inline constexpr size_t kGpuTokensAtOnce = 512;
/// Bytes of device memory that taking so many tokens needs while it lasts.
[[nodiscard]] uint64_t gpu_extension_bytes(const LlamaConfig& config);

/// Bytes of device memory of a GpuDecoder's buffers for one token.
[[nodiscard]] uint64_t gpu_step_bytes(const LlamaConfig& config);

/// Bytes of device memory of a GpuModel, from the headers of the folder's safetensors files: 2 a number of a bf16
/// matrix, 4 of others (sums of two bf16; 2 where all of them happen to be bf16 numbers, which only reading them
/// shows), 4 of vectors; nothing for parts that are not run (weights.h: stays_in_file()).
/// Throws std::runtime_error for a folder whose files are missing or broken.
[[nodiscard]] uint64_t gpu_weight_bytes(const std::filesystem::path& folder,
                                        const LlamaConfig& config);

}  // namespace keyhole::tools
