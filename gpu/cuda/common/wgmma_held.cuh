// Products of a warpgroup (gpu/cuda/common/wgmma.cuh) with few columns, whose first operand is in registers: 64 rows of
// codes times what lies along its rows in shared memory, 16 to 96 columns of it.
//
// The first operand of warp w is its rows 16 w to 16 w + 15, in the layout of m16n8k16's a for fp16 and of m16n8k32's
// for bytes. Registers that a product reads must not change before wait_for_products() says that it is done.
#pragma once

#include "gpu/cuda/common/wgmma.cuh"

namespace keyhole::gpu {

// Registers of results, as text and as operands, and those of the first operand behind them.
#define KEYHOLE_TEXT_8 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define KEYHOLE_TEXT_12 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define KEYHOLE_TEXT_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define KEYHOLE_TEXT_24                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23}"
#define KEYHOLE_TEXT_32                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define KEYHOLE_TEXT_48                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "     \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, " \
  "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define KEYHOLE_FOUR(t, c, i) t(c[i]), t(c[(i) + 1]), t(c[(i) + 2]), t(c[(i) + 3])
#define KEYHOLE_8(t, c) KEYHOLE_FOUR(t, c, 0), KEYHOLE_FOUR(t, c, 4)
#define KEYHOLE_12(t, c) KEYHOLE_8(t, c), KEYHOLE_FOUR(t, c, 8)
#define KEYHOLE_16(t, c) KEYHOLE_12(t, c), KEYHOLE_FOUR(t, c, 12)
#define KEYHOLE_24(t, c) KEYHOLE_16(t, c), KEYHOLE_FOUR(t, c, 16), KEYHOLE_FOUR(t, c, 20)
#define KEYHOLE_32(t, c) KEYHOLE_24(t, c), KEYHOLE_FOUR(t, c, 24), KEYHOLE_FOUR(t, c, 28)
#define KEYHOLE_48(t, c)                                                                    \
  KEYHOLE_32(t, c), KEYHOLE_FOUR(t, c, 32), KEYHOLE_FOUR(t, c, 36), KEYHOLE_FOUR(t, c, 40), \
      KEYHOLE_FOUR(t, c, 44)
// %a .. : first operand, second, and for bytes whether the product is added to the result or is it.
#define KEYHOLE_HALVES_PRODUCT(shape, text, a, b)                                   \
  "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned." shape \
  ".f32.f16.f16 " text ", " a ", " b ", add, 1, 1, 0;\n}"
#define KEYHOLE_BYTES_PRODUCT(shape, text, a, b, add)                                     \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned." shape \
  ".s32.u8.s8 " text ", " a ", " b ", add;\n}"
#define KEYHOLE_FLOAT_RESULT(x) "+f"(x)
#define KEYHOLE_INT_RESULT(x) "+r"(x)
#define KEYHOLE_OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

/// c[64 x 2 m] += a[64 x 16] * b[2 m x 16]^T in fp16, for m = 8, 12, 16, 24.
template <int m>
__device__ inline void add_held_halves(float (&c)[m], const uint32_t (&a)[4], uint64_t b) {
  static_assert(m == 8 || m == 12 || m == 16 || m == 24);
  if constexpr (m == 8) {
    asm volatile(KEYHOLE_HALVES_PRODUCT("m64n16k16", KEYHOLE_TEXT_8, "{%8, %9, %10, %11}", "%12")
                 : KEYHOLE_8(KEYHOLE_FLOAT_RESULT, c)
                 : KEYHOLE_OPERANDS(a, b));
  } else if constexpr (m == 12) {
    asm volatile(KEYHOLE_HALVES_PRODUCT("m64n24k16", KEYHOLE_TEXT_12, "{%12, %13, %14, %15}", "%16")
                 : KEYHOLE_12(KEYHOLE_FLOAT_RESULT, c)
                 : KEYHOLE_OPERANDS(a, b));
  } else if constexpr (m == 16) {
    asm volatile(KEYHOLE_HALVES_PRODUCT("m64n32k16", KEYHOLE_TEXT_16, "{%16, %17, %18, %19}", "%20")
                 : KEYHOLE_16(KEYHOLE_FLOAT_RESULT, c)
                 : KEYHOLE_OPERANDS(a, b));
  } else {
    asm volatile(KEYHOLE_HALVES_PRODUCT("m64n48k16", KEYHOLE_TEXT_24, "{%24, %25, %26, %27}", "%28")
                 : KEYHOLE_24(KEYHOLE_FLOAT_RESULT, c)
                 : KEYHOLE_OPERANDS(a, b));
  }
}

/// c[64 x 2 m] (+)= a[64 x 32] * b[2 m x 32]^T of unsigned times signed bytes: exact, for m = 16, 24, 32, 48.
template <int m>
__device__ inline void add_held_bytes(int (&c)[m], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(m == 16 || m == 24 || m == 32 || m == 48);
  const int adds = add ? 1 : 0;
  if constexpr (m == 16) {
    asm volatile(
        KEYHOLE_BYTES_PRODUCT("m64n32k32", KEYHOLE_TEXT_16, "{%16, %17, %18, %19}", "%20", "%21")
        : KEYHOLE_16(KEYHOLE_INT_RESULT, c)
        : KEYHOLE_OPERANDS(a, b), "r"(adds));
  } else if constexpr (m == 24) {
    asm volatile(
        KEYHOLE_BYTES_PRODUCT("m64n48k32", KEYHOLE_TEXT_24, "{%24, %25, %26, %27}", "%28", "%29")
        : KEYHOLE_24(KEYHOLE_INT_RESULT, c)
        : KEYHOLE_OPERANDS(a, b), "r"(adds));
  } else if constexpr (m == 32) {
    asm volatile(
        KEYHOLE_BYTES_PRODUCT("m64n64k32", KEYHOLE_TEXT_32, "{%32, %33, %34, %35}", "%36", "%37")
        : KEYHOLE_32(KEYHOLE_INT_RESULT, c)
        : KEYHOLE_OPERANDS(a, b), "r"(adds));
  } else {
    asm volatile(
        KEYHOLE_BYTES_PRODUCT("m64n96k32", KEYHOLE_TEXT_48, "{%48, %49, %50, %51}", "%52", "%53")
        : KEYHOLE_48(KEYHOLE_INT_RESULT, c)
        : KEYHOLE_OPERANDS(a, b), "r"(adds));
  }
}

/// hold() of a result of bytes.
template <int n>
__device__ inline void hold(int (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

/// Stores matrices of 8 x 8 16-bit numbers across: a lane's register of each has columns 2 (lane % 4) and the next of
/// row lane / 4, and lanes 8 i to 8 i + 7 have the addresses, in shared memory, where the columns of matrix i begin,
/// 16 bytes each.
__device__ inline void store_transposed(uint32_t column, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}
__device__ inline void store_transposed(uint32_t column, const uint32_t (&x)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(column),
               "r"(x[0]), "r"(x[1])
               : "memory");
}

#undef KEYHOLE_OPERANDS
#undef KEYHOLE_INT_RESULT
#undef KEYHOLE_FLOAT_RESULT
#undef KEYHOLE_BYTES_PRODUCT
#undef KEYHOLE_HALVES_PRODUCT
#undef KEYHOLE_48
#undef KEYHOLE_32
#undef KEYHOLE_24
#undef KEYHOLE_16
#undef KEYHOLE_12
#undef KEYHOLE_8
#undef KEYHOLE_FOUR
#undef KEYHOLE_TEXT_48
#undef KEYHOLE_TEXT_32
#undef KEYHOLE_TEXT_24
#undef KEYHOLE_TEXT_16
#undef KEYHOLE_TEXT_12
#undef KEYHOLE_TEXT_8

}  // namespace keyhole::gpu
