#include "runtime/engine/tensor.h"

#include <cstdlib>
#include <cstring>

#include "cpu/types.h"

namespace keyhole::runtime {
namespace {

std::string shape_text(const keyhole_tensor& t) {
  std::string s = "[";
  for (int32_t i = 0; i < t.rank && i < 4; ++i) {
    s += (i != 0 ? ", " : "") + std::to_string(t.shape[i]);
  }
  return s + "]";
}

[[noreturn]] void bad(const std::string& text) { throw Error(Status::invalid_argument, text); }

// Everything but the shape; returns the dtype.
DType check_common(const keyhole_tensor* t, const char* name, bool device = false) {
  const std::string who = std::string("tensor ") + name;
  if (t == nullptr) bad(who + " is NULL");
  if (t->dtype != KEYHOLE_F32 && t->dtype != KEYHOLE_F16 && t->dtype != KEYHOLE_BF16) {
    bad(who + ": unknown dtype " + std::to_string(t->dtype) +
        ", allowed: KEYHOLE_F32 (0), KEYHOLE_F16 (1), KEYHOLE_BF16 (2)");
  }
  if (t->memory == KEYHOLE_DEVICE && !device) {
    throw Error(Status::unsupported,
                who + " lies in device memory, which a host device cannot read");
  }
  if (t->memory != KEYHOLE_HOST && t->memory != KEYHOLE_PINNED && t->memory != KEYHOLE_DEVICE) {
    bad(who + ": unknown memory kind " + std::to_string(t->memory) +
        ", allowed: KEYHOLE_HOST (0), KEYHOLE_PINNED (1), KEYHOLE_DEVICE (2)");
  }
  if (t->rank < 1 || t->rank > 4) {
    bad(who + ": rank " + std::to_string(t->rank) + ", allowed: 1..4");
  }
  bool empty = false;
  for (int32_t i = 0; i < t->rank; ++i) {
    if (t->shape[i] < 0) bad(who + ": negative extent in shape " + shape_text(*t));
    empty = empty || t->shape[i] == 0;
  }
  if (!empty) {
    if (t->data == nullptr) bad(who + ": data is NULL");
    const int32_t last = t->rank - 1;
    if (t->shape[last] != 1 && t->strides[last] != 1) {
      bad(who + ": stride " + std::to_string(t->strides[last]) + " of the last axis, allowed: 1");
    }
    for (int32_t i = 0; i < last; ++i) {
      // A view that runs backwards or repeats rows is legal for reading; rows that cannot be
      // addressed in 63 bits are not.
      __int128 reach = static_cast<__int128>(t->strides[i]) * (t->shape[i] - 1) * 4;
      if (reach > INT64_MAX || reach < INT64_MIN) {
        bad(who + ": stride " + std::to_string(t->strides[i]) + " overflows the address space");
      }
    }
  }
  return static_cast<DType>(t->dtype);
}

/// The stride of an axis of length 1, which may be anything, becomes 0.
ptrdiff_t stride_of(const keyhole_tensor& t, int32_t axis) {
  return t.shape[axis] <= 1 ? 0 : static_cast<ptrdiff_t>(t.strides[axis]);
}

/// What check_rows() has seen of `t` for reading.
TensorOut writable(const keyhole_tensor& t, const TensorView& seen) {
  return {static_cast<std::byte*>(t.data),
          seen.token_stride,
          seen.head_stride,
          seen.tokens,
          seen.heads,
          seen.dim,
          seen.dtype,
          seen.memory};
}

}  // namespace

TensorView check_rows(const keyhole_tensor* t, const char* name, uint32_t heads, uint32_t dim,
                      bool one_token, bool device) {
  const DType dtype = check_common(t, name, device);
  const bool with_tokens = t->rank == 3;
  const int32_t head_axis = with_tokens ? 1 : 0;
  const bool shape_ok = (with_tokens || t->rank == 2) && t->shape[head_axis] == heads &&
                        t->shape[head_axis + 1] == dim &&
                        (!with_tokens || (one_token ? t->shape[0] == 1 : t->shape[0] <= INT32_MAX));
  if (!shape_ok) {
    const std::string hd = std::to_string(heads) + ", " + std::to_string(dim) + "]";
    bad(std::string("tensor ") + name + " has shape " + shape_text(*t) +
        ", needed: " + (one_token ? "[" : "[n, ") + hd);
  }
  return {.data = static_cast<const std::byte*>(t->data),
          .token_stride = with_tokens ? stride_of(*t, 0) : 0,
          .head_stride = stride_of(*t, head_axis),
          .tokens = with_tokens ? static_cast<size_t>(t->shape[0]) : 1,
          .heads = heads,
          .dim = dim,
          .dtype = dtype,
          .memory = static_cast<Memory>(t->memory)};
}

TensorView check_values(const keyhole_tensor* v, const ModelShape& model, uint32_t layer,
                        const TensorView& k, bool one_token, bool device) {
  const LayerShape shape = model.of(layer);
  if (!model.values_in_keys) {
    return check_rows(v, "v", shape.kv_heads, shape.value_dim, one_token, device);
  }
  if (v != nullptr) {
    bad("tensor v is given, but the engine was made with values_in_keys; allowed: NULL");
  }
  TensorView rows = k;
  rows.dim = shape.value_dim;
  return rows;
}

TensorOut check_out(const keyhole_tensor* t, const char* name, uint32_t heads, uint32_t dim,
                    bool device) {
  const TensorView rows = check_rows(t, name, heads, dim, true, device);
  if (heads > 1 && std::abs(rows.head_stride) < ptrdiff_t{dim}) {
    bad(std::string("tensor ") + name + ": stride of " + std::to_string(rows.head_stride) +
        " elements makes rows overlap, allowed: at least " + std::to_string(dim));
  }
  return writable(*t, rows);
}

TensorOut check_many_out(const keyhole_tensor* t, const char* name, uint32_t tokens, uint32_t heads,
                         uint32_t dim, bool device) {
  const TensorView rows = check_rows(t, name, heads, dim, false, device);
  const std::string who = std::string("tensor ") + name;
  if (rows.tokens != tokens) {
    bad(who + " has " + std::to_string(rows.tokens) + " tokens, needed: " + std::to_string(tokens));
  }
  // Rows lie token by token, or head by head; a stride of an axis of length 1 counts for nothing.
  const auto apart = [&](ptrdiff_t inner, uint32_t n, ptrdiff_t outer, uint32_t m) {
    const ptrdiff_t most =
        INT64_MAX / (int64_t{n} + 1) / static_cast<int64_t>(dtype_size(rows.dtype));
    if (inner < 0 || inner > most) return false;
    const ptrdiff_t reach = n > 1 ? ptrdiff_t{n - 1} * inner + dim : ptrdiff_t{dim};
    return (n == 1 || inner >= ptrdiff_t{dim}) && (m == 1 || std::abs(outer) >= reach);
  };
  if (tokens != 0 && !apart(rows.head_stride, heads, rows.token_stride, tokens) &&
      !apart(rows.token_stride, tokens, rows.head_stride, heads)) {
    bad(who + ": strides of " + std::to_string(rows.token_stride) + " and " +
        std::to_string(rows.head_stride) +
        " elements make rows overlap, or run backwards; allowed: rows of " + std::to_string(dim) +
        " elements side by side, token by token or head by head");
  }
  return writable(*t, rows);
}

TensorView check_matrix(const keyhole_tensor* t, const char* name, uint32_t dim) {
  const DType dtype = check_common(t, name);
  if (t->rank != 2 || t->shape[1] != dim || t->shape[0] > INT32_MAX) {
    bad(std::string("tensor ") + name + " has shape " + shape_text(*t) + ", needed: [n, " +
        std::to_string(dim) + "] with n < 2^31");
  }
  return {.data = static_cast<const std::byte*>(t->data),
          .token_stride = stride_of(*t, 0),
          .tokens = static_cast<size_t>(t->shape[0]),
          .dim = dim,
          .dtype = dtype,
          .memory = static_cast<Memory>(t->memory)};
}

void convert_row(const cpu::Kernels& kernels, const std::byte* src, DType from, std::byte* dst,
                 DType to, uint32_t dim, float* scratch) {
  if (from == to) {
    std::memcpy(dst, src, dim * dtype_size(to));
    return;
  }
  // Unaligned fp32 on either side is copied through the scratch row.
  kernels.to_f32[static_cast<int>(from)](src, scratch, dim);
  kernels.from_f32[static_cast<int>(to)](scratch, dst, dim);
}

void store_row(const cpu::Kernels& kernels, const TensorView& rows, size_t token, size_t head,
               std::byte* dst, DType to, uint32_t dim, float* scratch) {
  convert_row(kernels, rows.row(token, head), rows.dtype, dst, to, rows.dim, scratch);
  const size_t size = dtype_size(to);
  std::memset(dst + rows.dim * size, 0, (dim - rows.dim) * size);
}

void check_answer(const cpu::Kernels& kernels, const std::byte* o, DType dtype, size_t n) {
  if (kernels.all_finite[static_cast<int>(dtype)](o, n)) return;
  throw Error(Status::not_finite,
              "the attention of finite tensors is not finite: a product of q and K, or a sum of V, "
              "is beyond what fp32 holds (3.4e38)");
}

void check_finite(const cpu::Kernels& kernels, const TensorView& rows, const char* name,
                  uint32_t begin, uint32_t end, DType to, const TokenSample& sample) {
  float scratch[kMaxHeadDim];
  std::byte converted[kMaxHeadDim * sizeof(float)];
  for (uint32_t t = begin; t < end; ++t) {
    for (uint32_t h = 0; h < rows.heads; ++h) {
      const std::byte* src = rows.row(t, h);
      if (!kernels.all_finite[static_cast<int>(rows.dtype)](src, rows.dim)) {
        throw Error(Status::not_finite,
                    std::string("tensor ") + name + " holds NaN or Inf at token " +
                        std::to_string(sample.token(t)) + ", head " + std::to_string(h));
      }
      // Rounding to 16 bits can turn a finite number into Inf.
      if (to == DType::f32 || to == rows.dtype) continue;
      convert_row(kernels, src, rows.dtype, converted, to, rows.dim, scratch);
      if (!kernels.all_finite[static_cast<int>(to)](converted, rows.dim)) {
        throw Error(Status::not_finite,
                    std::string("tensor ") + name + " at token " + std::to_string(sample.token(t)) +
                        ", head " + std::to_string(h) + " overflows kv_dtype " + dtype_name(to) +
                        (to == DType::f16 ? " (largest value 65504)" : ""));
      }
    }
  }
}

}  // namespace keyhole::runtime
