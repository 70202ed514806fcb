// The balanced space of keys whose RoPE is undone. The scales of the keys that the model compares do not apply to
// them, because RoPE turns pairs of channels into each other.
#pragma once

#include <vector>

#include "index/index.h"
#include "index/partitions/rope_undo.h"

namespace keyhole::index {

/// Returns the undoing of RoPE for the keys of `input`, which first makes pairs of unlike channels alike
/// (RopeUndo::balance_pairs()), by input.balance or, where there is none, by learn_balance(), and subtracts the means
/// of channels that are far from 0, so that keys lie closer together. (A constant of keys before RoPE, as models with
/// biases have, is still one after it in pairs that turn slowly; subtracting it there would leave what it turns by.)
/// Where input.rope undoes nothing, rows stay as they are.
[[nodiscard]] RopeUndo balanced_undo(const cpu::Kernels& kernels, const BuildInput& input,
                                     uint32_t dim);

/// Returns key_scale of learn_balance(), `[dim]`, for the keys and queries of `input` with their RoPE undone. Queries
/// of unknown positions are left out. input.keys are the rows of the index from 0 on.
[[nodiscard]] std::vector<float> undone_scale(const cpu::Kernels& kernels, const BuildInput& input,
                                              const RopeUndo& rope);

}  // namespace keyhole::index
