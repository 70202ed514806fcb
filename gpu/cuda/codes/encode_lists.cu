// Lists made of rows that are sorted by cluster (make_lists.h). A thread block of a KV head divides clusters into
// lists, and counts them; then a thread block has a list:
//
//   means    rows are scaled and rotated, one warp each, and added up in their order
//   codes    rotated again where shared memory has not kept them, minus the means, 32 rows at a time: their codes, a
//            byte each, to where the tensor cores want them
//
// Each operation is rounded by itself, in the order of encode_rows() of index/scan/code_rows.h, so that a list has the
// bits that the host makes of its rows. This file is compiled without contraction to fused multiply-adds.
#include <cuda_fp16.h>

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/encode_rows.cuh"
#include "gpu/cuda/codes/int8_rows.cuh"
#include "gpu/cuda/codes/list_params.h"
#include "gpu/cuda/codes/make_lists.h"
#include "gpu/cuda/codes/value_sums.cuh"
#include "gpu/cuda/common/check.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kMostOfLane = kMostListDim / 32;  // components of a row
constexpr uint32_t kDivideThreads = 1024;
constexpr uint32_t kListWarps = 8;
constexpr uint32_t kListThreads = kListWarps * 32;
static_assert(kListThreads >= kMostListDim, "a thread has a component");
static_assert(kListThreads >= kCodeBlock, "a thread has a row");

// ---- Clusters to lists ---------------------------------------------------------------------------

/// Sums x over the threads before this one; total: of all threads.
__device__ ListTotals totals_before(ListTotals x, ListTotals (&of_warps)[kDivideThreads / 32],
                                    ListTotals& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ListTotals sum = x;
#pragma unroll
  for (uint32_t gap = 1; gap < 32; gap *= 2) {
    const uint32_t lists = __shfl_up_sync(kWholeWarp, sum.lists, gap);
    const uint32_t pairs = __shfl_up_sync(kWholeWarp, sum.pairs, gap);
    if (lane >= gap) sum.lists += lists, sum.pairs += pairs;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  ListTotals before;
  total = {};
  for (uint32_t w = 0; w < kDivideThreads / 32; ++w) {
    if (w < warp) before.lists += of_warps[w].lists, before.pairs += of_warps[w].pairs;
    total.lists += of_warps[w].lists, total.pairs += of_warps[w].pairs;
  }
  __syncthreads();
  return {before.lists + sum.lists - x.lists, before.pairs + sum.pairs - x.pairs};
}

__device__ uint32_t pairs_of(uint32_t rows) { return (rows + kPairRows - 1) / kPairRows; }

/// A thread has a cluster. Grid: heads.
__global__ void __launch_bounds__(kDivideThreads)
    divide_clusters(const __grid_constant__ MakeLists p) {
  __shared__ ListTotals of_warps[kDivideThreads / 32];
  const uint32_t head = blockIdx.x, kv_head = p.first_head + head;
  const uint32_t clusters = p.stretch.clusters, cluster = threadIdx.x;
  const uint32_t* const starts = p.starts + size_t{head} * (clusters + 1);
  const uint32_t begin = cluster < clusters ? starts[cluster] : 0;
  const uint32_t rows = cluster < clusters ? starts[cluster + 1] - begin : 0;
  const uint32_t pieces = (rows + kCodeBlock - 1) / kCodeBlock;
  // Where piece i of the cluster ends.
  const auto end_of = [&](uint32_t i) {
    return static_cast<uint32_t>(uint64_t{rows} * i / max(pieces, 1U));
  };
  ListTotals own{pieces, 0};
  for (uint32_t i = 0; i < pieces; ++i) own.pairs += pairs_of(end_of(i + 1) - end_of(i));
  ListTotals total;
  const ListTotals at = totals_before(own, of_warps, total);
  const ListTotals before = p.before[kv_head];
  uint32_t* const begins = p.begins + size_t{head} * p.stretch.lists;
  ListPlace* const places = p.places + size_t{kv_head} * p.list_capacity + before.lists;
  if (total.pairs <= p.stretch.pairs && total.lists <= p.stretch.lists) {
    uint32_t pair = at.pairs;
    for (uint32_t i = 0; i < pieces; ++i) {
      const uint32_t of_piece = end_of(i + 1) - end_of(i);
      begins[at.lists + i] = begin + end_of(i);
      places[at.lists + i] = {before.pairs + pair, of_piece};
      pair += pairs_of(of_piece);
    }
  } else {
    const uint32_t each = p.stretch.even_rows;
    total = {(p.rows + each - 1) / each, pairs_of(p.rows)};
    for (uint32_t l = threadIdx.x; l < total.lists; l += kDivideThreads) {
      begins[l] = l * each;
      places[l] = {before.pairs + l * (each / kPairRows), min(each, p.rows - l * each)};
    }
  }
  if (cluster == 0) {
    p.after[kv_head] = {before.lists + total.lists, before.pairs + total.pairs};
  }
}

// ---- Codes ---------------------------------------------------------------------------------------

struct ListShared {
  float rotated[kListWarps][kMostListDim];
  float means[kMostListDim];
  float noise[kCodeBlock];
  float spread[kCodeBlock];
  __half factors[kCodeBlock];  ///< of keys
  uint16_t rows[kCodeBlock];   ///< numbers in the stretch
  alignas(16) std::byte codes[kPairRows * kMostListDim];
};

/// Where the number of component j in the mean value of a list lies among the halves of its tile, see MeanTiles.
__device__ uint32_t mean_place(uint32_t list, uint32_t j) {
  const uint32_t in_tile = list % MeanTiles::kLists;
  const uint32_t lane = j % 8 * 4 + in_tile % 8 / 2;
  const uint32_t reg = j / 16 * 128 + lane * 4 + j % 16 / 8 + in_tile / 8 * 2;
  return reg * 2 + in_tile % 2;
}

/// The keys, or the values, of a list: what both have in common.
template <bool kKeys>
class ListEncoder {
 public:
  /// kept: `[p.kept_rows, dim]` of shared memory, for the first rows.
  __device__ ListEncoder(const MakeLists& p, ListShared& shared, float* kept, uint32_t head,
                         uint32_t rows)
      : p_(p), shared_(shared), kept_(kept), head_(head), rows_(rows) {
    const uint32_t kv_head = p.first_head + head;
    const float one = 1.0F / p.value_scale[kv_head];
#pragma unroll
    for (uint32_t i = 0; i < kMostOfLane; ++i) {
      const uint32_t j = lane() + 32 * i;
      scale_[i] = kKeys && j < dim() ? p.key_scale[size_t{kv_head} * dim() + j] : one;
    }
  }

  /// Leaves the means in shared memory, and writes them to out[0 .. dim).
  __device__ void find_means(uint16_t* out, bool& fits) {
    float sum = 0.0F;
    for (uint32_t first = 0; first < rows_; first += kListWarps) {
      if (first + warp() < rows_) rotate(first + warp());
      __syncthreads();
      if (threadIdx.x < dim()) {
        const uint32_t here = min(kListWarps, rows_ - first);
        for (uint32_t i = 0; i < here; ++i) sum += row_at(first + i)[threadIdx.x];
      }
      __syncthreads();
    }
    if (threadIdx.x < dim()) {
      const float share = 1.0F / static_cast<float>(rows_);
      const __half mean =
          codes::to_half(sum * share, fits, kKeys ? codes::kLargestHalf : kMostValueMean);
      shared_.means[threadIdx.x] = __half2float(mean);
      out[threadIdx.x] = __half_as_ushort(mean);
    }
    __syncthreads();
  }

  /// Codes of rows [32 pair, 32 pair + 32) to the pair's part of `out`, with their factors.
  __device__ void encode_pair(uint32_t pair, std::byte* out, bool& fits) {
    const CodeShape& shape = p_.shape;
    const size_t key_bytes = size_t{2} * kCodeLanes * 4 * shape.key_words();
    const size_t value_bytes = size_t{2} * kCodeLanes * 4 * shape.value_words();
    auto* const factors =
        reinterpret_cast<__half*>(out + key_bytes + value_bytes) + (kKeys ? 0 : 1);
    for (uint32_t i = warp(); i < kPairRows; i += kListWarps) {
      const uint32_t row = pair * kPairRows + i;
      auto* const to = reinterpret_cast<uint8_t*>(shared_.codes) + i * dim();
      if (row >= rows_) {
        for (uint32_t j = lane(); j < dim(); j += 32) to[j] = 0;
        if (lane() == 0) factors[2 * i] = __float2half_rn(0.0F);
        continue;
      }
      if (row >= p_.kept_rows) rotate(row);
      const float* const rotated = row_at(row);
      float x[kMostOfLane];
#pragma unroll
      for (uint32_t k = 0; k < kMostOfLane; ++k) {
        const uint32_t j = lane() + 32 * k;
        x[k] = j < dim() ? rotated[j] - shared_.means[j] : 0.0F;
      }
      __syncwarp();
      const codes::CodedRow coded =
          codes::code_row(x, dim(), kKeys ? shape.key_bits : shape.value_bits, lane(), to);
      if (lane() == 0) factors[2 * i] = factor_of(coded, row, fits);
    }
    __syncthreads();
    if constexpr (kKeys) {
      codes::pack_keys(shape, shared_.codes, dim(), 2, kListThreads,
                       reinterpret_cast<uint32_t*>(out));
    } else {
      codes::pack_values(shape, shared_.codes, dim(), 2, kListThreads,
                         reinterpret_cast<uint32_t*>(out + key_bytes));
    }
    __syncthreads();
  }

 private:
  [[nodiscard]] __device__ uint32_t dim() const { return p_.shape.dim; }
  [[nodiscard]] static __device__ uint32_t warp() { return threadIdx.x / 32; }
  [[nodiscard]] static __device__ uint32_t lane() { return threadIdx.x % 32; }

  /// Where rotate() leaves a row: its own place, or that of the warp whose row it is.
  [[nodiscard]] __device__ float* row_at(uint32_t row) const {
    return row < p_.kept_rows ? kept_ + row * dim() : shared_.rotated[row % kListWarps];
  }
  /// By the warp whose row it is.
  __device__ void rotate(uint32_t row) {
    const uint32_t number = shared_.rows[row];
    const std::byte* const from =
        (kKeys ? p_.keys : p_.values) + (size_t{head_} * p_.rows + number) * p_.row_bytes;
    const uint16_t* scales = nullptr;
    if (p_.row_scales != nullptr) {
      const size_t block = (p_.first_row + number) / kCodeBlock;
      scales = p_.row_scales +
               ((block * p_.kv_heads + p_.first_head + head_) * 2 + (kKeys ? 0 : 1)) * dim();
    }
    float* const mine = row_at(row);
#pragma unroll
    for (uint32_t i = 0; i < kMostOfLane; ++i) {
      const uint32_t j = lane() + 32 * i;
      if (j >= dim()) continue;
      const float of_row = scales == nullptr ? 1.0F : codes::scale_of(scales[j]);
      mine[j] = codes::bounded(codes::load_number(from, p_.dtype, j) * of_row * scale_[i]);
    }
    __syncwarp();
    codes::rotate_row(mine, dim(), lane());
  }

  /// By one thread.
  __device__ __half factor_of(const codes::CodedRow& coded, uint32_t row, bool& fits) {
    if constexpr (!kKeys)
      return codes::to_half(coded.product / coded.all_levels, fits, kMostValueFactor);
    const auto dims = static_cast<float>(dim());
    const bool is_empty = !(coded.product > 0.0F);
    const __half factor = codes::to_half(is_empty ? 0.0F : coded.square / coded.product, fits);
    const float explained = coded.product / coded.square * coded.product;
    shared_.factors[row] = factor;
    shared_.spread[row] = coded.square / dims;
    shared_.noise[row] = is_empty ? 0.0F : fmaxf(0.0F, coded.all_levels - explained) / dims;
    return factor;
  }

  const MakeLists& p_;
  ListShared& shared_;
  float* kept_;
  uint32_t head_, rows_;
  float scale_[kMostOfLane];
};

/// Grid (lists that there may be, heads).
__global__ void __launch_bounds__(kListThreads) encode_lists(const __grid_constant__ MakeLists p) {
  extern __shared__ __align__(16) std::byte list_memory[];
  ListShared& shared = *reinterpret_cast<ListShared*>(list_memory);
  auto* const kept = reinterpret_cast<float*>(list_memory + sizeof(ListShared));
  const uint32_t head = blockIdx.y, kv_head = p.first_head + head, dim = p.shape.dim;
  const uint32_t first_list = p.before[kv_head].lists;
  if (blockIdx.x >= p.after[kv_head].lists - first_list) return;
  const uint32_t list = first_list + blockIdx.x;
  const size_t number = size_t{kv_head} * p.list_capacity + list;
  const ListPlace place = p.places[number];
  const uint32_t rows = place.rows, pairs = (rows + kPairRows - 1) / kPairRows;
  const uint32_t begin = p.begins[size_t{head} * p.stretch.lists + blockIdx.x];
  if (threadIdx.x < rows) {
    shared.rows[threadIdx.x] = p.order[size_t{head} * p.rows + begin + threadIdx.x];
  }
  __syncthreads();
  const size_t first_pair = size_t{kv_head} * p.pair_capacity + place.first_pair;
  if (threadIdx.x < pairs * kPairRows) {
    p.ids[first_pair * kPairRows + threadIdx.x] =
        threadIdx.x < rows ? p.first_row + shared.rows[threadIdx.x] : 0;
  }
  const size_t pair_bytes = p.pair_bytes;
  bool fits = true;
  {
    ListEncoder<true> keys(p, shared, kept, head, rows);
    keys.find_means(p.key_means + number * dim, fits);
    for (uint32_t i = 0; i < pairs; ++i) {
      keys.encode_pair(i, p.pairs + (first_pair + i) * pair_bytes, fits);
    }
  }
  {
    ListEncoder<false> values(p, shared, kept, head, rows);
    values.find_means(p.value_means + number * dim, fits);
    for (uint32_t i = 0; i < pairs; ++i) {
      values.encode_pair(i, p.pairs + (first_pair + i) * pair_bytes, fits);
    }
  }
  // What steps multiply lists' mean values by weights in has another unit for every second eight of the components.
  if (threadIdx.x < dim) {
    const float odd =
        p.shape.value_bits == 2 ? codes::ValueUnits<2>::kEven / codes::ValueUnits<2>::kOdd : 1.0F;
    const float mean = shared.means[threadIdx.x];
    auto* const tile =
        reinterpret_cast<__half*>(p.mean_tiles) +
        (size_t{kv_head} * p.list_capacity + list / MeanTiles::kLists * MeanTiles::kLists) * dim;
    tile[mean_place(list, threadIdx.x)] = __float2half_rn(threadIdx.x % 16 < 8 ? mean : mean * odd);
  }
  fits = __syncthreads_and(fits ? 1 : 0) != 0;
  if (threadIdx.x != 0) return;
  ListFigures figures;
  float widest = 0.0F;
  for (uint32_t i = 0; i < rows; ++i) {
    const float f = __half2float(shared.factors[i]);
    figures.noise += shared.noise[i];
    figures.spread += shared.spread[i];
    widest = f > widest ? f : widest;
  }
  const float share = 1.0F / static_cast<float>(rows);
  figures.noise = fits ? figures.noise * share : kUnknownNoise;
  figures.spread *= share;
  const float deviation = widest / code_step(p.shape.key_bits);
  figures.widest = deviation * deviation;
  figures.log_rows = logf(static_cast<float>(rows));
  p.figures[number] = figures;
}

__global__ void use_lists(const ListTotals* totals, uint32_t kv_heads, uint32_t listed,
                          uint32_t* counts, ListMemory* memory) {
  for (uint32_t h = threadIdx.x; h < kv_heads; h += blockDim.x) counts[1 + h] = totals[h].lists;
  if (threadIdx.x != 0) return;
  counts[0] = listed;
  *memory = {};
}

}  // namespace

void launch_encode_lists(const MakeLists& p, cudaStream_t stream) {
  divide_clusters<<<p.heads, kDivideThreads, 0, stream>>>(p);
  check_launch("dividing clusters into lists");
  const size_t bytes = sizeof(ListShared) + size_t{p.kept_rows} * p.shape.dim * sizeof(float);
  static_assert(sizeof(ListShared) + kept_list_rows(1) * sizeof(float) <= size_t{99} << 10U);
  check(cudaFuncSetAttribute(encode_lists, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "shared memory of the kernel that encodes lists");
  encode_lists<<<dim3(p.stretch.lists, p.heads), kListThreads, bytes, stream>>>(p);
  check_launch("encoding lists");
}

void launch_use_lists(const ListTotals* totals, uint32_t kv_heads, uint32_t listed,
                      uint32_t* counts, ListMemory* memory, cudaStream_t stream) {
  use_lists<<<1, 128, 0, stream>>>(totals, kv_heads, listed, counts, memory);
  check_launch("counting lists of codes");
}

}  // namespace keyhole::gpu
