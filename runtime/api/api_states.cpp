// Merges of the caller's attention states, in host memory and in device memory.
#include <cmath>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "gpu/states.h"
#include "keyhole/attention.h"
#include "runtime/api/api_guard.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

namespace {

constexpr float kLn2 = 0.6931471805599453F;
constexpr float kLog2E = 1.4426950408889634F;

void check_base(keyhole_lse_base base) {
  if (base == KEYHOLE_LSE_NATURAL || base == KEYHOLE_LSE_LOG2) return;
  throw Error(Status::invalid_argument, "base is " + std::to_string(base) +
                                            ", allowed: KEYHOLE_LSE_NATURAL and KEYHOLE_LSE_LOG2");
}

DType check_dtype(keyhole_dtype dtype, const char* name) {
  if (dtype == KEYHOLE_F32 || dtype == KEYHOLE_F16 || dtype == KEYHOLE_BF16) {
    return static_cast<DType>(dtype);
  }
  throw Error(Status::invalid_argument, std::string(name) + " is " + std::to_string(dtype) +
                                            ", allowed: KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16");
}

/// Sizes, and pointers to n states, which are not read.
template <class T>
void check_states(uint32_t n, const T* const* o, const float* const* lse, uint32_t rows,
                  const char* rows_name, uint32_t head_dim, const void* out, const void* out_lse) {
  require(out, "out");
  require(out_lse, "out_lse");
  if (rows == 0 || head_dim == 0 ||
      uint64_t{rows} * head_dim > (uint64_t{1} << 63) / sizeof(float)) {
    throw Error(Status::invalid_argument,
                std::string(rows_name) + " is " + std::to_string(rows) + ", head_dim is " +
                    std::to_string(head_dim) +
                    ", allowed: at least 1, and a state of up to 2^63 bytes");
  }
  if (n == 0) return;
  require(o, "o");
  require(lse, "lse");
  for (uint32_t i = 0; i < n; ++i) {
    require(o[i], "o[i]");
    require(lse[i], "lse[i]");
  }
}

}  // namespace

extern "C" {

keyhole_status keyhole_merge_states(uint32_t n, const float* const* o, const float* const* lse,
                                    uint32_t heads, uint32_t head_dim, keyhole_lse_base base,
                                    float* out, float* out_lse) {
  return guarded([&] {
    check_states(n, o, lse, heads, "heads", head_dim, out, out_lse);
    check_base(base);
    // A copy with natural logarithms. An empty state's o is whatever it is: head by head, empty ones are left out.
    std::vector<float> natural(n);
    std::vector<StateView> states(n);
    for (uint32_t h = 0; h < heads; ++h) {
      size_t count = 0;
      bool is_nan = false;
      for (uint32_t i = 0; i < n; ++i) {
        const float x = lse[i][h];
        is_nan = is_nan || std::isnan(x);
        if (x == kMinusInf) continue;
        natural[count] = base == KEYHOLE_LSE_LOG2 ? x * kLn2 : x;
        // merge_states only reads its inputs.
        states[count] = {const_cast<float*>(o[i]) + size_t{h} * head_dim, &natural[count]};
        ++count;
      }
      const StateView to{out + size_t{h} * head_dim, out_lse + h};
      if (is_nan) {
        std::fill_n(to.o, head_dim, std::nanf(""));
        *to.lse = std::nanf("");
        continue;
      }
      cpu::merge_states(std::span(states).first(count), 1, head_dim, to);
      if (base == KEYHOLE_LSE_LOG2) *to.lse *= kLog2E;
    }
  });
}

keyhole_status keyhole_merge_states_device(uint32_t n, const void* const* o,
                                           const float* const* lse, uint32_t rows,
                                           uint32_t head_dim, keyhole_dtype o_dtype,
                                           keyhole_lse_base base, void* out,
                                           keyhole_dtype out_dtype, float* out_lse, void* stream) {
  return guarded([&] {
    check_states(n, o, lse, rows, "rows", head_dim, out, out_lse);
    check_base(base);
    if (n > gpu::kMostMergedStates) {
      throw Error(Status::invalid_argument, "n is " + std::to_string(n) + ", allowed: 0.." +
                                                std::to_string(gpu::kMostMergedStates));
    }
    gpu::merge_states({.o = o,
                       .lse = lse,
                       .count = n,
                       .rows = rows,
                       .dim = head_dim,
                       .dtype = check_dtype(o_dtype, "o_dtype"),
                       .base2 = base == KEYHOLE_LSE_LOG2,
                       .out = out,
                       .out_dtype = check_dtype(out_dtype, "out_dtype"),
                       .out_lse = out_lse},
                      stream);
  });
}

}  // extern "C"
