// Keyhole's glossary: the words of the system and the types that every part shares.
//
//   attention state   (o, lse) of a set of tokens for one query head: lse = ln sum exp(scale*q.k),
//                     o = sum exp(scale*q.k - lse)*v. Natural log. Empty set: lse = -inf, o = 0.
//   sink              tokens [0, S): exact, on the device.
//   window            the newest tokens (at least W of them): exact, on the device.
//   sliding layer     a layer that attends to its newest W tokens alone: no sink, nothing offloaded.
//   learned sink      a logit of a query head without key and value: the attention state (0, logit).
//   resident          sink or window.
//   offloaded         every other token: host memory.
//   indexed           offloaded and found through an index.
//   pending           offloaded and not yet in the index: attended exactly.
//   group             the g = Hq/Hkv query heads that share one KV head.
//   row               number of an offloaded token: token = S + row.
//   recall@k          share of the true top-k keys (by inner product) that a search returned.
//   scan fraction     keys whose score was computed / offloaded keys (also: selectivity).
//
// Reading this file is enough to read the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace keyhole {

/// Limits of the contract. Head dimensions: multiples of 16 from 64 to 576.
inline constexpr uint32_t kMaxGroup = 128;
inline constexpr uint32_t kMaxHeadDim = 576;
/// What kernels of a GPU take of them: models beyond it run on the host.
inline constexpr uint32_t kMaxDeviceGroup = 16;
inline constexpr uint32_t kMaxDeviceHeadDim = 256;
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

[[nodiscard]] constexpr bool is_supported_head_dim(uint32_t dim) {
  return dim % 16 == 0 && dim >= 64 && dim <= kMaxHeadDim;
}
inline constexpr char kHeadDims[] = "multiples of 16 from 64 to 576";  ///< for texts

[[nodiscard]] constexpr bool is_device_head_dim(uint32_t dim) {
  return dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256;
}
inline constexpr char kDeviceHeadDims[] = "64, 80, 96, 128, 256";

/// Storage type of keys, values and queries. Values equal the public keyhole_dtype.
enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };

[[nodiscard]] constexpr size_t dtype_size(DType t) {
  return t == DType::f32 ? 4 : (t == DType::i8 ? 1 : 2);
}
[[nodiscard]] constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i8: return "i8";
  }
  return "unknown";
}

/// Outcome of an operation. Values equal the public keyhole_status (checked in runtime/).
enum class Status : int32_t {
  ok = 0,
  invalid_argument = -1,  ///< a value is outside what is allowed
  unsupported = -2,       ///< valid, but this build or machine cannot do it
  out_of_memory = -3,     ///< host memory, or a cap that was set on it
  out_of_device_memory = -4,
  device_error = -5,
  timeout = -6,
  io = -7,            ///< a file cannot be opened, read or written
  corrupt = -8,       ///< a file's content contradicts itself
  version = -9,       ///< made by a newer or other version
  cancelled = -10,    ///< the caller's progress callback asked to stop
  busy = -11,         ///< the object is in use by another thread, or begin without end
  not_finite = -12,   ///< NaN or Inf where a finite number is needed
  internal = -13,     ///< a failed assumption inside the library: please report
  rank_failed = -14,  ///< another process that works on the same failed, or does something else
};

/// The one exception of the project: a status and a text that says what was wrong, the value seen and
/// the values allowed. It never crosses the C boundary (runtime/ translates it).
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  [[nodiscard]] Status status() const { return status_; }

 private:
  Status status_;
};

/// Rows of int8 that share their scales: as many as a block of codes has (cpu/code_layout.h).
inline constexpr uint32_t kScaleRows = 256;

/// What int8 rows are multiplied with, one bf16 per channel and block of kScaleRows rows: element j of row i
/// stands for int8 * data[(first + i) / kScaleRows * stride + j]. The product is exact in fp32 (7 bits by 8).
struct RowScales {
  const uint16_t* data = nullptr;  ///< of the first row's block; null: rows are not int8
  size_t stride = 0;               ///< elements between blocks
  size_t first = 0;                ///< place of row 0 in its block, < kScaleRows

  [[nodiscard]] const uint16_t* row(size_t i) const {
    return data + (first + i) / kScaleRows * stride;
  }
  [[nodiscard]] RowScales slice(size_t begin) const {
    if (data == nullptr) return {};
    return {row(begin), stride, (first + begin) % kScaleRows};
  }
};

/// Borrowed view of the rows of one KV head, `[count, dim]` of `dtype`; rows are `stride` bytes apart
/// (elements inside a row are contiguous). Owns nothing. Rows of i8 stand for what their scales make of them:
/// cpu/row_access.h reads rows of any dtype.
struct RowsView {
  const std::byte* data = nullptr;
  size_t stride = 0;  ///< bytes between rows
  size_t count = 0;
  uint32_t dim = 0;
  DType dtype = DType::f32;
  RowScales scales{};  ///< of dtype i8

  [[nodiscard]] const std::byte* row(size_t i) const { return data + i * stride; }
  [[nodiscard]] RowsView slice(size_t begin, size_t n) const {
    return {data + begin * stride, stride, n, dim, dtype, scales.slice(begin)};
  }
};

/// Keys and values of one KV head; same count, dim and dtype.
struct KvView {
  RowsView keys;
  RowsView values;
};

/// How logits are made from inner products: logit = scale*q.k, and with a soft-cap c > 0
/// logit = c*tanh(scale*q.k / c).
struct LogitParams {
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0: none

  bool operator==(const LogitParams&) const = default;
};

/// Those of a layer, where layers may differ: its own, or where there are none those of all.
[[nodiscard]] inline const LogitParams& logits_of_layer(const LogitParams& all,
                                                        const std::vector<LogitParams>& own,
                                                        uint32_t layer) {
  return own.empty() ? all : own[layer];
}

/// Borrowed attention states of a group: o is `[group, dim]` fp32 contiguous, lse is `[group]` fp32.
struct StateView {
  float* o = nullptr;
  float* lse = nullptr;
};

}  // namespace keyhole
