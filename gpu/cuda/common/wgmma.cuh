// Products of a warpgroup on Hopper's tensor cores (wgmma: compiled for 9.0a alone), whose operands lie in shared
// memory as the copy engine writes them with a swizzle of 128 bytes.
//
// OPERANDS. A matrix of 16-bit elements lies in shared memory as panels of 64 columns: a row of a panel is 128 bytes,
// its eight 16-byte pieces are at piece number (piece ^ row % 8), and a panel begins at a multiple of 1024 bytes.
// `panel_bytes` is the distance of two panels: 128 times the rows. Queries and keys are read along their rows (a
// product takes 16 columns, 32 bytes further each time), values across them (16 rows, 2048 bytes further each time).
//
// RESULTS. Of the 64 rows of a warpgroup, warp w has 16, and its lane l has rows 16 w + l / 4 and 16 w + l / 4 + 8.
// Element i of a lane's part belongs to row i / 2 % 2 of these two and to column i / 4 * 8 + l % 4 * 2 + i % 2. An
// operand in registers has the layout of m16n8k16's a, which is that of two neighbouring groups of 8 columns of a
// result.
//
// ORDER. start_products(), products, commit_products(), wait_for_products(), and then hold() of each result, which
// keeps the compiler from reading registers that are still being written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace keyhole::gpu {

constexpr int kPanelColumns = 64;

__device__ inline void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `pending` of the committed groups are under way.
template <int pending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int n>
__device__ inline void hold(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

/// The descriptor of a panel that a product reads along its rows; address: of shared memory.
__device__ inline uint64_t rows_operand(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62U, kEightRows = uint64_t{1024 / 16} << 32U;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16U | (address & 0x3FFFFU) >> 4U;
}
/// The descriptor of 16 columns that a product reads along its rows, and that lie without a swizzle: eight rows of
/// eight columns in 128 bytes, eight rows behind eight others, and the second eight columns `apart` bytes behind the
/// first.
__device__ inline uint64_t narrow_operand(uint32_t address, uint32_t apart) {
  constexpr uint64_t kEightRows = uint64_t{128 / 16} << 32U;
  return kEightRows | uint64_t{apart >> 4U} << 16U | (address & 0x3FFFFU) >> 4U;
}
/// That of an address that is `bytes` further on, a multiple of 16.
__device__ inline uint64_t moved_operand(uint64_t descriptor, uint32_t bytes) {
  const auto low = static_cast<uint32_t>(descriptor);
  return (descriptor & ~uint64_t{0xFFFFFFFF}) | (low + (bytes >> 4U));
}
/// The descriptor of panels that are read across their rows.
__device__ inline uint64_t columns_operand(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62U, kEightRows = uint64_t{1024 / 16} << 32U;
  return kSwizzle128 | kEightRows | uint64_t{panel_bytes >> 4U} << 16U | (address & 0x3FFFFU) >> 4U;
}

// The registers of results, as text and as operands.
#define KEYHOLE_REGISTERS_32                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define KEYHOLE_REGISTERS_64                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "     \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "      \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define KEYHOLE_EIGHT(c, i)                                                           \
  "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3]), "+f"(c[(i) + 4]), \
      "+f"(c[(i) + 5]), "+f"(c[(i) + 6]), "+f"(c[(i) + 7])
#define KEYHOLE_THIRTY_TWO(c, i)                                              \
  KEYHOLE_EIGHT(c, i), KEYHOLE_EIGHT(c, (i) + 8), KEYHOLE_EIGHT(c, (i) + 16), \
      KEYHOLE_EIGHT(c, (i) + 24)
// %a, %b: operands; %add: 0 makes the product the result, else it is added to it.
#define KEYHOLE_ROWS_PRODUCT(shape, registers, a, b, add)                                 \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned." shape \
  " " registers ", " a ", " b ", add, 1, 1, 0, 0;\n}"
#define KEYHOLE_COLUMNS_PRODUCT(shape, registers, a, b)                                           \
  "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned." shape " " registers \
  ", " a ", " b ", add, 1, 1, 1;\n}"

#define KEYHOLE_HELD_ROWS_PRODUCT(shape, registers, a, b)                                         \
  "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned." shape " " registers \
  ", " a ", " b ", add, 1, 1, 0;\n}"

/// c[64 x 2 m] (+)= a[64 x 16] * b[2 m x 16]^T; both lie along their rows in shared memory. m: 32 or 64.
template <class T, int m>
__device__ inline void multiply_rows(float (&c)[m], uint64_t a, uint64_t b, bool add) {
  static_assert(m == 32 || m == 64);
  const int adds = add ? 1 : 0;
  if constexpr (std::is_same_v<T, __half> && m == 32) {
    asm volatile(
        KEYHOLE_ROWS_PRODUCT("m64n64k16.f32.f16.f16", KEYHOLE_REGISTERS_32, "%32", "%33", "%34")
        : KEYHOLE_THIRTY_TWO(c, 0)
        : "l"(a), "l"(b), "r"(adds));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        KEYHOLE_ROWS_PRODUCT("m64n128k16.f32.f16.f16", KEYHOLE_REGISTERS_64, "%64", "%65", "%66")
        : KEYHOLE_THIRTY_TWO(c, 0), KEYHOLE_THIRTY_TWO(c, 32)
        : "l"(a), "l"(b), "r"(adds));
  } else if constexpr (m == 32) {
    asm volatile(
        KEYHOLE_ROWS_PRODUCT("m64n64k16.f32.bf16.bf16", KEYHOLE_REGISTERS_32, "%32", "%33", "%34")
        : KEYHOLE_THIRTY_TWO(c, 0)
        : "l"(a), "l"(b), "r"(adds));
  } else {
    asm volatile(
        KEYHOLE_ROWS_PRODUCT("m64n128k16.f32.bf16.bf16", KEYHOLE_REGISTERS_64, "%64", "%65", "%66")
        : KEYHOLE_THIRTY_TWO(c, 0), KEYHOLE_THIRTY_TWO(c, 32)
        : "l"(a), "l"(b), "r"(adds));
  }
}

/// c[64 x 2 m] += a[64 x 16] * b[16 x 2 m]: a in registers, b across its rows in shared memory.
template <class T, int m>
__device__ inline void multiply_columns(float (&c)[m], const uint32_t (&a)[4], uint64_t b) {
  static_assert(m == 32 || m == 64);
  if constexpr (std::is_same_v<T, __half> && m == 32) {
    asm volatile(KEYHOLE_COLUMNS_PRODUCT("m64n64k16.f32.f16.f16", KEYHOLE_REGISTERS_32,
                                         "{%32, %33, %34, %35}", "%36")
                 : KEYHOLE_THIRTY_TWO(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(KEYHOLE_COLUMNS_PRODUCT("m64n128k16.f32.f16.f16", KEYHOLE_REGISTERS_64,
                                         "{%64, %65, %66, %67}", "%68")
                 : KEYHOLE_THIRTY_TWO(c, 0), KEYHOLE_THIRTY_TWO(c, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else if constexpr (m == 32) {
    asm volatile(KEYHOLE_COLUMNS_PRODUCT("m64n64k16.f32.bf16.bf16", KEYHOLE_REGISTERS_32,
                                         "{%32, %33, %34, %35}", "%36")
                 : KEYHOLE_THIRTY_TWO(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(KEYHOLE_COLUMNS_PRODUCT("m64n128k16.f32.bf16.bf16", KEYHOLE_REGISTERS_64,
                                         "{%64, %65, %66, %67}", "%68")
                 : KEYHOLE_THIRTY_TWO(c, 0), KEYHOLE_THIRTY_TWO(c, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

/// c[64 x 2 m] += a[64 x 16] * b[2 m x 16]^T: a in registers, b along its rows in shared memory; fp16.
template <int m>
__device__ inline void multiply_held_rows(float (&c)[m], const uint32_t (&a)[4], uint64_t b) {
  static_assert(m == 32 || m == 64);
  if constexpr (m == 32) {
    asm volatile(KEYHOLE_HELD_ROWS_PRODUCT("m64n64k16.f32.f16.f16", KEYHOLE_REGISTERS_32,
                                           "{%32, %33, %34, %35}", "%36")
                 : KEYHOLE_THIRTY_TWO(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(KEYHOLE_HELD_ROWS_PRODUCT("m64n128k16.f32.f16.f16", KEYHOLE_REGISTERS_64,
                                           "{%64, %65, %66, %67}", "%68")
                 : KEYHOLE_THIRTY_TWO(c, 0), KEYHOLE_THIRTY_TWO(c, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef KEYHOLE_HELD_ROWS_PRODUCT
#undef KEYHOLE_COLUMNS_PRODUCT
#undef KEYHOLE_ROWS_PRODUCT
#undef KEYHOLE_THIRTY_TWO
#undef KEYHOLE_EIGHT
#undef KEYHOLE_REGISTERS_64
#undef KEYHOLE_REGISTERS_32

}  // namespace keyhole::gpu
