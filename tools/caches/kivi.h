// KIVI: keys rounded per channel, values per token.
//
// Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024 (arXiv 2402.02750). Keys have
// channels of large magnitude, so that 32 tokens of a channel share a step and a zero point; of values, 32 channels of
// a token do (section 3.2). Newest tokens stay in 16 bits (section 3.3, algorithm 1, R = 128): keys age 128 at once,
// when the residual is full, so that 0 to 127 of them are in 16 bits; values age behind the newest 128, here in runs of
// 32 tokens, where the paper's age one by one. No sink.
#pragma once

#include <memory>

#include "tools/caches/aging_format.h"

namespace keyhole::tools {

/// Bits: 2 or 4 of a number, and 32 of each 32. Throws as aging_layout() where head_dim is no multiple of 32.
[[nodiscard]] AgingLayout kivi_layout(unsigned bits, uint32_t head_dim);
[[nodiscard]] std::shared_ptr<const AgingFormat> make_kivi(unsigned bits, uint32_t head_dim);

}  // namespace keyhole::tools
