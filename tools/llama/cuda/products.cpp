#include "tools/llama/cuda/products.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "tools/llama/cuda/blas_lt.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools::cuda {
namespace {

/// The alignment for which kernels are chosen. A part of a matrix that begins at any row of 8 floats is aligned to 16
/// bytes, which is also what Hopper's bulk copies need.
constexpr uint32_t kAlignment = 16;

void check(cublasStatus_t status, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error("GPU: " + what + ": " + blas_lt().status_string(status));
}

/// One handle for the program, as the library wants it. It ends with the program: to destroy it then would be too late,
/// as CUDA may have gone before.
cublasLtHandle_t handle() {
  static const cublasLtHandle_t instance = [] {
    cublasLtHandle_t created = nullptr;
    check(blas_lt().create(&created), "cuBLASLt");
    return created;
  }();
  return instance;
}

struct Destroy {
  void operator()(cublasLtMatmulDesc_t desc) const { (void)blas_lt().destroy_desc(desc); }
  void operator()(cublasLtMatrixLayout_t layout) const { (void)blas_lt().destroy_layout(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const {
    (void)blas_lt().destroy_preference(preference);
  }
};
using Desc = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy>;

/// The library's matrices are column-major: `rows` numbers lie side by side.
Layout layout(cudaDataType type, uint32_t rows, uint32_t columns) {
  cublasLtMatrixLayout_t created = nullptr;
  check(blas_lt().create_layout(&created, type, rows, columns, rows), "a matrix");
  return Layout(created);
}

Desc transposed_times() {
  cublasLtMatmulDesc_t created = nullptr;
  check(blas_lt().create_desc(&created, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product");
  Desc desc(created);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  check(blas_lt().set_desc(desc.get(), CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose),
        "a product");
  return desc;
}

Preference preference() {
  cublasLtMatmulPreference_t created = nullptr;
  check(blas_lt().create_preference(&created), "a product's workspace");
  Preference result(created);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(blas_lt().set_preference(result.get(), attribute, &value, sizeof value),
          "a product's workspace");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, size_t{kProductWorkspace});
  // Parts of a sum are added in fp32, in a fixed order: not in place by whichever block comes first.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
  return result;
}

std::string shape(uint32_t m, uint32_t n, uint32_t k) {
  return "the product of " + std::to_string(m) + " x " + std::to_string(k) + " and " +
         std::to_string(k) + " x " + std::to_string(n);
}

void check_shape(const Product& p) {
  if (p.n % 8 != 0 || p.k % 8 != 0) {
    throw std::runtime_error("GPU product: n is " + std::to_string(p.n) + ", k is " +
                             std::to_string(p.k) + "; allowed: multiples of 8");
  }
  for (const void* array : {static_cast<const void*>(p.x.high), static_cast<const void*>(p.x.low),
                            static_cast<const void*>(p.w.high), static_cast<const void*>(p.w.low),
                            static_cast<const void*>(p.c), static_cast<const void*>(p.rounded)}) {
    if (reinterpret_cast<uintptr_t>(array) % kAlignment != 0) {
      throw std::runtime_error("GPU product: an array is not aligned to 16 bytes");
    }
  }
  if (p.rounded != nullptr && (p.add || p.x.low != nullptr || p.w.low != nullptr)) {
    throw std::runtime_error("GPU product: a sum of products is to be rounded");
  }
}

}  // namespace

class Products::Library {
 public:
  Library() : desc_(transposed_times()), preference_(preference()), workspace_(kProductWorkspace) {}

  void multiply(const Product& p, cudaStream_t stream) {
    check_shape(p);
    const Plan& plan = this->plan(p);
    void* const c = p.rounded != nullptr ? static_cast<void*>(p.rounded) : p.c;
    const auto term = [&](const __nv_bfloat16* x, const __nv_bfloat16* w, bool add) {
      const float one = 1.0F;
      const float former = add ? 1.0F : 0.0F;
      check(blas_lt().matmul(handle(), desc_.get(), &one, w, plan.w.get(), x, plan.x.get(), &former,
                             c, plan.c.get(), c, plan.c.get(), &plan.algorithm, workspace_.get(),
                             kProductWorkspace, stream),
            shape(p.m, p.n, p.k));
    };
    term(p.x.high, p.w.high, p.add);
    if (p.x.low != nullptr) term(p.x.low, p.w.high, true);
    if (p.w.low != nullptr) term(p.x.high, p.w.low, true);
  }

  /// Multiplies small matrices by the kernel for large ones: kernels are loaded when they are first launched.
  void load(uint32_t m, uint32_t n, uint32_t k, bool add, bool rounds) {
    constexpr uint32_t kSide = 256;
    constexpr size_t kNumbers = size_t{kSide} * kSide;
    const Plan large = chosen(m, n, k, rounds), small = laid_out(kSide, kSide, kSide, rounds);
    const Buffer<std::byte> memory(kNumbers * (2 * sizeof(__nv_bfloat16) + sizeof(float)));
    const OwnStream stream;
    cuda::check(cudaMemsetAsync(memory.get(), 0, memory.size(), stream.get()), "a product");
    std::byte* const c = memory.get();
    const std::byte *const w = c + kNumbers * sizeof(float), *const x =
                                                                 w +
                                                                 kNumbers * sizeof(__nv_bfloat16);
    const float one = 1.0F, former = add ? 1.0F : 0.0F;
    check(blas_lt().matmul(handle(), desc_.get(), &one, w, small.w.get(), x, small.x.get(), &former,
                           c, small.c.get(), c, small.c.get(), &large.algorithm, workspace_.get(),
                           kProductWorkspace, stream.get()),
          "a product");
    cuda::check(cudaStreamSynchronize(stream.get()), "a product");
  }

 private:
  /// Row-major c `[m, n]` = x w^T is column-major c^T `(n, m)` = w^T-as-it-lies, transposed, times x-as-it-lies.
  struct Plan {
    uint32_t m, n, k;
    bool rounds;
    Layout w, x, c;
    cublasLtMatmulAlgo_t algorithm{};
  };

  static Plan laid_out(uint32_t m, uint32_t n, uint32_t k, bool rounds) {
    return {m,
            n,
            k,
            rounds,
            layout(CUDA_R_16BF, k, n),
            layout(CUDA_R_16BF, k, m),
            layout(rounds ? CUDA_R_16BF : CUDA_R_32F, n, m)};
  }
  /// With the algorithm that the library chooses. Throws std::runtime_error where it has none.
  Plan chosen(uint32_t m, uint32_t n, uint32_t k, bool rounds) {
    Plan plan = laid_out(m, n, k, rounds);
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const std::string what = shape(m, n, k);
    check(blas_lt().get_heuristic(handle(), desc_.get(), plan.w.get(), plan.x.get(), plan.c.get(),
                                  plan.c.get(), preference_.get(), 1, &best, &found),
          what);
    if (found == 0) throw std::runtime_error("GPU: cuBLASLt has no algorithm for " + what);
    plan.algorithm = best.algo;
    return plan;
  }
  const Plan& plan(const Product& p) {
    const bool rounds = p.rounded != nullptr;
    for (const Plan& plan : plans_) {
      if (plan.m == p.m && plan.n == p.n && plan.k == p.k && plan.rounds == rounds) return plan;
    }
    return plans_.emplace_back(chosen(p.m, p.n, p.k, rounds));
  }

  Desc desc_;
  Preference preference_;
  Buffer<std::byte> workspace_;
  std::vector<Plan> plans_;  // some ten: four matrices, chunks of two or three lengths
};

Products::Products() : library_(std::make_unique<Library>()) {}
Products::~Products() = default;

void Products::multiply(const Product& product, cudaStream_t stream) {
  library_->multiply(product, stream);
}
void Products::load(uint32_t m, uint32_t n, uint32_t k, bool add, bool rounds) {
  library_->load(m, n, k, add, rounds);
}

}  // namespace keyhole::tools::cuda
