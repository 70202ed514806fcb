// What benchmarks of sessions on a device share: rows in its memory, and the end of a program whose calls fail.
#pragma once

#include <cuda_runtime_api.h>
#include <keyhole/keyhole.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace keyhole::bench {

inline constexpr uint32_t kDim = 128;

inline void must(bool is_well, const char* what) {
  if (is_well) return;
  std::printf("failed: %s: %s, %s\n", what, keyhole_last_error(),
              cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}

/// `[tokens, heads, kDim]` f16 in device memory, between -2 and 2.
class Rows {
 public:
  Rows(uint32_t tokens, uint32_t heads) : tokens_(tokens), heads_(heads) {
    std::vector<uint16_t> numbers(size_t{tokens} * heads * kDim);
    std::mt19937 rng(1);
    for (uint16_t& x : numbers) x = static_cast<uint16_t>((rng() & 0x83ffU) | 0x3800U);
    must(cudaMalloc(&data_, numbers.size() * 2) == cudaSuccess, "memory");
    must(cudaMemcpy(data_, numbers.data(), numbers.size() * 2, cudaMemcpyHostToDevice) ==
             cudaSuccess,
         "copy");
  }
  ~Rows() { (void)cudaFree(data_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  /// The first `tokens` of them.
  [[nodiscard]] keyhole_tensor tensor(uint32_t tokens) const {
    const int64_t shape[] = {tokens, heads_, kDim};
    keyhole_tensor t = keyhole_tensor_host(data_, KEYHOLE_F16, 3, shape);
    t.memory = KEYHOLE_DEVICE;
    return t;
  }
  [[nodiscard]] keyhole_tensor tensor() const { return tensor(tokens_); }

 private:
  uint32_t tokens_, heads_;
  void* data_ = nullptr;
};

}  // namespace keyhole::bench
