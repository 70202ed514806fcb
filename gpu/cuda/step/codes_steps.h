// Steps over codes: in which order their kernels are enqueued, and which steps wait for others to go together. What
// they are told is the store's (CudaCodes::describe()), completed by who makes the step.
#pragma once

#include "gpu/codes.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/step_group.h"

namespace keyhole::gpu {

/// The codes of a CUDA device. Throws Error(invalid_argument) for those of another device.
[[nodiscard]] CudaCodes& cuda_codes(Codes& codes);

/// Enqueues a whole step: the pass over codes and resident tokens, and what follows it. ahead:
/// CudaCodes::launches_ahead(). group: the step is added to it if it can go with others, and is enqueued later; null:
/// it is enqueued now.
void enqueue_codes(const CodesStep& step, bool ahead, cudaStream_t stream,
                   StepGroup* group = nullptr);
/// The first half alone: the pass.
void enqueue_codes_pass(const CodesStep& step, bool ahead, cudaStream_t stream);
/// And the second: the choice and exact reading of the heaviest rows, the merge, and the second look at what is in
/// doubt.
void enqueue_codes_rest(const CodesStep& step, bool ahead, cudaStream_t stream);

}  // namespace keyhole::gpu
