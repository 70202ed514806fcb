#include "tools/llama/cuda/blas_lt.h"

#include <dlfcn.h>

#include <stdexcept>

namespace keyhole::tools::cuda {
namespace {

struct Loaded {
  BlasLt functions;
  std::string refusal;
};

template <class Function>
void find(void* library, const char* name, Function& function, std::string& refusal) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) refusal = std::string("cuBLASLt has no function ") + name;
}

Loaded load() {
  // Where the loader looks by itself, then the folder of the toolkit that this was built with.
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  std::string reason;
  if (library == nullptr) {
    reason = dlerror();
    library = dlopen((KEYHOLE_CUDA_LIBRARIES "/" + name).c_str(), RTLD_LAZY | RTLD_LOCAL);
  }
  Loaded result;
  if (library == nullptr) {
    result.refusal = "products of matrices need CUDA's cuBLAS library: " + reason;
    return result;
  }
  BlasLt& f = result.functions;
  find(library, "cublasLtCreate", f.create, result.refusal);
  find(library, "cublasLtGetStatusString", f.status_string, result.refusal);
  find(library, "cublasLtMatmul", f.matmul, result.refusal);
  find(library, "cublasLtMatmulAlgoGetHeuristic", f.get_heuristic, result.refusal);
  find(library, "cublasLtMatmulDescCreate", f.create_desc, result.refusal);
  find(library, "cublasLtMatmulDescDestroy", f.destroy_desc, result.refusal);
  find(library, "cublasLtMatmulDescSetAttribute", f.set_desc, result.refusal);
  find(library, "cublasLtMatrixLayoutCreate", f.create_layout, result.refusal);
  find(library, "cublasLtMatrixLayoutDestroy", f.destroy_layout, result.refusal);
  find(library, "cublasLtMatmulPreferenceCreate", f.create_preference, result.refusal);
  find(library, "cublasLtMatmulPreferenceDestroy", f.destroy_preference, result.refusal);
  find(library, "cublasLtMatmulPreferenceSetAttribute", f.set_preference, result.refusal);
  return result;
}

const Loaded& loaded() {
  static const Loaded instance = load();
  return instance;
}

}  // namespace

std::string blas_lt_refusal() { return loaded().refusal; }

const BlasLt& blas_lt() {
  if (!loaded().refusal.empty()) throw std::runtime_error(loaded().refusal);
  return loaded().functions;
}

}  // namespace keyhole::tools::cuda
