// cuBLASLt as a library that is loaded when a model first runs on a GPU. If it were linked, the command could not
// start where it is not installed, and every start would cost half a gigabyte of mapped file and thousands of
// initialisers.
#pragma once

#include <cublasLt.h>

#include <string>

namespace keyhole::tools::cuda {

/// The functions of cuBLASLt, as cublasLt.h declares them.
struct BlasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) create_desc = nullptr;
  decltype(&cublasLtMatmulDescDestroy) destroy_desc = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
};

/// Why cuBLASLt cannot be loaded, for people; empty if it is there. Loads it (some tenths of a second, once).
[[nodiscard]] std::string blas_lt_refusal();
/// The loaded library, which stays loaded until the program ends. Throws std::runtime_error: blas_lt_refusal(). Any
/// thread.
[[nodiscard]] const BlasLt& blas_lt();

}  // namespace keyhole::tools::cuda
