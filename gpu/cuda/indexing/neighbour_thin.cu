// Thins the lists of keys that were searched among themselves: a thread block takes the keys of one list into shared
// memory, forms all their inner products on tensor cores (a tenth of a megaflop for 100 keys), and keeps one bit of
// each comparison.
#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/indexing/neighbour_epilogue.cuh"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kMost = 128;  // keys of a list: 32 for each of the 4 warps

struct ThinList {
  float score[kMost];
  float extra[kMost];
  uint32_t id[kMost];
  uint4 hides[kMost];  // bit j: key j of the list is nearer to this one than to the query
};

__host__ __device__ constexpr uint32_t row_bytes(uint32_t dim) { return 2 * dim + 16; }

template <class T>
__global__ void __launch_bounds__(kThreads) thin_lists(const ThinArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& list = *reinterpret_cast<ThinList*>(shared);
  const uint32_t base = shared_address(shared + sizeof(ThinList));
  const uint32_t t = threadIdx.x;
  const uint32_t lane = t % 32;
  const uint32_t row = blockIdx.x;
  const uint32_t n = min(args.best_sizes[row], kMost);
  const uint32_t pitch = row_bytes(args.dim);
  {
    const Rank rank = t < n ? args.best[size_t{row} * args.most + t] : 0;
    const uint32_t id = t < n ? rank_key(rank) : 0;
    list.id[t] = id;
    list.score[t] = t < n ? rank_score(rank) : INFINITY;  // empty places dominate no key
    list.extra[t] = t < n && args.key_extra != nullptr ? args.key_extra[id] : 0.0F;
  }
  __syncthreads();
  const uint32_t pieces = args.dim / 8;
  const uint32_t rows = (n + 31) / 32 * 32;
  for (uint32_t i = t; i < rows * pieces; i += kThreads) {
    const uint32_t at = i / pieces;
    const uint32_t piece = i % pieces;
    copy_async(base + at * pitch + piece * 16,
               args.keys + list.id[at] * args.key_stride + piece * 16, at < n);
  }
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();

  const uint32_t first = t / 32 * 32;
  if (first < n) {
    const uint32_t a_at = base + (first + lane % 16) * pitch + lane / 16 * 16;
    const uint32_t b_at = base + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
    const uint32_t pair = lane % 4 * 2;
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t words[4][2] = {};
      if (half * 64 < n) {
        // The second half of 64 columns may end in the middle; the rows past it are not in shared memory.
        const uint32_t columns = min(rows - half * 64, 64U);
        float scores[2][8][4] = {};
        for (uint32_t k = 0; k < args.dim / 16; ++k) {
          uint32_t a[2][4];
#pragma unroll
          for (uint32_t m = 0; m < 2; ++m) load_matrices(a[m], a_at + m * 16 * pitch + k * 32);
#pragma unroll
          for (uint32_t p = 0; p < 4; ++p) {
            if (p * 16 >= columns) continue;
            uint32_t b[4];
            load_matrices(b, b_at + (half * 64 + p * 16) * pitch + k * 32);
#pragma unroll
            for (uint32_t m = 0; m < 2; ++m) {
              multiply_add<T>(scores[m][2 * p], a[m], b[0], b[1]);
              multiply_add<T>(scores[m][2 * p + 1], a[m], b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) {
          const uint32_t c = first + lane / 4 + 8 * r;
          const float extra = list.extra[c];
#pragma unroll
          for (uint32_t i = 0; i < 16; ++i) {
            const uint32_t column = 8 * (i / 2) + pair + i % 2;
            const uint32_t j = half * 64 + column;
            const float score = fmaf(extra, list.extra[j], scores[r / 2][i / 2][r % 2 * 2 + i % 2]);
            if (score > list.score[j] && j > c) words[r][i / 8] |= 1U << (column % 32);
          }
        }
      }
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
        for (uint32_t w = 0; w < 2; ++w) {
          words[r][w] |= __shfl_xor_sync(kWholeWarp, words[r][w], 1);
          words[r][w] |= __shfl_xor_sync(kWholeWarp, words[r][w], 2);
        }
        if (lane % 4 == 0) {
          auto* out = reinterpret_cast<uint32_t*>(&list.hides[first + lane / 4 + 8 * r]) + half * 2;
          out[0] = words[r][0];
          out[1] = words[r][1];
        }
      }
    }
  }
  __syncthreads();

  if (t != 0) return;
  const uint32_t own = args.first_query + row;
  uint32_t gone[4];
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    gone[w] = n >= 32 * w + 32 ? 0 : n <= 32 * w ? ~0U : ~0U << (n - 32 * w);
  }
  uint32_t count = 0;
  uint32_t* const out = args.ids + size_t{row} * args.thin;
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    while (gone[w] != ~0U && count < args.thin) {
      const uint32_t bit = __ffs(static_cast<int>(~gone[w])) - 1;
      gone[w] |= 1U << bit;
      const uint32_t id = list.id[32 * w + bit];
      if (id == own) continue;
      out[count++] = id;
      const uint4 hides = list.hides[32 * w + bit];
      gone[0] |= hides.x;
      gone[1] |= hides.y;
      gone[2] |= hides.z;
      gone[3] |= hides.w;
    }
  }
  args.counts[row] = count;
}

template <class T>
cudaError_t launch(const ThinArgs& args, cudaStream_t stream) {
  const size_t bytes = sizeof(ThinList) + kMost * row_bytes(args.dim);
  const cudaError_t error = cudaFuncSetAttribute(
      thin_lists<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  thin_lists<T><<<args.rows, kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_thin(const ThinArgs& args, cudaStream_t stream) {
  return args.dtype == DType::f16 ? launch<__half>(args, stream)
                                  : launch<__nv_bfloat16>(args, stream);
}

}  // namespace keyhole::gpu
