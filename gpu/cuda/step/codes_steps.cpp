#include "gpu/cuda/step/codes_steps.h"

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/step/cuda_step_group.h"

namespace keyhole::gpu {

CudaCodes& cuda_codes(Codes& codes) {
  if (CudaCodes* const own = codes.on_cuda(); own != nullptr) return *own;
  throw Error(Status::invalid_argument,
              "a step on a CUDA device over codes that lie on another device");
}

void enqueue_codes(const CodesStep& step, bool ahead, cudaStream_t stream, StepGroup* group) {
  CudaStepGroup* const joint = group == nullptr ? nullptr : group->on_cuda();
  if (joint != nullptr && joint->add(step, stream, ahead)) return;
  enqueue_codes_pass(step, ahead, stream);
  enqueue_codes_rest(step, ahead, stream);
}

void enqueue_codes_pass(const CodesStep& step, bool ahead, cudaStream_t stream) {
  check(attend_codes(step, stream, ahead), "attending codes");
}

void enqueue_codes_rest(const CodesStep& step, bool ahead, cudaStream_t stream) {
  check(finish_codes(step, stream, ahead), "merging codes");
  check(settle_codes(step, stream), "a second look at codes");
}

}  // namespace keyhole::gpu
