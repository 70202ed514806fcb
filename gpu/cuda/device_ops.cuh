// Small pieces of device code that every kernel here uses: conversions, flags in host memory, tensor cores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cpu/types.h"

namespace keyhole::gpu {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

// --- conversions ---------------------------------------------------------------------------------

template <class T>
__device__ inline T rounded_to(float x);
template <>
__device__ inline float rounded_to<float>(float x) {
  return x;
}
template <>
__device__ inline __half rounded_to<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 rounded_to<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// 4 elements as they lie in memory. Loading and converting are two steps, so that no load waits for another: a trip
/// to memory takes half a microsecond, and a kernel here takes seven.
struct RawQuad {
  uint32_t words[4];
};
/// Elements at .. at+3, wherever they lie, of an array of a dtype known at run time.
__device__ inline RawQuad load_raw(const void* data, DType dtype, size_t at) {
  RawQuad raw{};
  if (dtype == DType::f32) {
    const auto* from = static_cast<const uint32_t*>(data) + at;
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      raw = {x.x, x.y, x.z, x.w};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.words[i] = from[i];
    }
  } else {
    const auto* from = static_cast<const uint16_t*>(data) + at;
    if (reinterpret_cast<uintptr_t>(from) % 8 == 0) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      raw.words[0] = x.x;
      raw.words[1] = x.y;
    } else {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = from[i];
      raw.words[0] = x[0] | (x[1] << 16U);
      raw.words[1] = x[2] | (x[3] << 16U);
    }
  }
  return raw;
}
__device__ inline void convert(const RawQuad& raw, DType dtype, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto half = static_cast<uint16_t>(raw.words[i / 2] >> (i % 2 * 16));
    x[i] = dtype == DType::f32   ? __uint_as_float(raw.words[i])
           : dtype == DType::f16 ? __half2float(__ushort_as_half(half))
                                 : __bfloat162float(__ushort_as_bfloat16(half));
  }
}
/// 4 elements, wherever T may lie, with one store where one will do.
template <class T>
__device__ inline void store_typed(T* to, const float (&x)[4]) {
  struct alignas(4 * sizeof(T)) Vector {
    T elements[4];
  } vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) vector.elements[i] = rounded_to<T>(x[i]);
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vector) == 0) {
    *reinterpret_cast<Vector*>(to) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = vector.elements[i];
  }
}
__device__ inline void store_elements(void* data, DType dtype, size_t at, const float (&x)[4]) {
  switch (dtype) {
    case DType::f16: store_typed(static_cast<__half*>(data) + at, x); break;
    case DType::bf16: store_typed(static_cast<__nv_bfloat16*>(data) + at, x); break;
    default: store_typed(static_cast<float*>(data) + at, x);
  }
}

__device__ inline uint16_t bits(__half x) { return __half_as_ushort(x); }
__device__ inline uint16_t bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
/// Two 16-bit numbers in one register, the first in the low half.
template <class T>
__device__ inline uint32_t packed(T low, T high) {
  return uint32_t{bits(low)} | (uint32_t{bits(high)} << 16U);
}

// --- flags that host and device share ------------------------------------------------------------

__device__ inline void store_release_system(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ inline void store_system(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline uint64_t load_acquire_system(const void* words) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(words) : "memory");
  return value;
}
/// Adds 1, after the writes of this thread's block before it and before what the thread reads after it.
__device__ inline uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
/// Sets bits, likewise; returns what was set before.
__device__ inline uint32_t arrive_with(uint32_t* word, uint32_t bits) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(bits)
               : "memory");
  return before;
}
/// Nanoseconds of a clock that all multiprocessors share (it ticks in steps of up to a microsecond).
__device__ inline uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// --- the kernel before and the kernel after in the stream ------------------------------------------

/// In a kernel that was launched ahead (launch_ahead()): waits until the kernels before it have ended and their
/// writes are there. First of all, in every block. Nothing on GPUs older than 9.0, where no launch is ahead.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets a kernel that is launched ahead start now, as far as there is room for it.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// --- copies to shared memory that a thread does not wait for -------------------------------------

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
/// 16 bytes; zeros where `valid` is false (nothing is read then).
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `pending` of this thread's groups are under way (0..3).
__device__ inline void wait_for_copies(int pending) {
  switch (pending) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
  }
}

// --- tensor cores: 8x8 matrices of 16-bit elements -----------------------------------------------
// A lane l holds of an 8x8 matrix the elements (l/4, 2*(l%4)) and the next one in its row.

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline uint32_t transposed(uint32_t matrix) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(matrix));
  return r;
}
/// c[16 x 8] += a[16 x 16] * b[16 x 8], fp32 sums.
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace keyhole::gpu
