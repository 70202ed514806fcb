// blocks: blocks of consecutive tokens found by a few representative keys of each, attended exactly, as in InfLLM.
//
// Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory", NeurIPS
// 2024 (arXiv 2402.04617). A token's representative score is the mean inner product of its key with the queries of
// the `local` tokens after it; the tokens of a block with the largest scores represent it. A block's relevance to a
// step is the sum of the inner products of its representatives with the query. A trace holds the queries of some
// tokens only: the mean is over these, over all later ones where none of them is near enough, and over all where
// positions are unknown. The heads of a group choose their blocks together, by the sum of their relevances, because
// they share the keys.
#pragma once

#include "tools/rivals/rival.h"

namespace keyhole::tools {

/// The scores `[rows]` of all rows, from training queries.
[[nodiscard]] std::vector<float> representative_scores(const RivalData& data, size_t local);

}  // namespace keyhole::tools
