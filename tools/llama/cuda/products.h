// Products of many tokens with a weight matrix, by cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// The product c = x w^T, or c += x w^T; all row-major and dense, each array aligned to 16 bytes.
struct Product {
  Split x;             ///< `[m, k]`
  Split w;             ///< `[n, k]`; low is null for bf16 weights
  float* c = nullptr;  ///< `[m, n]`
  uint32_t m = 0;
  uint32_t n = 0;  ///< a multiple of 8, as k is
  uint32_t k = 0;
  bool add = false;
  /// `[m, n]`, which the product goes to in place of c, rounded; neither x nor w has a low part then, and nothing is
  /// added.
  __nv_bfloat16* rounded = nullptr;
};

/// Runs products. Holds a workspace of kProductWorkspace (gpu_sizes.h), and the algorithm for each shape that has
/// come, chosen once by cuBLASLt's own heuristics. One thread and one stream at a time.
class Products {
 public:
  /// Takes the workspace. Throws std::runtime_error where cuBLASLt is missing or there is no memory.
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// Enqueues x.high w.high + x.low w.high (+ x.high w.low): each product of two numbers is exact, sums are fp32 and
  /// in the same order each time. There is one call of the library for each term: x stored as 2 k columns, against w
  /// beside itself, would be one product, but w would take twice the memory. Throws std::runtime_error with the shape
  /// and the library's reason.
  void multiply(const Product& product, cudaStream_t stream);
  /// Has cuBLASLt load the kernel that it chooses for products of this shape, which takes 10 to 80 ms when the first of
  /// them comes. rounds: as with Product::rounded. Waits for it. Throws std::runtime_error.
  void load(uint32_t m, uint32_t n, uint32_t k, bool add, bool rounds);

 private:
  class Library;
  std::unique_ptr<Library> library_;
};

}  // namespace keyhole::tools::cuda
