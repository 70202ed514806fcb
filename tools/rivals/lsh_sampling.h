// lsh: attention estimated from keys sampled by locality-sensitive hashing, as in MagicPIG.
//
// Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation", ICLR 2025 (arXiv 2410.16179). Keys are centred
// (which adds the same number to all logits of a query, so the softmax stays as it is) and hashed into `tables`
// tables by the signs of `bits` random projections. A key is sampled if it shares the query's bucket in at least two
// tables. By SimHash one bit agrees with probability u = 1 - angle / pi, so with a = u^bits a key is sampled with
// probability
//   p = 1 - (1 - a)^tables - tables * a * (1 - a)^(tables - 1),
// and its weight 1 / p makes the sums of exp(logit) and of exp(logit) v unbiased estimates of those over all keys.
// Each query head has its own sample.
#pragma once

#include "tools/rivals/rival.h"

namespace keyhole::tools {

/// The probability p that a key whose cosine with the query is `cosine` is sampled: that at least two of `tables`
/// tables of `bits` bits agree.
[[nodiscard]] double lsh_probability(double cosine, size_t bits, size_t tables);

}  // namespace keyhole::tools
