// What surrounds the pass of a turn over codes: queries before it, and behind it the rows that are read exactly and the
// merge.
#include "cpu/code_doubt.h"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/common/launch.h"
#include "gpu/cuda/common/rotation.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/warp.cuh"
#include "gpu/cuda/prefill/coded_kernels.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kMostDim = 256;
constexpr int kQuads = 2;  ///< of a lane, at most: quad u has components 128 u + 4 lane ..
/// Rows of more than this share of a query's weight, in base 2, are read exactly.
constexpr float kHeavyShare = -9.0F;

__device__ float capped_logit2(const LogitParams& logits, float product) {
  const float x = logits.scale * product;
  return (logits.softcap > 0.0F ? logits.softcap * tanhf(x / logits.softcap) : x) * kLog2E;
}
/// The factor that makes a logit in base 2 of BlockedParams::sums' largest one.
__device__ float unit_of(const LogitParams& logits) {
  return (logits.softcap > 0.0F ? 1.0F : logits.scale) * kLog2E;
}
__device__ float log2_of_state(float2 state, float unit) {
  return state.y > 0.0F ? state.x * unit + log2f(state.y) : kMinusInf;
}

/// The query row that is number `i` of its KV head in this pass; n * group: there is none.
__device__ uint32_t query_row(const CodedParams& a, uint32_t kv_head, uint32_t i) {
  const uint32_t all = a.n * a.group;
  if (a.pass_rows == nullptr) return i < all ? i : all;
  return i < a.pass_counts[kv_head] ? a.pass_rows[size_t{kv_head} * all + i] : all;
}
/// Its place among `[n, q_heads]`.
__device__ size_t place_of(const CodedParams& a, uint32_t kv_head, uint32_t row) {
  return size_t{row / a.group} * a.q_heads + kv_head * a.group + row % a.group;
}
/// A lane's quads of a query as it came.
__device__ void load_query(const CodedParams& a, size_t place, float (&x)[kQuads][4]) {
  const uint32_t dim = a.rows.code.dim, lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t at = 128 * u + 4 * lane;
#pragma unroll
    for (float& y : x[u]) y = 0.0F;
    if (at >= dim) continue;
    convert(load_aligned(a.raw, a.dtype, place * dim + at), a.dtype, x[u]);
    if (a.raw_low == nullptr) continue;
    float low[4];
    convert(load_aligned(a.raw_low, a.dtype, place * dim + at), a.dtype, low);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) x[u][j] += low[j];
  }
}

/// The weight by code, base 2, that all rows reach which may weigh for a query in doubt (cpu/code_doubt.h).
__device__ float least_weight(const CodedParams& a, float lse, float noise, float widest) {
  const float cap = a.logits.softcap * kLog2E;
  const float far = kDoubtDeviations * sqrtf(2.0F * kLog2E * noise * widest);
  const float deviation = far / kDoubtDeviations;
  const float bias = fminf(deviation * deviation / (2.0F * kLog2E), kMostNoiseBias * kLog2E);
  const float bound = uncapped_logit(lse - doubt_limits(a.rows.code).light * kLog2E, cap);
  const float least = capped_logit(bound - far, cap) - bias;
  return least - 0.01F - 1e-5F * fabsf(least);  // rounding may have taken this from a weight
}

/// Grid (padded / kWarps, KV heads): a warp for a query row.
__global__ void __launch_bounds__(kWarps * 32)
    prepare_queries(const __grid_constant__ CodedParams a) {
  __shared__ float memory[kWarps][kMostDim];
  let_next_kernel_start();
  const uint32_t dim = a.rows.code.dim, columns = coded_columns(dim);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const uint32_t number = blockIdx.x * kWarps + warp;
  const size_t at = size_t{kv_head} * a.padded + number;
  if (lane == 0) a.list_counts[at] = 0;
  if (number == 0 && lane == 0) a.next_counts[kv_head] = 0;
  __half* const to = a.q + at * columns;
  const uint32_t row = query_row(a, kv_head, number);
  const float widest = __uint_as_float(a.rows.figures[kv_head].widest);
  if (threadIdx.x == 0 && !(widest < HUGE_VALF)) atomicOr(&a.status->flags, CodedStatus::kUnknown);
  if (row == a.n * a.group) {
    for (uint32_t j = lane; j < columns; j += 32) to[j] = __float2half_rn(0.0F);
    if (lane == 0) a.queries[at] = {1.0F, 0.0F, HUGE_VALF, 0.0F};
    return;
  }
  const size_t place = place_of(a, kv_head, row);
  float x[kQuads][4];
  load_query(a, place, x);
  float* const own = memory[warp];
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t begin = 128 * u + 4 * lane;
    if (begin >= dim) continue;
    const float4 scale = *reinterpret_cast<const float4*>(a.rows.key_scale + kv_head * dim + begin);
    own[begin] = __fdividef(x[u][0], scale.x), own[begin + 1] = __fdividef(x[u][1], scale.y);
    own[begin + 2] = __fdividef(x[u][2], scale.z), own[begin + 3] = __fdividef(x[u][3], scale.w);
  }
  __syncwarp();
  rotate_in_shared(own, dim, false);
  float square = 0.0F, largest = 0.0F;
  for (uint32_t j = lane; j < dim; j += 32) {
    square = fmaf(own[j], own[j], square);
    largest = fmaxf(largest, fabsf(own[j]));
  }
  square = warp_sum(square);
  largest = warp_max(largest);
  if (!(square < HUGE_VALF) && lane == 0) atomicOr(&a.status->flags, CodedStatus::kNotFinite);
  // fp16 has the most of a number's bits, whatever the query's size: the largest component becomes 512 .. 1024.
  const int exponent = largest > 0.0F ? min(max(ilogbf(largest) - 9, -100), 100) : 0;
  const float inverse = exp2f(static_cast<float>(-exponent));
  for (uint32_t j = lane; j < columns; j += 32)
    to[j] = __float2half_rn(j < dim ? own[j] * inverse : 0.0F);
  if (lane != 0) return;
  const LogitParams& logits = a.logits;
  const float noise = 0.5F * logits.scale * logits.scale * square * kLog2E;
  const float lse =
      a.pass_lse == nullptr ? NAN : a.pass_lse[size_t{kv_head} * a.n * a.group + number];
  CodedQuery q;
  q.unit =
      logits.scale * exp2f(static_cast<float>(exponent)) * (logits.softcap > 0.0F ? 1.0F : kLog2E);
  q.noise = noise;
  if (isnan(lse)) {
    q.seed = log2_of_state(a.sums_before[place], unit_of(logits));
    q.limit = kHeavyShare;
  } else {
    q.seed = least_weight(a, lse, noise, widest);
    q.limit = NAN;
  }
  a.queries[at] = q;
}

/// One thread block for a KV head: numbers the rows that were found.
__global__ void __launch_bounds__(1024) number_rows(const __grid_constant__ CodedParams a) {
  constexpr uint32_t kOwn = 4;  ///< words of a thread
  __shared__ uint32_t of_warps[32];
  wait_for_kernels_before();
  let_next_kernel_start();
  const uint32_t kv_head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t words = a.rows.blocks * 8;
  const size_t head = size_t{kv_head} * words;
  uint32_t so_far = 0;
  for (uint32_t first = 0; first < words; first += 1024 * kOwn) {
    const uint32_t at = first + threadIdx.x * kOwn;  // words are a multiple of kOwn
    uint4 word{};
    if (at < words) word = *reinterpret_cast<const uint4*>(a.found + head + at);
    uint32_t own[kOwn] = {word.x, word.y, word.z, word.w};
    uint32_t count = 0;
#pragma unroll
    for (const uint32_t x : own) count += static_cast<uint32_t>(__popc(x));
    uint32_t sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kWholeWarp, sum, step);
      if (static_cast<int>(lane) >= step) sum += other;
    }
    __syncthreads();  // the sums of words before have been read
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    uint32_t number = so_far + sum - count;
    const uint32_t of_warp = of_warps[lane];
    number += __reduce_add_sync(kWholeWarp, lane < warp ? of_warp : 0U);
    so_far += __reduce_add_sync(kWholeWarp, of_warp);
    if (at >= words) continue;
    uint32_t before[kOwn];
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
      before[i] = number;
      while (own[i] != 0) {
        const auto bit = static_cast<uint32_t>(__ffs(static_cast<int>(own[i])) - 1);
        own[i] &= own[i] - 1;
        if (number < a.row_capacity)
          a.fetched[size_t{kv_head} * a.row_capacity + number] = 32 * (at + i) + bit;
        ++number;
      }
    }
    *reinterpret_cast<uint4*>(a.before + head + at) = {before[0], before[1], before[2], before[3]};
  }
  if (threadIdx.x != 0) return;
  if (so_far > a.row_capacity) atomicOr(&a.status->flags, CodedStatus::kTooMany);
  a.fetched_counts[kv_head] = min(so_far, a.row_capacity);
  atomicAdd(&a.status->rows, so_far);
}

/// Grid (any, KV heads): a warp for a row.
__global__ void __launch_bounds__(kWarps * 32) fetch_rows(const __grid_constant__ CodedParams a) {
  wait_for_kernels_before();
  let_next_kernel_start();
  const uint32_t lane = threadIdx.x % 32, kv_head = blockIdx.y;
  const uint32_t count = a.fetched_counts[kv_head], pieces = a.rows.row_bytes / 16;
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < count; i += gridDim.x * kWarps) {
    const size_t number = size_t{kv_head} * a.row_capacity + i;
    const size_t at =
        kv_head * a.rows.kv_head_stride + size_t{a.fetched[number]} * a.rows.row_bytes;
    auto* const to = reinterpret_cast<uint4*>(a.fetched_rows + number * 2 * a.rows.row_bytes);
    for (uint32_t piece = lane; piece < 2 * pieces; piece += 32) {
      const std::byte* const from = piece < pieces ? a.rows.keys : a.rows.values;
      to[piece] = __ldcs(reinterpret_cast<const uint4*>(from + at) + piece % pieces);
    }
  }
}

/// A lane's quads of a fetched row. which: 0 for its key, 1 for its value; row: its number among all.
__device__ void load_row(const CodedParams& a, uint32_t kv_head, uint32_t row, size_t number,
                         uint32_t which, float (&x)[kQuads][4]) {
  const CodedRows& r = a.rows;
  const uint32_t dim = r.code.dim, lane = threadIdx.x % 32;
  const std::byte* const from = a.fetched_rows + (number * 2 + which) * r.row_bytes;
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t at = 128 * u + 4 * lane;
    if (at >= dim) {
#pragma unroll
      for (float& y : x[u]) y = 0.0F;
    } else if (r.dtype == DType::i8) {
      const size_t scales_at =
          ((size_t{row / kCodeBlock} * r.kv_heads + kv_head) * 2 + which) * dim + at;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t scale = static_cast<uint32_t>(r.row_scales[scales_at + j]) << 16U;
        x[u][j] = static_cast<float>(reinterpret_cast<const int8_t*>(from)[at + j]) *
                  __uint_as_float(scale);
      }
    } else {
      convert(load_aligned(from, r.dtype, at), r.dtype, x[u]);
    }
  }
}

/// Grid (padded / kWarps, KV heads): a warp for a query row.
__global__ void __launch_bounds__(kWarps * 32) merge_parts(const __grid_constant__ CodedParams a) {
  __shared__ float memory[kWarps][kMostDim];
  wait_for_kernels_before();
  const uint32_t dim = a.rows.code.dim, lane = threadIdx.x % 32, kv_head = blockIdx.y;
  const uint32_t number = blockIdx.x * kWarps + threadIdx.x / 32;
  const uint32_t row = query_row(a, kv_head, number);
  if (row == a.n * a.group) return;
  const size_t at = size_t{kv_head} * a.padded + number, place = place_of(a, kv_head, row);
  const auto again = [&](float lse) {
    if (lane != 0) return;
    const uint32_t to = atomicAdd(a.next_counts + kv_head, 1U);
    const size_t next = size_t{kv_head} * a.n * a.group + to;
    a.next_rows[next] = row;
    a.next_lse[next] = lse;
    atomicMax(&a.status->most_doubted, to + 1);
    atomicAdd(&a.status->doubted, 1U);
    if (to == 0) atomicAdd(&a.status->heads, 1U);
  };
  const uint32_t listed = a.list_counts[at];
  if (lane == 0 && listed != 0) atomicAdd(&a.status->listed, listed);
  if (listed > a.list_capacity) {
    // The next pass has longer lists.
    if (a.pass_rows != nullptr) {
      if (lane == 0) atomicOr(&a.status->flags, CodedStatus::kTooMany);
    } else {
      again(NAN);
    }
    return;
  }

  // The codes: parts of the pass, turned back.
  const size_t rows_of_split = size_t{a.rows.kv_heads} * a.padded;
  float top = kMinusInf;
  for (uint32_t s = lane; s < a.splits; s += 32)
    top = fmaxf(top, a.part_sums[s * rows_of_split + at].x);
  top = warp_max(top);
  const float base = finite_base(top);
  float total = 0.0F, o[kQuads][4] = {};
#pragma unroll 4
  for (uint32_t s = 0; s < a.splits; ++s) {
    const size_t part = s * rows_of_split + at;
    const float2 sum = a.part_sums[part];
    const float weight = exp2f(sum.x - base);
    total = fmaf(weight, sum.y, total);
#pragma unroll
    for (uint32_t u = 0; u < kQuads; ++u) {
      const uint32_t j = 128 * u + 4 * lane;
      if (j >= dim) continue;
      const float4 y = *reinterpret_cast<const float4*>(a.part_o + part * dim + j);
      o[u][0] = fmaf(weight, y.x, o[u][0]), o[u][1] = fmaf(weight, y.y, o[u][1]);
      o[u][2] = fmaf(weight, y.z, o[u][2]), o[u][3] = fmaf(weight, y.w, o[u][3]);
    }
  }
  float* const own = memory[threadIdx.x / 32];
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t j = 128 * u + 4 * lane;
    if (j < dim)
      *reinterpret_cast<float4*>(own + j) = make_float4(o[u][0], o[u][1], o[u][2], o[u][3]);
  }
  __syncwarp();
  rotate_in_shared(own, dim, true);
  const float scale = a.rows.value_scale[kv_head], value_scale = scale > 0.0F ? scale : 1.0F;
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t j = 128 * u + 4 * lane;
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) o[u][k] = j < dim ? value_scale * own[j + k] : 0.0F;
  }
  const float unread = total > 0.0F ? base + log2f(total) : kMinusInf, heaviest = top;

  const auto add = [&](float logit, float more, const float(&x)[kQuads][4]) {
    const float now = fmaxf(top, logit), anew = finite_base(now);
    const float keep = exp2f(top - anew), take = exp2f(logit - anew);
    total = fmaf(total, keep, take * more);
#pragma unroll
    for (uint32_t u = 0; u < kQuads; ++u) {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) o[u][k] = fmaf(o[u][k], keep, take * x[u][k]);
    }
    top = now;
  };
  float q[kQuads][4];
  load_query(a, place, q);
  const uint32_t words = a.rows.blocks * 8;
  const uint32_t* const list = a.lists + at * a.list_capacity;
  for (uint32_t first = 0; first < listed; first += 32) {
    // A lane finds one of the rows, and all lanes attend them one by one.
    const uint32_t count = min(listed - first, 32U), own = list[first + min(lane, count - 1)];
    const size_t word = size_t{kv_head} * words + own / 32;
    const uint32_t own_slot =
        a.before[word] + static_cast<uint32_t>(__popc(a.found[word] & ((1U << own % 32) - 1)));
    if (__any_sync(kWholeWarp, own_slot >= a.row_capacity)) return;  // which number_rows() has told
    const auto load = [&](uint32_t i, float(&k)[kQuads][4], float(&v)[kQuads][4]) {
      const uint32_t key = __shfl_sync(kWholeWarp, own, static_cast<int>(i));
      const uint32_t slot = __shfl_sync(kWholeWarp, own_slot, static_cast<int>(i));
      const size_t fetched = size_t{kv_head} * a.row_capacity + slot;
      load_row(a, kv_head, key, fetched, 0, k);
      load_row(a, kv_head, key, fetched, 1, v);
    };
#pragma unroll 1
    for (uint32_t i = 0; i < count; i += 2) {
      // Two at a time: the second of the last two may be the last row again, which is not added.
      float k[2][kQuads][4], v[2][kQuads][4];
      load(i, k[0], v[0]);
      load(min(i + 1, count - 1), k[1], v[1]);
#pragma unroll
      for (uint32_t two = 0; two < 2; ++two) {
        float product = 0.0F;
#pragma unroll
        for (uint32_t u = 0; u < kQuads; ++u) {
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) product = fmaf(q[u][j], k[two][u][j], product);
        }
        const float logit = capped_logit2(a.logits, warp_sum(product));
        if (i + two < count) add(logit, 1.0F, v[two]);
      }
    }
  }

  // The state before.
  const float unit = unit_of(a.logits);
  const float2 before = a.sums_before[place];
  float x[kQuads][4];
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t j = 128 * u + 4 * lane;
    float4 y{};
    if (j < dim) y = *reinterpret_cast<const float4*>(a.o_before + place * dim + j);
    x[u][0] = y.x, x[u][1] = y.y, x[u][2] = y.z, x[u][3] = y.w;
  }
  if (before.y > 0.0F) add(before.x * unit, before.y, x);
#pragma unroll
  for (uint32_t u = 0; u < kQuads; ++u) {
    const uint32_t j = 128 * u + 4 * lane;
    if (j < dim)
      *reinterpret_cast<float4*>(a.o + place * dim + j) =
          make_float4(o[u][0], o[u][1], o[u][2], o[u][3]);
  }
  if (lane != 0) return;
  a.sums[place] = make_float2(top / unit, total);
  if (!(total < HUGE_VALF) || !(top < HUGE_VALF)) {
    atomicOr(&a.status->flags, CodedStatus::kNotFinite);
    return;
  }
  float lse = top + log2f(total);
  if (a.sinks != nullptr && a.sinks[place % a.q_heads] > kMinusInf) {
    const float sink = a.sinks[place % a.q_heads] * kLog2E, larger = fmaxf(lse, sink);
    lse = larger + log2f(exp2f(lse - larger) + exp2f(sink - larger));
  }
  const float lse_then =
      a.pass_lse == nullptr ? NAN : a.pass_lse[size_t{kv_head} * a.n * a.group + number];
  if (!isnan(lse_then)) {
    if (lse_then - lse > kDoubtFall * kLog2E) again(lse);
    return;
  }
  if (a.chosen != nullptr) return;  // rows of other blocks are not looked at either
  const CodeFigures& figures = a.rows.figures[kv_head];
  HeadDoubt head;
  head.lse = lse * kLn2;
  head.unread = unread * kLn2;
  head.heaviest = heaviest * kLn2;
  head.spread = 2.0F * kLn2 * a.queries[at].noise;
  head.widest = __uint_as_float(figures.widest);
  head.rows = static_cast<float>(max(listed, 1U));
  head.softcap = a.logits.softcap;
  const auto usual = [&] {
    return static_cast<float>(figures.noise_sum) * kNoiseUnit /
           static_cast<float>(max(figures.blocks, 1U));
  };
  if (is_in_doubt(head, doubt_limits(a.rows.code), usual)) again(lse);
}

/// Launches a kernel behind the one before it, which is of these: ahead of its end where the device can.
void launch_behind(void (*kernel)(CodedParams), dim3 grid, uint32_t threads, CodedParams a,
                   cudaStream_t stream) {
  void* arguments[] = {&a};
  check(launch_ahead(reinterpret_cast<const void*>(kernel), grid, dim3(threads), 0, stream,
                     arguments, a.launches_ahead),
        "a turn over codes");
}

}  // namespace

void launch_coded_prepare(const CodedParams& a, cudaStream_t stream) {
  prepare_queries<<<dim3(a.padded / kWarps, a.rows.kv_heads), kWarps * 32, 0, stream>>>(a);
  check_launch("queries of a turn over codes");
}

void launch_coded_fetch(const CodedParams& a, cudaStream_t stream) {
  launch_behind(number_rows, dim3(a.rows.kv_heads), 1024, a, stream);
  check_launch("rows of a turn over codes");
  const uint32_t blocks = (a.row_capacity + 4 * kWarps - 1) / (4 * kWarps);
  launch_behind(fetch_rows, dim3(blocks < 64 ? blocks : 64, a.rows.kv_heads), kWarps * 32, a,
                stream);
  check_launch("rows of a turn over codes");
}

void launch_coded_merge(const CodedParams& a, cudaStream_t stream) {
  launch_behind(merge_parts, dim3(a.padded / kWarps, a.rows.kv_heads), kWarps * 32, a, stream);
  check_launch("merging a turn over codes");
}

}  // namespace keyhole::gpu
