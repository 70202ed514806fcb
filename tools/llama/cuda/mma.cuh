// The tensor core instructions of prefill's attention: 16 x 8 x 16 products of fp16 (sm_80 and later), loads of
// their operands from shared memory, and asynchronous copies into it. The library has the like in gpu/cuda/common; the
// decoder is an example of what embeds the library through its public header, and includes nothing else of it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace keyhole::tools::cuda {

/// Computes c += a b: a 16 x 16 row-major, b 16 x 8 column-major. c[0], c[1] are row lane / 4, columns 2 (lane % 4)
/// and the next; c[2], c[3] are the same columns of row lane / 4 + 8.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Loads four 8 x 8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8 (16 bytes, aligned).
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
/// Loads four matrices like load_matrices(), each transposed.
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// Copies 16 bytes from global to shared memory, or writes zeros.
__device__ inline void copy_async(void* shared, const void* global, bool there) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(bytes));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
/// Waits until at most `left` of the committed groups are under way.
template <int left>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left));
}

}  // namespace keyhole::tools::cuda
