// The balanced space of keys whose RoPE is undone: RoPE turns pairs of channels into each other, so the scales of the
// keys that the model compares are not theirs.
#pragma once

#include <vector>

#include "index/index.h"
#include "index/partitions/rope_undo.h"

namespace keyhole::index {

/// key_scale of learn_balance() for the keys and queries of `input` with their RoPE undone, `[dim]`. Queries of unknown
/// positions are left out. input.keys are the rows of the index from 0 on.
[[nodiscard]] std::vector<float> undone_scale(const cpu::Kernels& kernels, const BuildInput& input,
                                              const RopeUndo& rope);

}  // namespace keyhole::index
