// The balanced space of keys whose RoPE is undone: RoPE turns pairs of channels into each other, so the scales of the
// keys that the model compares are not theirs.
#pragma once

#include <vector>

#include "index/index.h"
#include "index/partitions/rope_undo.h"

namespace keyhole::index {

/// RoPE of the keys of `input` taken back, with pairs of unlike channels made alike before (RopeUndo::balance_pairs()),
/// by input.balance or, where there is none, by what learn_balance() says; and without the means of channels that are
/// far from 0, where keys then lie closer together. (A constant of keys before RoPE, as models with biases have, is one
/// after it, too, in pairs that turn slowly; to take it away there would leave what it turns by.) Leaves rows as they
/// are where input.rope does.
[[nodiscard]] RopeUndo balanced_undo(const cpu::Kernels& kernels, const BuildInput& input,
                                     uint32_t dim);

/// key_scale of learn_balance() for the keys and queries of `input` with their RoPE undone, `[dim]`. Queries of unknown
/// positions are left out. input.keys are the rows of the index from 0 on.
[[nodiscard]] std::vector<float> undone_scale(const cpu::Kernels& kernels, const BuildInput& input,
                                              const RopeUndo& rope);

}  // namespace keyhole::index
