// Which components of a group's queries decide most of its scores (SparQ, step 1).
#pragma once

#include <span>

#include "cpu/types.h"

namespace keyhole::index {

// The size of a component is |q_j| / s_j, that of the query in the balanced space (balance.h). |q_j| itself says
// nothing where keys are wide in some channels, because the model's queries are narrow there.

/// Writes the r components (1..dim) of largest sum_h |q_h[j]| / scale[j], in rising order; of equally large ones the
/// first. queries `[group, dim]`, scale `[dim]` or empty (1).
void choose_components(const float* queries, uint32_t group, uint32_t dim,
                       std::span<const float> scale, uint32_t r, uint32_t* components);

/// Returns sqrt(|q|_1 / |q_r|_1) >= 1, with q_r the chosen components of q and sizes as above: the factor by which an
/// inner product over all components is estimated to exceed one over the chosen alone, as random components would add
/// in squares. 1 for q = 0.
[[nodiscard]] float softmax_sharpening(const float* query, uint32_t dim,
                                       std::span<const float> scale,
                                       std::span<const uint32_t> components);

}  // namespace keyhole::index
