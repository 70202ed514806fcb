#include "tools/llama/gpu_sizes.h"

#include <algorithm>
#include <stdexcept>

#include "runtime/files/safetensors.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

/// A chunk of 8192 tokens is 512 or more blocks of the attention for 8 heads: 2 waves on 132 multiprocessors of
/// 2 blocks. Wider models have smaller ones, so that a chunk's activations stay below 1 GiB.
constexpr size_t kLongestChunk = 8192;
constexpr size_t kChunkBytes = size_t{1} << 30;
// Bytes of all exports of a number: two of f32, four of 16 bits.
constexpr size_t kExportedAtOnce = 8;

size_t chunk_tokens(const LlamaConfig& config, size_t n) {
  const size_t qkv = config.q_width() + 2 * config.kv_width();
  const size_t inner = config.intermediate_size;
  const size_t bytes_per_token = 4 * std::max(qkv, 2 * inner) +
                                 4 * (config.hidden_size + config.q_width() + inner) +
                                 2 * config.q_width() + 2 * 4 * qkv;
  const size_t fitting = kChunkBytes / bytes_per_token / 128 * 128;
  return std::min(n, std::clamp<size_t>(fitting, 128, kLongestChunk));
}

/// Pairs of all kinds of layers together.
size_t rope_pairs(const LlamaConfig& config) {
  const bool slides = config.full_layers() < config.layers;
  return config.rope.dims / 2 + (slides ? config.sliding_rope.dims / 2 : 0);
}

}  // namespace

uint64_t on_card(uint64_t bytes) {
  const uint64_t page = bytes < (uint64_t{1} << 20) ? 512 : uint64_t{2} << 20;
  return (bytes + page - 1) / page * page;
}

GpuChunkSizes gpu_chunk_sizes(const LlamaConfig& config, size_t tokens) {
  GpuChunkSizes sizes;
  sizes.chunk = tokens;
  sizes.wide =
      tokens * std::max({config.q_width() + 2 * config.kv_width(),
                         2 * size_t{config.intermediate_size}, size_t{config.hidden_size}});
  sizes.normed = tokens * config.hidden_size;
  sizes.attended = tokens * config.q_width();
  sizes.inner = tokens * config.intermediate_size;
  return sizes;
}

uint64_t GpuChunkSizes::device_bytes() const {
  return on_card(4 * wide) +
         2 * (on_card(2 * normed) + on_card(2 * attended) + on_card(2 * inner)) +
         on_card(kProductWorkspace);
}

GpuPrefillSizes gpu_prefill_sizes(const LlamaConfig& config, size_t tokens, size_t export_bytes,
                                  std::string_view pattern, size_t wanted_chunk,
                                  const KvShare& share) {
  // What keyhole_prompt_attend() says: for at least 16 tiles of queries, a list and 8 samples of each block of 64
  // tokens.
  constexpr size_t kListBytes = size_t{160} << 20U;
  const size_t least_lists =
      size_t{16} * (8 * sizeof(float) + 2) * config.q_heads * (tokens / 64 + 1);
  // Up to so many tokens the library's own choice is dense.
  constexpr size_t kAutoDense = 16384;
  const bool dense = pattern == "dense" || (pattern == "auto" && tokens <= kAutoDense);
  GpuPrefillSizes sizes;
  sizes.rows = gpu_chunk_sizes(
      config, wanted_chunk == 0 ? chunk_tokens(config, tokens) : std::min(tokens, wanted_chunk));
  const size_t chunk = sizes.rows.chunk;
  sizes.tokens = tokens;
  sizes.hidden = tokens * config.hidden_size;
  sizes.table = tokens * rope_pairs(config);
  sizes.fine = tokens <= kFineTokens || (dense && config.dtype == "float32");
  sizes.lists = dense || sizes.fine ? 0 : std::max(kListBytes, least_lists);
  sizes.kv = tokens * config.kv_width();
  sizes.q = chunk * config.q_width();
  sizes.exported = export_bytes == 0 ? 0 : chunk * (config.q_width() + 2 * config.kv_width());
  sizes.brought =
      export_bytes == 0 ? 0 : 2 * chunk * share.heads_of(config.kv_heads) * config.head_dim;
  sizes.export_bytes = export_bytes;
  sizes.exports = export_bytes == 0 ? 0 : kExportedAtOnce / export_bytes;
  sizes.logits = config.vocab_size;
  return sizes;
}

uint64_t GpuPrefillSizes::device_bytes() const {
  const size_t size = attended_bytes();
  const uint64_t attended = 2 * on_card(size * kv) + on_card(size * q);
  // The library's copy of numbers in f32 as sums of two fp16.
  const uint64_t copies = fine ? on_card(size * (2 * kv + q)) : 0;
  return rows.device_bytes() + attended + copies + on_card(4 * hidden) + on_card(4 * logits) +
         on_card(lists) + exports * on_card(export_bytes * exported) + on_card(4 * tokens) +
         2 * on_card(4 * table);  // one or two tables
}

uint64_t gpu_extension_bytes(const LlamaConfig& config) {
  const size_t n = kGpuTokensAtOnce;
  const size_t qkv = config.q_width() + 2 * config.kv_width();
  return gpu_chunk_sizes(config, n).device_bytes() + on_card(4 * n) +
         2 * on_card(4 * n * rope_pairs(config)) + on_card(4 * n * config.hidden_size) +
         on_card(4 * n * qkv) + on_card(4 * n * config.q_width()) +
         on_card(4 * size_t{config.vocab_size});
}

uint64_t gpu_step_bytes(const LlamaConfig& config) {
  // The token and its place; RoPE's turns and frequencies, twice where there are two kinds of layers.
  uint64_t bytes = on_card(8) + 4 * on_card(8 * rope_pairs(config));
  for (const size_t floats : {size_t{config.hidden_size}, config.q_width() + 2 * config.kv_width(),
                              config.q_width(), size_t{config.intermediate_size},
                              size_t{config.vocab_size}, gpu_chunk_sizes(config, 1).wide}) {
    bytes += on_card(4 * floats);
  }
  return bytes;
}

uint64_t gpu_weight_bytes(const fs::path& folder, const LlamaConfig& config) {
  uint64_t bytes = 0;
  bool any = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    any = true;
    const SafetensorsFile file(entry.path());
    for (const auto& [name, tensor] : file.tensors()) {
      if (stays_in_file(name, config)) continue;
      uint64_t numbers = 1;
      for (const size_t side : tensor.shape) numbers *= side;
      const bool matrix = tensor.shape.size() > 1;
      if (matrix && tensor.type != ElementType::bf16) {
        bytes += 2 * on_card(2 * numbers);  // the upper and the lower half of each number
      } else {
        bytes += on_card((matrix ? 2 : 4) * numbers);
      }
    }
  }
  if (!any) throw std::runtime_error(folder.string() + ": holds no safetensors files");
  return bytes;
}

}  // namespace keyhole::tools
