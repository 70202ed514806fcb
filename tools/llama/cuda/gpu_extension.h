// Takes tokens behind those of a session, a chunk at a time: the products of all of them together, as in a prompt,
// and attention through the session, which decides whether all attend at once or a few at a time
// (keyhole_session_extend).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/llama/gpu_model.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// Takes `tokens`, at most kGpuTokensAtOnce, behind the `before` that the cache has, and returns the logits that
/// follow the last. `rope_tokens` chooses RoPE's frequencies (Decoder::rope_tokens()). `stream` is the cache's, see
/// use_stream(). Memory is taken for the call alone (gpu_extension_bytes()). Where it throws, the cache holds
/// `before` tokens again.
[[nodiscard]] std::vector<float> gpu_extend(const GpuModel& model, KeyholeCache& cache,
                                            std::span<const uint32_t> tokens, uint32_t before,
                                            size_t rope_tokens, void* stream);

}  // namespace keyhole::tools
