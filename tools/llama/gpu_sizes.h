// How much memory a model takes on a GPU beside its session: the sizes that the code allocates by, known before anything of the
// model is read. No CUDA here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// Device memory that an allocation of `bytes` takes from the card: cudaMalloc gives 512 bytes at a time, large ones in pages
/// of 2 MiB.
[[nodiscard]] uint64_t on_card(uint64_t bytes);

/// Device memory that products of matrices may use beside their arrays, in bytes.
inline constexpr size_t kProductWorkspace = size_t{32} << 20;

/// Elements of the device buffers for the layers of a chunk of tokens.
struct GpuChunkSizes {
  size_t chunk = 0;  ///< tokens
  size_t wide = 0;   ///< float `[chunk, qkv]`, `[chunk, gate and up]` or `[chunk, hidden]`
  size_t normed = 0, attended = 0, inner = 0;  ///< two __nv_bfloat16 each, `[chunk, ...]`

  /// With the products' workspace.
  [[nodiscard]] uint64_t device_bytes() const;
};
[[nodiscard]] GpuChunkSizes gpu_chunk_sizes(const LlamaConfig& config, size_t tokens);

/// Elements of the device buffers of gpu_prefill().
struct GpuPrefillSizes {
  GpuChunkSizes rows;  ///< of the tokens whose activations exist at a time
  size_t tokens = 0;   ///< uint32_t
  size_t hidden = 0;   ///< float `[n, hidden]`
  size_t table = 0;    ///< float2 `[n, pairs]`, of all kinds of layers
  bool fine = false;   ///< attention has operands of two fp16, not one
  size_t kv = 0;  ///< __half `[n, kv_heads, d]`, once for K and once for V, twice that where fine
  size_t q = 0;   ///< __half `[chunk, q_heads, d]`, likewise
  size_t exported = 0;      ///< `[chunk, qkv]`, twice; to a sink on the host as much pinned memory
  size_t export_bytes = 0;  ///< of one of these
  size_t logits = 0;        ///< float `[vocab]`
  size_t lists = 0;         ///< bytes that the library takes to choose blocks

  [[nodiscard]] uint64_t device_bytes() const;
};
/// Attention of a prompt of so many tokens, or of any of a model in fp32, is computed as in fp32: with operands of two fp16. It
/// takes three times as long as with one, but of so short a prompt a tenth of all.
inline constexpr size_t kFineTokens = 4096;

/// Of a prompt of `tokens` tokens; a sink takes q, K and V of every layer in numbers of `export_bytes` bytes: 4 or 2, or 0
/// without one. Chunks are the same for all of them.
/// pattern: of the prompt's attention, as the library takes it; others than "dense" have operands of one fp16, and lists of
/// blocks. chunk: GpuModel::set_prefill_chunk().
[[nodiscard]] GpuPrefillSizes gpu_prefill_sizes(const LlamaConfig& config, size_t tokens,
                                                size_t export_bytes, std::string_view pattern,
                                                size_t chunk = 0);

/// Tokens that a GpuDecoder takes at once behind those that there are: enough that the weights, and the offloaded keys and
/// values, are read seldom, few enough that a person who interrupts waits but a moment.
inline constexpr size_t kGpuTokensAtOnce = 512;
/// Device memory that this takes while it lasts.
[[nodiscard]] uint64_t gpu_extension_bytes(const LlamaConfig& config);

/// Device memory of a GpuDecoder's buffers for one token.
[[nodiscard]] uint64_t gpu_step_bytes(const LlamaConfig& config);

/// Device memory of a GpuModel, from the headers of the folder's safetensors files: 2 bytes a number of a bf16 matrix, 4 of
/// others (sums of two bf16; 2 where all of them happen to be bf16 numbers, which only reading them shows), 4 of vectors;
/// nothing of what is not run (weights.h: stays_in_file()).
/// Throws std::runtime_error for a folder whose files are missing or broken.
[[nodiscard]] uint64_t gpu_weight_bytes(const std::filesystem::path& folder,
                                        const LlamaConfig& config);

}  // namespace keyhole::tools
