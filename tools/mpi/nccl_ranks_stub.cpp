#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "tools/mpi/nccl_ranks.h"

namespace keyhole::tools {

NcclReadiness nccl_readiness(bool wants) {
  constexpr std::string_view kLacks = "this build has no NCCL (KEYHOLE_NCCL)";
  NcclReadiness own;
  own.wants = wants ? 1 : 0;
  std::copy(kLacks.begin(), kLacks.end(), own.lacks.begin());
  return own;
}

keyhole_communicator* make_nccl_ranks(keyhole_communicator* /*over*/,
                                      const keyhole_communicator_config& /*config*/) {
  throw std::runtime_error("this build has no NCCL");
}

}  // namespace keyhole::tools
