// Which components of a group's queries decide most of its scores (SparQ, step 1).
#pragma once

#include <span>

#include "cpu/types.h"

namespace keyhole::index {

// A component's size is |q_j| / s_j, that of the query in the balanced space (balance.h): |q_j| itself says nothing where
// keys are wide in some channels, and has the model's queries narrow there.

/// Writes the r components of largest sum_h |q_h[j]| / scale[j], in rising order; of equal ones the first. queries
/// `[group, dim]`, scale `[dim]` or empty (1), r 1..dim.
void choose_components(const float* queries, uint32_t group, uint32_t dim,
                       std::span<const float> scale, uint32_t r, uint32_t* components);

/// sqrt(|q|_1 / |q_r|_1) >= 1, q_r being the chosen components of q, sizes as above: how much larger than an inner
/// product over those alone one over all is taken to be, as random components would add in squares. 1 for q = 0.
[[nodiscard]] float softmax_sharpening(const float* query, uint32_t dim,
                                       std::span<const float> scale,
                                       std::span<const uint32_t> components);

}  // namespace keyhole::index
