#include <algorithm>

#include "tools/mpi/nccl_ranks.h"

namespace keyhole::tools {

std::string nccl_obstacle(std::span<const NcclReadiness> ranks) {
  if (std::none_of(ranks.begin(), ranks.end(), [](const auto& r) { return r.wants != 0; })) {
    return "no rank has a GPU";
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r);
    if (ranks[r].wants == 0) return rank + " has its sessions on the host";
    if (ranks[r].lacks[0] != 0) return rank + ": " + std::string(ranks[r].lacks.data());
    for (size_t s = 0; s < r; ++s) {
      if (ranks[r].gpu != ranks[s].gpu || (ranks[r].may_share != 0 && ranks[s].may_share != 0)) {
        continue;
      }
      return "rank " + std::to_string(s) + " and " + rank + " share a GPU";
    }
  }
  return "";
}

}  // namespace keyhole::tools
