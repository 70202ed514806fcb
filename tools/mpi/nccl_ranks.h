// The ranks of mpirun over NCCL: what they gather then lies in the memory of their GPUs, in the order of a stream.
#pragma once

#include <keyhole/parallel.h>

#include <string>

namespace keyhole::tools {

/// A communicator of the same ranks as `over`, whose first device each of them uses; the caller destroys it. Collective. Null on all
/// ranks where a build, a library or a GPU of a rank's own is missing, and `why` says which. Throws std::runtime_error where NCCL fails.
[[nodiscard]] keyhole_communicator* make_nccl_ranks(keyhole_communicator* over,
                                                    const keyhole_communicator_config& config,
                                                    std::string& why);

}  // namespace keyhole::tools
