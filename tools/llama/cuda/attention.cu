// FlashAttention-2's scheme with operands of two fp16, whose products are three: a block keeps 64 queries of one head, 16 of
// them each warp, walks over the keys 32 at a time (16 where d = 256, 64 where it is 80), and never writes a logit to memory.
#include "tools/llama/cuda/activation.cuh"
#include "tools/llama/cuda/attention.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/mma.cuh"

namespace keyhole::tools::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

/// Rows of d + 8 elements: 16 bytes more than a multiple of 32, so that the 8 rows of an ldmatrix hit 8 different
/// groups of banks.
template <int d>
constexpr int kPitch = d + 8;
constexpr int kRows = kWarps * 16;
/// Keys of a tile: as many as fit into 99 KB, which GPUs for desktops have, and as are copied by all threads alike.
template <int d>
constexpr int kKeys = d == 80   ? 64
                      : d > 128 ? 16
                                : 32;
/// Elements of queries, keys and values in shared memory; their lower halves lie behind these.
template <int d>
constexpr int kTileElements = (kRows + 2 * kKeys<d>)*kPitch<d>;
template <int d>
constexpr size_t kSharedBytes = sizeof(__half) * kTileElements<d> * 2;

/// Copies rows [first, first + rows) of `[.., stride]` to shared memory; rows from `end` on become zeros.
template <int d, int rows>
__device__ void fetch_rows(__half* shared, const __half* global, size_t stride, uint32_t first,
                           uint32_t end) {
  constexpr int kPieces = d / 8;
  static_assert(rows * kPieces % kThreads == 0);
#pragma unroll
  for (int i = 0; i < rows * kPieces / kThreads; ++i) {
    const int piece = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = piece / kPieces;
    const int column = piece % kPieces * 8;
    const uint32_t token = first + row;
    const bool there = token < end;
    copy_async(shared + row * kPitch<d> + column, global + (there ? token : 0) * stride + column,
               there);
  }
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}
/// 2^x for x <= 0, one instruction; what is too small for a normal number is 0.
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline uint32_t pack(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
/// The rounding errors of the two numbers that pack() has packed.
__device__ inline uint32_t pack_rest(float low, float high, uint32_t packed) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&packed));
  return pack(low - both.x, high - both.y);
}

template <int d>
__global__ void __launch_bounds__(kThreads, 1) causal_attention_kernel(const AttentionArgs a) {
  constexpr int kKeys = cuda::kKeys<d>;
  constexpr int kLow = kTileElements<d>;  // from an element to its lower half
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* const q_rows = reinterpret_cast<__half*>(shared_bytes);
  __half* const k_rows = q_rows + kRows * kPitch<d>;
  __half* const v_rows = k_rows + kKeys * kPitch<d>;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t head = blockIdx.x;
  const uint32_t kv_head = head / (a.q_heads / a.kv_heads);
  // The last queries have the most keys before them: beginning with them evens out the blocks' ends.
  const uint32_t first_row = (gridDim.y - 1 - blockIdx.y) * kRows;
  const size_t q_stride = size_t{a.q_heads} * d;
  const size_t kv_stride = size_t{a.kv_heads} * d;
  const size_t kv_column = size_t{kv_head} * d;
  const uint32_t end = a.first + min(first_row + kRows, a.queries);  // keys that some row sees
  const uint32_t tiles = (end + kKeys - 1) / kKeys;
  // The first tile of which the block's first row sees a key.
  const uint32_t seen = a.first + first_row + 1;
  const uint32_t first_tile = a.window != 0 && seen > a.window ? (seen - a.window) / kKeys : 0;

  const auto fetch_keys = [&](uint32_t tile) {
    fetch_rows<d, kKeys>(k_rows, a.k + kv_column, kv_stride, tile * kKeys, end);
    fetch_rows<d, kKeys>(k_rows + kLow, a.k_low + kv_column, kv_stride, tile * kKeys, end);
    commit_copies();
  };
  const auto fetch_values = [&](uint32_t tile) {
    fetch_rows<d, kKeys>(v_rows, a.v + kv_column, kv_stride, tile * kKeys, end);
    fetch_rows<d, kKeys>(v_rows + kLow, a.v_low + kv_column, kv_stride, tile * kKeys, end);
    commit_copies();
  };

  const size_t q_column = size_t{head} * d;
  fetch_rows<d, kRows>(q_rows, a.q + q_column, q_stride, first_row, a.queries);
  fetch_rows<d, kRows>(q_rows + kLow, a.q_low + q_column, q_stride, first_row, a.queries);
  fetch_keys(first_tile);
  commit_copies();

  float out[d / 8][4] = {};
  float maxima[2], sums[2] = {};
  maxima[0] = maxima[1] = -INFINITY;
  constexpr float kLog2e = 1.44269504F;
  constexpr float to_base2 = kLog2e;  // logits are scaled before

  // Rows of ldmatrix: of q and of transposed v, lanes 0-15 name 16 rows, lanes 16-31 the same rows 8 columns on; of
  // k, lanes 0-7 and 8-15 name 8 rows at two columns, lanes 16-31 the next 8 rows.
  const __half* const q_lane = q_rows + (warp * 16 + lane % 16) * kPitch<d> + lane / 16 * 8;
  const __half* const k_lane = k_rows + (lane / 16 * 8 + lane % 8) * kPitch<d> + lane / 8 % 2 * 8;
  const __half* const v_lane = v_rows + lane % 16 * kPitch<d> + lane / 16 * 8;

  for (uint32_t tile = first_tile; tile < tiles; ++tile) {
    wait_copies<0>();
    __syncthreads();  // k has come, and all warps are done with v
    fetch_values(tile);

    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      uint32_t q_part[4], q_low[4];
      load_matrices(q_part, q_lane + step * 16);
      load_matrices(q_low, q_lane + kLow + step * 16);
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t k_part[4];
        load_matrices(k_part, k_lane + pair * 16 * kPitch<d> + step * 16);
        multiply_add(s[2 * pair], q_part, k_part[0], k_part[1]);
        multiply_add(s[2 * pair + 1], q_part, k_part[2], k_part[3]);
        uint32_t k_low[4];
        load_matrices(k_low, k_lane + kLow + pair * 16 * kPitch<d> + step * 16);
        multiply_add(s[2 * pair], q_low, k_part[0], k_part[1]);
        multiply_add(s[2 * pair + 1], q_low, k_part[2], k_part[3]);
        multiply_add(s[2 * pair], q_part, k_low[0], k_low[1]);
        multiply_add(s[2 * pair + 1], q_part, k_low[2], k_low[3]);
      }
    }

    wait_copies<0>();
    __syncthreads();  // v has come, and all warps are done with k
    if (tile + 1 < tiles) fetch_keys(tile + 1);

    const uint32_t warp_first = a.first + first_row + warp * 16;
    {
      const uint32_t window = a.window == 0 ? end : a.window;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t position = warp_first + lane / 4 + i / 2 * 8;
          const uint32_t key = tile * kKeys + n * 8 + lane % 4 * 2 + i % 2;
          const float logit = a.scale * s[n][i];
          s[n][i] = key + window <= position ? -INFINITY
                    : a.softcap > 0.0F       ? soft_capped(a.softcap, logit)
                                             : logit;
        }
      }
    }
    if ((tile + 1) * kKeys > warp_first + 1) {  // on the diagonal: a row sees keys up to its own
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t position = warp_first + lane / 4 + i / 2 * 8;
          const uint32_t key = tile * kKeys + n * 8 + lane % 4 * 2 + i % 2;
          if (key > position) s[n][i] = -INFINITY;
        }
      }
    }

    // Online softmax. Key 0 is seen by every row, so that all maxima are finite from the first tile on; with a window a row's
    // first tiles may hold nothing that it sees, and weigh nothing.
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = s[0][2 * half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      }
      largest = fmaxf(maxima[half], quad_max(largest));
      const float base = largest == -INFINITY ? 0.0F : largest;
      shrink[half] = power_of_2((maxima[half] - base) * to_base2);
      maxima[half] = largest;
      const float offset = base * to_base2;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[n][i] = power_of_2(fmaf(s[n][i], to_base2, -offset));
          sum += s[n][i];
        }
      }
      sums[half] = sums[half] * shrink[half] + sum;
    }
    // Far into a prompt the maxima seldom move.
    if (__any_sync(0xFFFFFFFF, shrink[0] != 1.0F || shrink[1] != 1.0F)) {
#pragma unroll
      for (int n = 0; n < d / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][i] *= shrink[i / 2];
      }
    }

#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t weights[4], weights_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[2 * step + i / 2][i % 2 * 2];
        const float y = s[2 * step + i / 2][i % 2 * 2 + 1];
        weights[i] = pack(x, y);
        weights_low[i] = pack_rest(x, y, weights[i]);
      }
#pragma unroll
      for (int pair = 0; pair < d / 16; ++pair) {
        uint32_t v_part[4];
        load_matrices_transposed(v_part, v_lane + step * 16 * kPitch<d> + pair * 16);
        multiply_add(out[2 * pair], weights, v_part[0], v_part[1]);
        multiply_add(out[2 * pair + 1], weights, v_part[2], v_part[3]);
        uint32_t v_low[4];
        load_matrices_transposed(v_low, v_lane + kLow + step * 16 * kPitch<d> + pair * 16);
        multiply_add(out[2 * pair], weights_low, v_part[0], v_part[1]);
        multiply_add(out[2 * pair + 1], weights_low, v_part[2], v_part[3]);
        multiply_add(out[2 * pair], weights, v_low[0], v_low[1]);
        multiply_add(out[2 * pair + 1], weights, v_low[2], v_low[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = 1.0F / quad_sum(sums[half]);
    const uint32_t row = first_row + warp * 16 + lane / 4 + half * 8;
    if (row >= a.queries) continue;
    const size_t at = row * q_stride + size_t{head} * d + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < d / 8; ++n) {
      const float x = out[n][2 * half] * inverse;
      const float y = out[n][2 * half + 1] * inverse;
      const __nv_bfloat162 high = __floats2bfloat162_rn(x, y);
      *reinterpret_cast<__nv_bfloat162*>(a.out.high + at + n * 8) = high;
      *reinterpret_cast<__nv_bfloat162*>(a.out.low + at + n * 8) =
          __floats2bfloat162_rn(x - __low2float(high), y - __high2float(high));
    }
  }
}

template <int d>
void launch(const AttentionArgs& args, cudaStream_t stream) {
  constexpr size_t kBytes = kSharedBytes<d>;
  check(cudaFuncSetAttribute(causal_attention_kernel<d>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "shared memory of the attention");
  const dim3 grid(args.q_heads, (args.queries + kRows - 1) / kRows);
  causal_attention_kernel<d><<<grid, kThreads, kBytes, stream>>>(args);
  check_launch("attention");
}

}  // namespace

bool attention_has(uint32_t head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

void causal_attention(const AttentionArgs& args, uint32_t head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch<64>(args, stream);
    case 80: return launch<80>(args, stream);
    case 96: return launch<96>(args, stream);
    case 128: return launch<128>(args, stream);
    case 256: return launch<256>(args, stream);
    default:
      throw std::runtime_error("GPU attention: head_dim is " + std::to_string(head_dim) +
                               "; allowed: 64, 80, 96, 128, 256");
  }
}

}  // namespace keyhole::tools::cuda
