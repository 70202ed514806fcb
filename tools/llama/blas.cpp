#include "tools/llama/blas.h"

#include <cblas.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace keyhole::tools {
namespace {

constexpr const char* kCoreTypeVariable = "OPENBLAS_CORETYPE";

/// True for the families of OpenBLAS that were made before AVX.
bool is_before_avx(std::string_view family) {
  for (const char* old :
       {"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Nano", "Athlon", "Opteron",
        "Opteron_SSE3", "Barcelona", "Bobcat", "Katmai", "Coppermine", "Northwood", "Banias"}) {
    if (family == old) return true;
  }
  return false;
}

int as_int(size_t n) { return static_cast<int>(n); }

/// Address space that OpenBLAS takes for each thread, of which little is touched (0.3.21).
constexpr size_t kBufferBytes = (size_t{128} << 20U) + (size_t{1} << 16U);

/// Whether the system gives so much address space.
bool has_room(size_t bytes) {
  void* const room =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return false;
  munmap(room, bytes);
  return true;
}

/// OpenBLAS takes a buffer for each thread in its first product, and asks for one again and again where the system
/// refuses. So the system is asked here, once for each number of threads.
void check_room_for_buffers(unsigned threads) {
  static std::atomic<unsigned> checked{0};
  const unsigned before = checked.load(std::memory_order_relaxed);
  if (threads <= before) return;
  const size_t bytes = kBufferBytes * (threads - before);
  if (!has_room(bytes)) {
    throw std::runtime_error("the matrix products of " + std::to_string(threads) +
                             (threads == 1 ? " thread" : " threads") + " need " +
                             std::to_string(bytes >> 20U) +
                             " MiB of address space, which the system refuses (ulimit -v says how "
                             "much it allows); allowed: more of it, or fewer --threads");
  }
  checked.store(threads, std::memory_order_relaxed);
}

}  // namespace

SingleThreadedBlas::SingleThreadedBlas(unsigned threads) : former_(openblas_get_num_threads()) {
  check_room_for_buffers(threads);
  openblas_set_num_threads(1);
}

SingleThreadedBlas::~SingleThreadedBlas() { openblas_set_num_threads(former_); }

void gemm_nt(size_t m, size_t n, size_t k, const float* a, size_t lda, const float* b, size_t ldb,
             float beta, float* c, size_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, as_int(m), as_int(n), as_int(k), 1.0F, a,
              as_int(lda), b, as_int(ldb), beta, c, as_int(ldc));
}

void gemm_nn(size_t m, size_t n, size_t k, const float* a, size_t lda, const float* b, size_t ldb,
             float beta, float* c, size_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, as_int(m), as_int(n), as_int(k), 1.0F, a,
              as_int(lda), b, as_int(ldb), beta, c, as_int(ldc));
}

bool blas_threads_lack_memory() { return !has_room(kBufferBytes); }

std::string blas_kernels() { return openblas_get_corename(); }

void restart_with_matching_blas_kernels([[maybe_unused]] char** argv) {
#if defined(__x86_64__)
  if (std::getenv(kCoreTypeVariable) != nullptr || !is_before_avx(blas_kernels())) return;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!avx512 && !avx2) return;
  // Set for the new program as well, which is why it cannot restart twice.
  if (setenv(kCoreTypeVariable, avx512 ? "SkylakeX" : "Haswell", 1) != 0) return;
  execv("/proc/self/exe", argv);
#endif
}

}  // namespace keyhole::tools
