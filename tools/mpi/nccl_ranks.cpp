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
#include <type_traits>

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
    // First the library of Keyhole's, which finds the NCCL that it was built with.
    void* const keyhole = dlopen(KEYHOLE_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    void* const nccl = keyhole == nullptr ? nullptr : dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (nccl == nullptr) {
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

Library& library() {
  static Library loaded;
  return loaded;
}

void check(keyhole_status status) {
  if (status != KEYHOLE_OK) throw std::runtime_error(keyhole_last_error());
}

}  // namespace

NcclReadiness nccl_readiness(bool wants) {
  NcclReadiness own;
  own.wants = wants ? 1 : 0;
  if (!wants) return own;
  const char* const shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  own.may_share = shared != nullptr && std::string_view(shared) == "1" ? 1 : 0;
  std::string lacks = library().load();
  int gpus = 0;
  cudaDeviceProp properties;
  if (lacks.empty() &&
      (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0 ||
       cudaGetDeviceProperties(&properties, 0) != cudaSuccess || cudaSetDevice(0) != cudaSuccess)) {
    lacks = "there is no CUDA device that can be used";
  }
  if (lacks.empty()) {
    static_assert(sizeof properties.uuid == sizeof own.gpu);
    std::memcpy(own.gpu.data(), &properties.uuid, sizeof own.gpu);
  }
  std::strncpy(own.lacks.data(), lacks.c_str(), own.lacks.size() - 1);
  return own;
}

keyhole_communicator* make_nccl_ranks(keyhole_communicator* over,
                                      const keyhole_communicator_config& config) {
  const Library& nccl = library();
  const uint32_t rank = keyhole_communicator_get_rank(over),
                 size = keyhole_communicator_get_size(over);
  const auto check_nccl = [&](ncclResult_t result, const char* what) {
    if (result == ncclSuccess) return;
    throw std::runtime_error(std::string(what) + ": " + nccl.text_of(result));
  };
  struct {
    ncclUniqueId id{};
    ncclResult_t result = ncclSuccess;
  } first;
  if (rank == 0) first.result = nccl.get_id(&first.id);
  check(keyhole_communicator_broadcast(over, &first, sizeof first, 0));
  check_nccl(first.result, "ncclGetUniqueId");
  ncclComm_t comm = nullptr;
  check_nccl(nccl.init_rank(&comm, static_cast<int>(size), first.id, static_cast<int>(rank)),
             "ncclCommInitRank");
  keyhole_communicator* made = nullptr;
  const keyhole_status status = nccl.communicator_from(&comm, &config, &made);
  const std::string text = status == KEYHOLE_OK ? "" : keyhole_last_error();
  (void)nccl.destroy(comm);
  if (status != KEYHOLE_OK) throw std::runtime_error(text);
  return made;
}

}  // namespace keyhole::tools
