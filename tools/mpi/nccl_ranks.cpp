// NCCL and libkeyhole_nccl are loaded here and not before: the command starts where they are not installed.
#include "tools/mpi/nccl_ranks.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <keyhole/nccl.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace keyhole::tools {
namespace {

struct Library {
  decltype(&ncclGetUniqueId) get_id = nullptr;
  decltype(&ncclCommInitRank) init_rank = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclGetErrorString) text_of = nullptr;
  decltype(&keyhole_communicator_from_nccl) communicator_from = nullptr;

  /// "": all is there. What is loaded stays until the process ends.
  std::string load() {
    void* const nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void* const keyhole =
        nccl == nullptr ? nullptr : dlopen(KEYHOLE_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (keyhole == nullptr) {
      const char* const error = dlerror();
      return error == nullptr ? "NCCL cannot be loaded" : error;
    }
    const auto find = [](void* library, const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    const bool has_all =
        find(nccl, "ncclGetUniqueId", get_id) && find(nccl, "ncclCommInitRank", init_rank) &&
        find(nccl, "ncclCommDestroy", destroy) && find(nccl, "ncclGetErrorString", text_of) &&
        find(keyhole, "keyhole_communicator_from_nccl", communicator_from);
    return has_all ? "" : "the NCCL that was loaded lacks functions";
  }
};

/// What each rank tells of itself.
struct Readiness {
  cudaUUID_t gpu{};
  char lacks[112] = {};  ///< "": nothing
};

Readiness look(Library& library) {
  Readiness own;
  std::string lacks = library.load();
  int gpus = 0;
  cudaDeviceProp properties;
  if (lacks.empty() && (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0 ||
                        cudaGetDeviceProperties(&properties, 0) != cudaSuccess)) {
    lacks = "there is no CUDA device";
  }
  if (lacks.empty()) own.gpu = properties.uuid;
  std::strncpy(own.lacks, lacks.c_str(), sizeof own.lacks - 1);
  return own;
}

void check(keyhole_status status) {
  if (status != KEYHOLE_OK) throw std::runtime_error(keyhole_last_error());
}

/// Why these ranks cannot use NCCL; "": they can.
std::string obstacle(const std::vector<Readiness>& all) {
  const char* const shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool may_share = shared != nullptr && std::string_view(shared) == "1";
  for (size_t r = 0; r < all.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r);
    if (all[r].lacks[0] != 0) return rank + ": " + all[r].lacks;
    for (size_t s = 0; s < r && !may_share; ++s) {
      if (std::memcmp(&all[r].gpu, &all[s].gpu, sizeof all[r].gpu) == 0) {
        return rank + " and rank " + std::to_string(s) + " share a GPU";
      }
    }
  }
  return "";
}

}  // namespace

keyhole_communicator* make_nccl_ranks(keyhole_communicator* over,
                                      const keyhole_communicator_config& config, std::string& why) {
  Library nccl;
  const Readiness own = look(nccl);
  const uint32_t rank = keyhole_communicator_rank(over), size = keyhole_communicator_size(over);
  std::vector<Readiness> all(size);
  check(keyhole_communicator_gather(over, &own, all.data(), sizeof own));
  why = obstacle(all);
  if (!why.empty()) return nullptr;
  const auto check_nccl = [&](ncclResult_t result, const char* what) {
    if (result == ncclSuccess) return;
    throw std::runtime_error(std::string(what) + ": " + nccl.text_of(result));
  };
  ncclUniqueId id{};
  if (rank == 0) check_nccl(nccl.get_id(&id), "ncclGetUniqueId");
  check(keyhole_communicator_broadcast(over, &id, sizeof id, 0));
  if (cudaSetDevice(0) != cudaSuccess) throw std::runtime_error("cudaSetDevice(0) failed");
  ncclComm_t comm = nullptr;
  check_nccl(nccl.init_rank(&comm, static_cast<int>(size), id, static_cast<int>(rank)),
             "ncclCommInitRank");
  keyhole_communicator* made = nullptr;
  const keyhole_status status = nccl.communicator_from(&comm, &config, &made);
  const std::string text = status == KEYHOLE_OK ? "" : keyhole_last_error();
  (void)nccl.destroy(comm);
  if (status != KEYHOLE_OK) throw std::runtime_error(text);
  return made;
}

}  // namespace keyhole::tools
