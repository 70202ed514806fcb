// The run-time dispatch table: every SIMD kernel of the project behind one struct of functions.
//
// A level is a set of instructions; each has one translation unit (kernels_<level>.cpp) that alone is
// compiled with that level's flags. The best level that the machine has is chosen at run time; the
// environment variable KEYHOLE_CPU=scalar|avx2|avx512|avx512vnni forces one. Scalar code is the
// reference and stays scalar.
//
// Rows may be unaligned; `dim` is a multiple of 16 from 64 to 576; `group` is 1..kMaxGroup. Kernels allocate
// nothing, never throw, and read no byte outside the rows that they were given.
#pragma once

#include <span>

#include "cpu/code_kernels.h"
#include "cpu/prompt_kernels.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"

namespace keyhole::cpu {

enum class Level : int32_t { scalar = 0, avx2 = 1, avx512 = 2, avx512vnni = 3 };

/// Inner products of `count` keys with the `group` queries of a group; every key is loaded once.
struct ScoreArgs {
  const float* queries;  ///< `[group, keys.dim]` fp32 contiguous
  uint32_t group;
  RowsView keys;        ///< of one head, of the kernel's dtype
  const uint32_t* ids;  ///< `[count]` rows to gather (prefetched ahead), or null: rows [0, count)
  size_t count;
  float* scores;        ///< out: scores[h*score_stride + i] = queries[h] . key_i (unscaled)
  size_t score_stride;  ///< elements between heads, >= count
};

/// Inner products of int8 keys without scales of channels: score = (sum_j qi[h][j]*k[i][j]) * query_scales[h].
/// Integer arithmetic, so that all levels give the same bits.
struct ScoreI8Args {
  const int8_t* queries;      ///< `[group, dim]`, in [-127, 127]
  const float* query_scales;  ///< `[group]`
  uint32_t group;
  uint32_t dim;
  const int8_t* keys;  ///< in [-127, 127]
  size_t key_stride;   ///< bytes between rows
  const uint32_t* ids;
  size_t count;
  float* scores;
  size_t score_stride;
};

/// Inner products over some components alone (SparQ's approximate scores), for rows of a block in which keys lie
/// component by component: element i of component j is block[j*block_rows + i]. Every element is loaded once for the
/// group. Sums are fp32, component by component.
struct ScoreComponentsArgs {
  const float* queries;  ///< `[group, component_count]` fp32: the chosen components of each query
  uint32_t group;
  const uint32_t* components;  ///< `[component_count]` which components; read in this order
  uint32_t component_count;    ///< 1..kMaxHeadDim
  const std::byte* block;      ///< elements of the kernel's dtype
  size_t block_rows;
  const std::byte* next;  ///< a block of the same shape that will be scored after this one, or null
  size_t first;           ///< rows [first, first + count) are scored; first + count <= block_rows
  size_t count;
  float* scores;        ///< out: scores[h*score_stride + i] of row first + i
  size_t score_stride;  ///< elements between heads, >= count
};

/// Partial attention of the group over a contiguous range or an id list: writes the state of exactly
/// these tokens. K and V of a token are loaded once for the whole group. count = 0 gives (0, -inf).
/// Accumulates in fp32 with an online softmax; the result depends only on the arguments.
struct AttendArgs {
  const float* queries;  ///< `[group, dim]` fp32 contiguous
  uint32_t group;
  RowsView keys, values;  ///< of one head, of one dim and the kernel's dtype
  const uint32_t* ids;    ///< `[count]` rows to gather, or null: rows [0, count)
  size_t count;
  LogitParams logits;
  float* o;    ///< out `[group, dim]`
  float* lse;  ///< out `[group]`
};

/// Partial attention from inner products that are known: reads values only, each once for the whole group. A score
/// that is not finite (an overflowed inner product) gives an lse that is not finite and any o, except that -inf
/// beside finite scores weighs nothing.
struct AttendScoredArgs {
  const float* scores;  ///< scores[h*score_stride + i] = queries[h] . key_i (unscaled)
  size_t score_stride;  ///< elements between heads, >= count
  uint32_t group;
  RowsView values;      ///< of one head, of the kernel's dtype
  const uint32_t* ids;  ///< `[count]` rows to gather, or null: rows [0, count)
  size_t count;
  LogitParams logits;
  float* o;    ///< out `[group, values.dim]`
  float* lse;  ///< out `[group]`
};

/// Keeps the columns i of scores `[group, count]` that are above a head's threshold for one head at least:
/// they move to the front of `ids` and of every head's scores, in their order. A NaN is above nothing.
struct KeepArgs {
  float* scores;        ///< scores[h*score_stride + i]; overwritten
  size_t score_stride;  ///< elements between heads, >= count
  uint32_t group;
  uint32_t* ids;  ///< `[count]`; overwritten
  size_t count;
  const float* thresholds;  ///< `[group]`
};

/// Weights of partitions of keys for a group, by their mean keys: size * e^(logit of the mean + t/2 - shift), where t
/// is the variance of the logits inside the partition if its keys spread alike in all directions (second order of the
/// cumulant expansion; without variances the first, a lower bound by Jensen's inequality).
struct PartitionArgs {
  const float* scores;  ///< scores[h*score_stride + i] = queries[h] . mean key i (unscaled)
  size_t score_stride;  ///< elements between heads, >= count
  uint32_t group;
  size_t count;
  const float* sizes;         ///< `[count]` keys; 0 weighs nothing
  const float* variances;     ///< `[count]` of an element of a key, mean over elements; null: 0
  const float* square_norms;  ///< `[group]` |q|^2
  LogitParams logits;
  /// `[group]` the largest mean of e^logit that is believed, given as a logit; may be -inf.
  const float* caps;
  /// `[group]` by how much the logit of a mean key may be wrong: a mean is a lower bound, so what lies that far below
  /// it is believed in spite of the cap. Null: the cap holds for all.
  const float* margins = nullptr;
  /// `[group]` the least logit that is believed; weights above it count as equal to it.
  const float* shifts;
  float* weights;  ///< out `[group, out_stride]`
  /// Out `[group, out_stride]`: weight^2 * (e^min(t, 2) - 1) / size, the variance of the weight as a mean of `size`
  /// draws. Null: not wanted.
  float* uncertainties;
  size_t out_stride;  ///< >= count
};

/// Adds weighted rows: o[h] += sum over i of weights[h*weight_stride + i] * row i. Weights may have any sign.
struct WeightedSumArgs {
  const float* weights;
  size_t weight_stride;  ///< elements between heads, >= count
  uint32_t group;
  RowsView values;      ///< of one head, of the kernel's dtype
  const uint32_t* ids;  ///< `[count]` rows to gather, or null: rows [0, count)
  size_t count;
  float* o;  ///< in and out `[group, values.dim]`
};

/// One level's kernels. Arrays are indexed by DType: f32, f16, bf16; where there are four, i8.
struct Kernels {
  Level level;
  const char* name;  ///< as accepted by KEYHOLE_CPU
  void (*score[4])(const ScoreArgs&);
  void (*score_i8)(const ScoreI8Args&);
  void (*score_components[4])(const ScoreComponentsArgs&);
  void (*attend[4])(const AttendArgs&);
  void (*attend_scored[4])(const AttendScoredArgs&);
  /// ln sum exp(logit(scores[i])) over `count` inner products; -inf for none.
  float (*log_sum_exp)(const float* scores, size_t count, const LogitParams& logits);
  /// Moves the columns that pass to the front (see KeepArgs) and returns how many there are.
  size_t (*keep_above)(const KeepArgs&);
  void (*weigh_partitions)(const PartitionArgs&);
  void (*weighted_sum[4])(const WeightedSumArgs&);
  /// Kernels of codes of keys and values, see cpu/code_kernels.h.
  void (*score_codes)(const ScoreCodesArgs&);
  void (*sum_codes)(const SumCodesArgs&);
  /// Kernels for many queries at once, see cpu/prompt_kernels.h.
  void (*product)(const ProductArgs&);
  void (*weigh_row)(const WeighRowArgs&);
  /// dst[i] = fp32(src[i]).
  void (*to_f32[3])(const std::byte* src, float* dst, size_t n);
  /// dst[i] = src[i] * scales[i], from int8 and bf16 to fp32.
  void (*i8_to_f32)(const std::byte* src, const uint16_t* scales, float* dst, size_t n);
  /// dst[i] = dtype(src[i]), round to nearest even.
  void (*from_f32[3])(const float* src, std::byte* dst, size_t n);
  /// True if no element is NaN or Inf.
  bool (*all_finite[3])(const std::byte* src, size_t n);
};

/// Kernels of a level, or null where this machine cannot run it.
[[nodiscard]] const Kernels* kernels_for(Level level);

/// The levels that this machine runs, in rising order.
[[nodiscard]] std::span<const Level> available_levels();

/// The level named by `forced` (null or "": the environment variable KEYHOLE_CPU; unset: the best).
/// Throws Error(invalid_argument) for an unknown name and Error(unsupported) for a level that the
/// machine lacks; both name the levels that it has.
[[nodiscard]] const Kernels& select_kernels(const char* forced = nullptr);

[[nodiscard]] const char* level_name(Level level);

}  // namespace keyhole::cpu
