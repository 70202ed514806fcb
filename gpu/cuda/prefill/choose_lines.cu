// The heaviest columns and diagonals of each head, copies of the columns' rows, and what each tile of queries attends
// of both.
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/prefill/ends.cuh"
#include "gpu/cuda/prefill/line_choice.h"
#include "gpu/cuda/prefill/top_values.cuh"

namespace keyhole::gpu {
namespace {

// ---- Lines: a thread block for each head's columns, and one for its diagonals.

constexpr uint32_t kChoosers = 1024;

__global__ void __launch_bounds__(kChoosers)
    choose_kernel(const __grid_constant__ BlockedParams a, const __grid_constant__ LineWeights w,
                  const __grid_constant__ Lines l) {
  __shared__ LargestKeysShared shared;
  __shared__ uint32_t counts[kChoosers / 32];
  const uint32_t local = blockIdx.x, head = w.first_head + local;
  if (!l.heads.has(head)) return;
  const bool is_column = blockIdx.y == 0;
  const uint32_t own = (a.first + l.last_tile) / kListRows;
  const uint32_t near = own > l.near_blocks ? own - l.near_blocks : 0;
  // Lines [first, end) are looked at.
  const uint64_t behind =
      uint64_t{is_column ? l.first_blocks : l.near_blocks} * kListRows + (is_column ? 0U : 1U);
  const uint32_t end = is_column ? near * kListRows : a.rows;
  const auto first = static_cast<uint32_t>(min(behind, uint64_t{end}));
  const float* const columns = w.columns + size_t{local} * a.rows;
  const float* const even = w.slashes + size_t{local} * a.rows;
  const float* const odd = even + size_t{w.heads} * a.rows;
  const auto key_at = [&](uint32_t i) {
    return key_of(is_column ? columns[first + i] : even[first + i] + odd[first + i]);
  };
  const uint32_t wanted = is_column ? l.columns : l.slashes;
  const LargestKeys largest = largest_keys<kChoosers>(end - first, wanted, key_at, shared);
  uint32_t* const to = is_column ? l.rows + size_t{head} * l.capacity
                                 : l.distances + size_t{head} * l.slash_capacity;
  uint32_t count = 0, equals = 0;
  for (uint32_t i0 = 0; i0 < end - first; i0 += kChoosers) {
    const uint32_t i = i0 + threadIdx.x;
    const uint32_t key = i < end - first ? key_at(i) : 0;
    const bool is_equal = key != 0 && key == largest.key;
    if (__syncthreads_or(is_equal || key > largest.key) == 0) continue;
    const uint32_t place = take_place(is_equal, counts, equals);
    const bool is_chosen = key > largest.key || (is_equal && place < largest.equal);
    const uint32_t at = take_place(is_chosen, counts, count);
    if (is_chosen) to[at] = first + i;
  }
  if (threadIdx.x == 0) l.counts[2 * head + blockIdx.y] = count;
}

// ---- Rows of columns, 16 bytes a thread; of whole blocks of columns, as attention reads them.

constexpr uint32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ BlockedParams a, const __grid_constant__ Lines l,
                  uint32_t pieces, size_t element) {
  const uint32_t head = blockIdx.y, kv_head = head / (a.q_heads / a.kv_heads);
  if (!l.heads.has(head)) return;
  const uint32_t count = l.counts[2 * head];
  const uint32_t padded = (count + kListRows - 1) / kListRows * kListRows;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < padded * pieces;
       i += gridDim.x * kThreads) {
    const uint32_t column = i / pieces, piece = i % pieces;
    const size_t to = (size_t{head} * l.capacity + column) * pieces + piece;
    uint4 k{}, v{};
    if (column < count) {
      const size_t at =
          (kv_head * a.head_stride + l.rows[size_t{head} * l.capacity + column] * a.row_stride) *
              element +
          piece * sizeof(uint4);
      k = *reinterpret_cast<const uint4*>(static_cast<const std::byte*>(a.keys) + at);
      v = *reinterpret_cast<const uint4*>(static_cast<const std::byte*>(a.values) + at);
    }
    static_cast<uint4*>(l.keys)[to] = k;
    static_cast<uint4*>(l.values)[to] = v;
  }
}

// ---- Lists of a tile and head.

constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kMostBlocks = 65536;
static_assert(kMostColumns / kListRows <= kThreads);

struct ListShared {
  uint32_t blocks[kMostBlocks / 32];   ///< a bit for each that is attended
  uint32_t chosen[kMostColumns / 32];  ///< of the columns
  uint32_t sums[kWarps];
  uint32_t counts[kWarps];
};

/// The sum of `x` over the threads before this one, behind `count`, which goes on by the sum of all.
__device__ inline uint32_t sum_before(uint32_t x, uint32_t (&sums)[kWarps], uint32_t& count) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t upto = x;
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t y = __shfl_up_sync(kWholeWarp, upto, offset);
    if (lane >= offset) upto += y;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  uint32_t before = count + upto - x;
#pragma unroll
  for (uint32_t i = 0; i < kWarps; ++i) {
    if (i < warp) before += sums[i];
    count += sums[i];
  }
  __syncthreads();
  return before;
}

__global__ void __launch_bounds__(kThreads)
    list_kernel(const __grid_constant__ BlockedParams a, const __grid_constant__ Lines l,
                const __grid_constant__ ColumnLists columns, const __grid_constant__ BlockChoice c,
                uint32_t capacity) {
  __shared__ ListShared shared;
  const uint32_t tile = blockIdx.x, tiles = gridDim.x, head = blockIdx.y;
  if (!l.heads.has(head)) return;
  if (c.skips != nullptr && tile == 0 && threadIdx.x == 0) c.skips[head] = c.skip;
  const uint32_t first = a.first + tile * kListQueries;
  const uint32_t last = a.first + min((tile + 1) * kListQueries, a.n) - 1;
  const uint32_t own = first / kListRows, end = last / kListRows + 1, words = (end + 31) / 32;
  const uint32_t near = own > c.near_blocks ? own - c.near_blocks : 0;
  const size_t at = size_t{head} * tiles + tile;

  for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
    // Bits of the word's blocks [0, below) that are first ones, and [from, ..) that are near.
    const uint32_t b = i * 32;
    uint32_t bits = 0;
    for (uint32_t j = 0; j < 32; ++j) {
      if (b + j < end && (b + j < c.first_blocks || b + j >= near)) bits |= 1U << j;
    }
    shared.blocks[i] = bits;
  }
  __syncthreads();
  const uint32_t slashes = l.counts[2 * head + 1];
  for (uint32_t i = threadIdx.x; i < slashes; i += kThreads) {
    const uint32_t distance = l.distances[size_t{head} * l.slash_capacity + i];
    if (distance > last) continue;
    const uint32_t from = first > distance ? (first - distance) / kListRows : 0;
    for (uint32_t b = from; b <= (last - distance) / kListRows; ++b)
      atomicOr(&shared.blocks[b / 32], 1U << b % 32);
  }
  __syncthreads();

  uint16_t* const list = c.lists + at * capacity;
  uint32_t count = 0;
  for (uint32_t i0 = 0; i0 < words; i0 += kThreads) {
    const uint32_t i = i0 + threadIdx.x;
    uint32_t bits = i < words ? shared.blocks[i] : 0;
    uint32_t place = sum_before(__popc(bits), shared.sums, count);
    for (; bits != 0; bits &= bits - 1)
      list[place++] = static_cast<uint16_t>(i * 32 + __ffs(static_cast<int>(bits)) - 1);
  }

  const uint32_t number = l.counts[2 * head], padded = (number + kListRows - 1) / kListRows;
  for (uint32_t i0 = 0; i0 < padded * kListRows; i0 += kThreads) {
    const uint32_t i = i0 + threadIdx.x;
    bool is_chosen = false;
    if (i < number) {
      const uint32_t block = l.rows[size_t{head} * l.capacity + i] / kListRows;
      is_chosen = block < own && (shared.blocks[block / 32] >> block % 32 & 1U) == 0;
    }
    const uint32_t votes = __ballot_sync(kWholeWarp, is_chosen);
    if (threadIdx.x % 32 == 0 && i < padded * kListRows) {
      shared.chosen[i / 32] = votes;
      columns.chosen[at * (l.capacity / 32) + i / 32] = votes;
    }
  }
  __syncthreads();
  const uint32_t block = threadIdx.x;
  const bool is_listed =
      block < padded && (shared.chosen[2 * block] | shared.chosen[2 * block + 1]) != 0;
  uint32_t column_blocks = 0;
  const uint32_t place = take_place(is_listed, shared.counts, column_blocks);
  if (is_listed)
    columns.blocks[at * (l.capacity / kListRows) + place] = static_cast<uint16_t>(block);
  if (threadIdx.x != 0) return;
  c.counts[at] = count;
  columns.counts[at] = column_blocks;
  if (c.totals == nullptr) return;
  atomicAdd(c.totals, static_cast<unsigned long long>(count) + column_blocks);
  atomicAdd(c.totals + 1, static_cast<unsigned long long>(end));
}

}  // namespace

void launch_choose_lines(const BlockedParams& piece, const LineWeights& weights, const Lines& lines,
                         cudaStream_t stream) {
  choose_kernel<<<dim3(weights.heads, 2), kChoosers, 0, stream>>>(piece, weights, lines);
  check_launch("the choice of columns and diagonals");
}

void launch_gather_columns(const BlockedParams& piece, const Lines& lines, DType dtype,
                           uint32_t head_dim, cudaStream_t stream) {
  const size_t element = dtype_size(dtype);
  const auto pieces = static_cast<uint32_t>(head_dim * element / sizeof(uint4));
  const uint32_t blocks = lines.capacity * pieces / kThreads;
  gather_kernel<<<dim3(blocks == 0 ? 1 : blocks, piece.q_heads), kThreads, 0, stream>>>(
      piece, lines, pieces, element);
  check_launch("rows of columns");
}

void launch_line_lists(const BlockedParams& slice, const Lines& lines, const ColumnLists& columns,
                       const BlockChoice& choice, uint32_t blocks, cudaStream_t stream) {
  const dim3 grid((slice.n + kListQueries - 1) / kListQueries, slice.q_heads);
  list_kernel<<<grid, kThreads, 0, stream>>>(slice, lines, columns, choice, blocks);
  check_launch("lists of columns and diagonals");
}

}  // namespace keyhole::gpu
