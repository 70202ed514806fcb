// RankStates of a CUDA device.
#pragma once

#include <memory>

#include "gpu/rank_states.h"

namespace keyhole::gpu {

/// On device `ordinal`. Throws Error(unsupported) with more ranks than kMostMergedStates, Error(out_of_device_memory).
[[nodiscard]] std::unique_ptr<RankStates> make_cuda_rank_states(int ordinal,
                                                                const RankStatesShape& shape);

}  // namespace keyhole::gpu
