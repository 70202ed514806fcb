// Takes several tokens at once behind those that the cache has, on the CPU: a later turn of a chat.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/llama/keyhole_cache.h"
#include "tools/llama/rope.h"
#include "tools/llama/team.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {

/// Number of tokens taken together: enough that reading a layer's matrices and converting them to fp32, once for all
/// of the tokens, costs little beside the products.
inline constexpr size_t kHostTokensAtOnce = 256;
/// Fewer tokens than this are taken by steps, which read matrices as they lie in their files.
inline constexpr size_t kFewestHostTokens = 8;

/// The tokens whose logits are computed.
enum class LogitsOf : uint8_t { last, each };

/// Takes `tokens` behind the `before` that the cache has, and returns the logits that follow the last, `[vocab]`, or
/// each of them, `[tokens, vocab]`. The ropes are those of full and of sliding layers. Where it throws, layers may hold
/// some of the tokens.
[[nodiscard]] std::vector<float> host_extend(const LlamaModel& model, KeyholeCache& cache,
                                             Team& team, std::span<const uint32_t> tokens,
                                             uint32_t before, const Rope& full, const Rope& sliding,
                                             LogitsOf which);

}  // namespace keyhole::tools
