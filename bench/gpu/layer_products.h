// The products of a layer of Llama-3-8B with the rows of a step, by cuBLASLt: a decoder's work between its layers'
// attention. With it benchmarks can say what a step of several tokens or sequences costs with the weights that they
// share.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "bench/gpu/session_rows.h"
#include "tools/llama/cuda/blas_lt.h"

namespace keyhole::bench {

/// The products. Weights are f16; the layers share one set, of which no cache holds a tenth. One thread.
class LayerProducts {
 public:
  static constexpr uint32_t kLayers = 32;

  /// Takes memory for up to `rows` rows.
  explicit LayerProducts(uint32_t rows) : lt_(&tools::cuda::blas_lt()) {
    must(lt_->create(&handle_) == CUBLAS_STATUS_SUCCESS, "cuBLASLt");
    must(cudaMalloc(&workspace_, kWorkspace) == cudaSuccess, "memory");
    must(cudaMalloc(&weights_, kVocabulary * kHidden * 2) == cudaSuccess, "memory");
    must(cudaMalloc(&in_, size_t{rows} * kWidest * 2) == cudaSuccess, "memory");
    must(cudaMalloc(&out_, size_t{rows} * kVocabulary * 2) == cudaSuccess, "memory");
    must(cudaMemset(weights_, 0, kVocabulary * kHidden * 2) == cudaSuccess, "memory");
    must(cudaMemset(in_, 0, size_t{rows} * kWidest * 2) == cudaSuccess, "memory");
  }
  ~LayerProducts() {
    for (void* p : {workspace_, weights_, in_, out_}) (void)cudaFree(p);
  }
  LayerProducts(const LayerProducts&) = delete;
  LayerProducts& operator=(const LayerProducts&) = delete;

  /// Enqueues the products for q, k and v.
  void before(uint32_t n, cudaStream_t stream) { enqueue(6144, kHidden, n, stream); }
  /// Enqueues the products after attention: its output, gate and up, down.
  void after(uint32_t n, cudaStream_t stream) {
    enqueue(kHidden, kHidden, n, stream);
    enqueue(2 * kWidest, kHidden, n, stream);
    enqueue(kHidden, kWidest, n, stream);
  }
  /// Enqueues the product for the logits, once for all layers.
  void head(uint32_t n, cudaStream_t stream) { enqueue(kVocabulary, kHidden, n, stream); }

  /// Microseconds that these products take by themselves: a layer's, and the logits.
  struct Times {
    double layer, head;
  };
  Times times(uint32_t n, cudaStream_t stream) {
    return {median(stream, [&] { before(n, stream), after(n, stream); }),
            median(stream, [&] { head(n, stream); })};
  }

 private:
  static constexpr size_t kHidden = 4096, kWidest = 14336, kVocabulary = 128256;
  static constexpr size_t kWorkspace = size_t{32} << 20;

  template <class Work>
  static double median(cudaStream_t stream, const Work& work) {
    constexpr int kTimes = 16;
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess, "event");
    std::array<float, 5> ms{};
    for (float& one : ms) {
      (void)cudaEventRecord(begin, stream);
      for (int i = 0; i < kTimes; ++i) work();
      (void)cudaEventRecord(end, stream);
      must(cudaEventSynchronize(end) == cudaSuccess, "products");
      (void)cudaEventElapsedTime(&one, begin, end);
    }
    (void)cudaEventDestroy(begin);
    (void)cudaEventDestroy(end);
    std::sort(ms.begin(), ms.end());
    return 1000.0 * static_cast<double>(ms[2]) / kTimes;
  }

  /// Enqueues out [n, rows] = in [n, columns] times weights [rows, columns], transposed.
  void enqueue(size_t rows, size_t columns, uint32_t n, cudaStream_t stream) {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulPreference_t wishes = nullptr;
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const bool is_well =
        lt_->create_desc(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        lt_->set_desc(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) ==
            CUBLAS_STATUS_SUCCESS &&
        lt_->create_layout(&a, CUDA_R_16F, columns, rows, static_cast<int64_t>(columns)) ==
            CUBLAS_STATUS_SUCCESS &&
        lt_->create_layout(&b, CUDA_R_16F, columns, n, static_cast<int64_t>(columns)) ==
            CUBLAS_STATUS_SUCCESS &&
        lt_->create_layout(&c, CUDA_R_16F, rows, n, static_cast<int64_t>(rows)) ==
            CUBLAS_STATUS_SUCCESS &&
        lt_->create_preference(&wishes) == CUBLAS_STATUS_SUCCESS &&
        lt_->set_preference(wishes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace,
                            sizeof kWorkspace) == CUBLAS_STATUS_SUCCESS &&
        lt_->get_heuristic(handle_, product, a, b, c, c, wishes, 1, &found, &count) ==
            CUBLAS_STATUS_SUCCESS &&
        count == 1;
    const float one = 1.0F, zero = 0.0F;
    must(is_well &&
             lt_->matmul(handle_, product, &one, weights_, a, in_, b, &zero, out_, c, out_, c,
                         &found.algo, workspace_, kWorkspace, stream) == CUBLAS_STATUS_SUCCESS,
         "product");
    (void)lt_->destroy_preference(wishes);
    for (cublasLtMatrixLayout_t layout : {a, b, c}) (void)lt_->destroy_layout(layout);
    (void)lt_->destroy_desc(product);
  }

  const tools::cuda::BlasLt* lt_;
  cublasLtHandle_t handle_ = nullptr;
  void *workspace_ = nullptr, *weights_ = nullptr, *in_ = nullptr, *out_ = nullptr;
};

/// Tokens a second of a model whose layers take us_a_layer each, with the time of its last product.
inline double tokens_per_second(uint32_t tokens, double us_a_layer, double us_of_head) {
  return 1e6 * tokens / (LayerProducts::kLayers * us_a_layer + us_of_head);
}

}  // namespace keyhole::bench
