// The ranks of mpirun over NCCL: they gather in the memory of their GPUs, in the order of a stream.
#pragma once

#include <keyhole/parallel.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace keyhole::tools {

/// What each rank tells the others about itself, as plain bytes.
struct NcclReadiness {
  std::array<unsigned char, 16> gpu{};  ///< which it is, of all in the world
  uint8_t wants = 0;                    ///< its sessions lie on a CUDA device
  uint8_t may_share = 0;                ///< NCCL is told that ranks may share a GPU
  std::array<char, 110> lacks{};        ///< "": nothing
};

/// The readiness of this rank, on the first GPU that it uses. Loads NCCL where it is wanted.
[[nodiscard]] NcclReadiness nccl_readiness(bool wants);
/// Why these ranks do not use NCCL; "": they can. If none wants it: "no rank has a GPU".
[[nodiscard]] std::string nccl_obstacle(std::span<const NcclReadiness> ranks);
/// Makes a communicator of the same ranks as `over`, all of which are ready; the caller destroys it. Collective; like
/// ncclCommInitRank it waits without end for a rank that is lost meanwhile. Throws std::runtime_error where NCCL
/// fails.
[[nodiscard]] keyhole_communicator* make_nccl_ranks(keyhole_communicator* over,
                                                    const keyhole_communicator_config& config);

}  // namespace keyhole::tools
