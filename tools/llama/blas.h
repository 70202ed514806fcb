// OpenBLAS as this decoder needs it: single-threaded products that several threads of a Team call side by side.
#pragma once

#include <cstddef>
#include <string>

namespace keyhole::tools {

/// While one lives, OpenBLAS computes on the calling thread only, so that the threads of a Team can call
/// it side by side without oversubscribing the cores. The former number comes back afterwards, for
/// other users of OpenBLAS in this process.
class SingleThreadedBlas {
 public:
  /// Allows `threads` at once. Throws std::runtime_error where there is no room for the memory that OpenBLAS takes
  /// for each, because it would not fail but try for ever.
  explicit SingleThreadedBlas(unsigned threads);
  ~SingleThreadedBlas();
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;

 private:
  int former_;
};

/// Computes C `[m, n]` = A `[m, k]` x B^T + beta * C, B `[n, k]`. Row-major, distances of rows in elements.
void gemm_nt(size_t m, size_t n, size_t k, const float* a, size_t lda, const float* b, size_t ldb,
             float beta, float* c, size_t ldc);
/// Computes C `[m, n]` = A `[m, k]` x B `[k, n]` + beta * C.
void gemm_nn(size_t m, size_t n, size_t k, const float* a, size_t lda, const float* b, size_t ldb,
             float beta, float* c, size_t ldc);

/// Whether a thread of OpenBLAS would find no address space for its buffer now. Such a thread, which OpenBLAS may have
/// made when it was loaded, asks for ever, and OpenBLAS waits for it when the program ends: exit() would not return.
[[nodiscard]] bool blas_threads_lack_memory();

/// The kernel family that OpenBLAS chose, e.g. "SkylakeX".
[[nodiscard]] std::string blas_kernels();

/// OpenBLAS picks its kernels by CPU model when it is loaded; a CPU newer than the library gets SSE3
/// kernels (0.3.21 on Emerald Rapids: "Prescott", 32 Gflop/s a core instead of 140). If that has happened
/// on a CPU with AVX2 or AVX-512 and the user has not set OPENBLAS_CORETYPE, sets it and starts the
/// program anew, since the variable is read at load time only. Call it first thing in main(), before any
/// thread or output. Returns if there is nothing to do or it cannot be done.
void restart_with_matching_blas_kernels(char** argv);

}  // namespace keyhole::tools
