// KVarN: turned, then scaled along both axes until every channel and every token has the same variance.
//
// Muller et al., "KVarN: Variance-Normalized KV-Cache Quantization Mitigates Error Accumulation in Reasoning Tasks"
// (arXiv 2606.03458). A tile of 128 tokens of a head is turned by a Walsh-Hadamard matrix along the channels, then
// divided by the standard deviations of its channels and of its tokens in turn, as Sinkhorn's iteration does, so that
// outlying tokens take no steps of others. Then it is rounded with a step and a zero point: keys
// per channel over the tile's tokens, values per token over up to 128 channels. The deviation along the axis of the
// steps is part of them; the other axis's is kept beside, in fp16.
//
// From other places than the paper: 16 iterations (vllm-project/vllm#44581), 4 bits of keys with 2 of values (the
// preset that its authors ship), and some first tokens in 16 bits (the authors' vllm-project/vllm#46812 has a small
// pool of them; here it is one tile). The unfinished tile is in 16 bits. Heads that are no power of two are turned by
// the largest that divides them. Nothing here was held against the authors' code.
#pragma once

#include <memory>
#include <vector>

#include "tools/caches/aging_format.h"

namespace keyhole::tools {

struct KvarnBits {
  unsigned keys = 2, values = 2;
};

/// Bits of a key: 32 of each 128 for step and zero point, and 16 of each head_dim for its token; of a value the other
/// way round, with min(128, head_dim) in place of 128. Throws as aging_layout() where head_dim is no multiple of 32.
[[nodiscard]] AgingLayout kvarn_layout(KvarnBits bits, uint32_t head_dim);
[[nodiscard]] std::shared_ptr<const AgingFormat> make_kvarn(KvarnBits bits, uint32_t head_dim);

/// The factors that normalise a tile `[tokens, channels]` by 16 iterations: numbers[t, c] = normal[t, c] *
/// of_channel[c] * of_token[t]. Channels or tokens that do not vary are not divided. Tokens come last, and have a
/// variance of 1; all channels have one variance, which their means keep below 1. So each iteration would move a
/// magnitude from one set of factors to the other, beyond fp16 in the end: those of tokens are divided by their
/// geometric mean, and those of channels multiplied by it.
struct VarianceScales {
  std::vector<double> of_channel, of_token;
};
/// Replaces the numbers by the normal ones, and returns the factors.
[[nodiscard]] VarianceScales normalise_variance(float* numbers, size_t tokens, size_t channels);

}  // namespace keyhole::tools
