// One thread block encodes the 256 keys, or the 256 values, of a block of codes:
//
//   stage    rows to shared memory, each byte once over the bus (where they fit; else they are read twice)
//   means    rows are scaled and rotated, 16 at a time, one warp each, and added up in their order
//   codes    rotated again (cheaper than memory for 256 rows in fp32), minus the means: codes, factors, noise
//            (kUnknownNoise where fp16 holds less than it should of the keys or the values, as on the host)
//   pack     codes, a byte each until here, to where the tensor cores want them
//
// All of it has the order of index/scan/kv_codes.cpp, each operation rounded by itself, so that device and host make
// the same bits: a block's answer does not depend on who encoded it. This file is compiled without contraction to fused
// multiply-adds.
//
// COST. 64 KiB of rows take 1.3 us of a bus of 50 GB/s, and about 25 us of one multiprocessor: with some 20 of them
// busy, the bus is the limit.
#include <cuda_fp16.h>

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/encode.h"
#include "gpu/cuda/codes/encode_rows.cuh"
#include "gpu/cuda/codes/int8_rows.cuh"
#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu {
namespace {

using codes::bounded;
using codes::code_row;
using codes::CodedRow;
using codes::rotate_row;
using codes::to_half;

constexpr uint32_t kEncodeWarps = 16;
constexpr uint32_t kEncodeThreads = kEncodeWarps * 32;
// Rows of blocks that do not fit whole in shared memory are encoded so many at a time.
constexpr uint32_t kPartRows = 64;

/// Shared memory of the kernel for rows of up to kMostDim components, beside the rows.
template <uint32_t kMostDim>
struct EncodeShared {
  float rotated[kEncodeWarps][kMostDim];
  float means[kMostDim];
  float noise[kCodeBlock];
  float factors[kCodeBlock];  ///< of keys, as they are stored
};

/// Writes, for keys, the block's noise to `out`, and what the encoder keeps of its rows. fits: whether fp16 holds all
/// of it. By one thread.
template <uint32_t kMostDim>
__device__ void put_noise(const EncodeParams& p, const EncodeShared<kMostDim>& shared,
                          uint32_t head, bool fits, float* out) {
  float noise = 0.0F, widest = 0.0F, squares = 0.0F;
  for (uint32_t i = 0; i < kCodeBlock; ++i) {
    const float f = shared.factors[i];
    noise += shared.noise[i];
    widest = f < widest ? widest : f;
    squares += f * f;
  }
  noise *= 1.0F / kCodeBlock;
  *out = fits ? noise : kUnknownNoise;
  if (p.figures == nullptr || !fits) return;
  CodeFigures& figures = p.figures[head];
  atomicMax(&figures.widest, __float_as_uint(widest * widest * noise));
  constexpr float kMost = 1e12F;  // of a sum of 2^14 blocks nothing is lost
  const float mean = noise * squares * (1.0F / kCodeBlock) * (1.0F / kNoiseUnit);
  atomicAdd(reinterpret_cast<unsigned long long*>(&figures.noise_sum),
            static_cast<unsigned long long>(mean < kMost ? mean : kMost));
  atomicAdd(&figures.blocks, 1U);
}

/// Counts the thread block of the block's keys, or of its values, as done. The second of the two notes whether either
/// has numbers that fp16 cannot hold. By the thread that has written the noise.
__device__ void close_block(const EncodeParams& p, uint32_t head, uint32_t block, bool fits,
                            float* noise) {
  if (p.arrivals == nullptr) return;
  constexpr uint32_t kUnfit = 1U << 16U;
  uint32_t* const arrivals = p.arrivals + size_t{block} * p.kv_heads + head;
  __threadfence();
  const uint32_t before = atomicAdd(arrivals, fits ? 1U : 1U + kUnfit);
  if (before % kUnfit == 0) return;
  __threadfence();
  *arrivals = 0;
  if (fits && before < kUnfit) return;
  *noise = kUnknownNoise;
  if (p.figures != nullptr) atomicMax(&p.figures[head].widest, 0x7F800000U);
}

/// Grid (blocks, KV heads, keys or values).
template <uint32_t kMostDim>
__global__ void __launch_bounds__(kEncodeThreads)
    encode_blocks(const __grid_constant__ EncodeParams p) {
  using Shared = EncodeShared<kMostDim>;
  constexpr uint32_t kMostOfLane = kMostDim / 32;  // components of a row
  extern __shared__ __align__(16) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  std::byte* const rows = memory + sizeof(Shared);  // then, row by row, their codes
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t dim = p.shape.dim;
  const uint32_t head = blockIdx.y;
  const bool is_keys = blockIdx.z == 0;
  const uint32_t row_bytes = p.row_bytes;
  const uint32_t block = p.first + blockIdx.x;
  const std::byte* const source =
      (is_keys ? p.keys : p.values) + head * p.rows_stride + size_t{block} * kCodeBlock * row_bytes;
  std::byte* const out = p.blocks + head * p.head_stride + block * p.block_stride;
  const uint32_t pitch = p.staged ? row_bytes : dim;

  if (p.staged) {
    for (uint32_t at = threadIdx.x * 16; at < kCodeBlock * row_bytes; at += kEncodeThreads * 16) {
      copy_async(shared_address(rows + at), source + at, true);
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }

  // The scales of this block's channels, where rows are int8.
  const size_t scales_at = ((size_t{block} * p.kv_heads + head) * 2 + (is_keys ? 0 : 1)) * dim;
  const bool is_int8 = p.dtype == DType::i8;
  if (is_int8 && threadIdx.x < dim) {
    p.row_scales_out[scales_at + threadIdx.x] = p.row_scales[scales_at + threadIdx.x];
  }
  float scale[kMostOfLane];
  float row_scale[kMostOfLane];
  const float one_scale = 1.0F / p.value_scale[head];
#pragma unroll
  for (uint32_t i = 0; i < kMostOfLane; ++i) {
    const uint32_t j = lane + 32 * i;
    scale[i] = is_keys && j < dim ? p.key_scale[head * dim + j] : one_scale;
    row_scale[i] = is_int8 && j < dim ? codes::scale_of(p.row_scales[scales_at + j]) : 1.0F;
  }
  float* const mine = shared.rotated[warp];
  const auto rotate = [&](uint32_t row) {
    const std::byte* from = (p.staged ? rows : source) + row * row_bytes;
#pragma unroll
    for (uint32_t i = 0; i < kMostOfLane; ++i) {
      const uint32_t j = lane + 32 * i;
      // An int8 number times its scale is exact: the bits are those of the host.
      if (j < dim)
        mine[j] = bounded(codes::load_number(from, p.dtype, j) * row_scale[i] * scale[i]);
    }
    __syncwarp();
    rotate_row(mine, dim, lane);
  };

  // ---- means
  bool fits = true;
  float sum = 0.0F;
  for (uint32_t begin = 0; begin < kCodeBlock; begin += kEncodeWarps) {
    rotate(begin + warp);
    __syncthreads();
    if (threadIdx.x < dim) {
#pragma unroll
      for (uint32_t i = 0; i < kEncodeWarps; ++i) sum += shared.rotated[i][threadIdx.x];
    }
    __syncthreads();
  }
  if (threadIdx.x < dim) {
    const __half mean =
        to_half(sum * (1.0F / kCodeBlock), fits, is_keys ? codes::kLargestHalf : kMostValueMean);
    shared.means[threadIdx.x] = __half2float(mean);
    auto* to = reinterpret_cast<__half*>(
        out + (is_keys ? p.shape.key_mean_at() : p.shape.value_mean_at()));
    to[threadIdx.x] = mean;
  }
  __syncthreads();

  // ---- codes
  auto* const factors = reinterpret_cast<__half*>(out + p.shape.factors_at()) + (is_keys ? 0 : 1);
  const uint32_t bits = p.shape.key_bits;  // of values, too
  const uint32_t words = is_keys ? p.shape.key_words() : p.shape.value_words();
  auto* const packed = reinterpret_cast<uint32_t*>(out + (is_keys ? 0 : p.shape.values_at()));
  for (uint32_t first = 0; first < kCodeBlock; first += p.part_rows) {
    for (uint32_t i = warp; i < p.part_rows; i += kEncodeWarps) {
      const uint32_t row = first + i;
      rotate(row);
      float x[kMostOfLane];
#pragma unroll
      for (uint32_t n = 0; n < kMostOfLane; ++n) {
        const uint32_t j = lane + 32 * n;
        x[n] = j < dim ? mine[j] - shared.means[j] : 0.0F;
      }
      // The codes go to this row's own place among the staged rows, which all lanes have read.
      const CodedRow coded =
          code_row(x, dim, bits, lane, reinterpret_cast<uint8_t*>(rows + i * pitch));
      if (lane != 0) continue;
      if (is_keys) {
        const bool empty = !(coded.product > 0.0F);
        factors[2 * row] = to_half(empty ? 0.0F : coded.square / coded.product, fits);
        shared.factors[row] = __half2float(factors[2 * row]);
        const float explained = coded.product / coded.square * coded.product;
        shared.noise[row] =
            empty ? 0.0F : fmaxf(0.0F, coded.all_levels - explained) / static_cast<float>(dim);
      } else {
        factors[2 * row] = to_half(coded.product / coded.all_levels, fits, kMostValueFactor);
      }
    }
    __syncthreads();

    // ---- pack
    const uint32_t tiles = p.part_rows / kCodeTile;
    uint32_t* const to = packed + size_t{first / kCodeTile} * kCodeLanes * words;
    if (is_keys) {
      codes::pack_keys(p.shape, rows, pitch, tiles, kEncodeThreads, to);
    } else {
      codes::pack_values(p.shape, rows, pitch, tiles, kEncodeThreads, to);
    }
    if (first + p.part_rows < kCodeBlock) __syncthreads();  // the next rows take these rows' place
  }
  fits = __syncthreads_and(fits ? 1 : 0) != 0;

  auto* const noise = reinterpret_cast<float*>(out + p.shape.noise_at());
  if (!is_keys) {
    if (threadIdx.x == 0) close_block(p, head, block, fits, noise);
    return;
  }
  const auto ends = static_cast<uint32_t>((p.shape.block_bytes() - p.shape.noise_at()) / 4);
  if (threadIdx.x == 0) {
    put_noise(p, shared, head, fits, noise);
    close_block(p, head, block, fits, noise);
  } else if (threadIdx.x < ends) {
    noise[threadIdx.x] = 0.0F;
  }
}

__global__ void set_count(uint32_t* count, uint32_t value) { *count = value; }

}  // namespace

namespace {

constexpr uint32_t kFewDim = 256, kMostDim = 512;

const void* encoder_of(uint32_t dim) {
  return dim <= kFewDim ? reinterpret_cast<const void*>(&encode_blocks<kFewDim>)
                        : reinterpret_cast<const void*>(&encode_blocks<kMostDim>);
}

}  // namespace

EncodeLauncher::EncodeLauncher(const CodeShape& shape, DType dtype)
    : kernel_(encoder_of(shape.dim)),
      row_bytes_(shape.dim * static_cast<uint32_t>(dtype_size(dtype))) {
  int device = 0;
  check(cudaGetDevice(&device), "the current CUDA device");
  const size_t most = shared_memory_of(device).of_block;
  const size_t fixed =
      shape.dim <= kFewDim ? sizeof(EncodeShared<kFewDim>) : sizeof(EncodeShared<kMostDim>);
  const auto with = [&](size_t rows) { return fixed + rows; };
  const auto fits = [&](size_t bytes) { return bytes <= most; };
  staged_ = fits(with(size_t{kCodeBlock} * row_bytes_));
  part_rows_ = staged_ || fits(with(size_t{kCodeBlock} * shape.dim)) ? kCodeBlock : kPartRows;
  shared_bytes_ = with(size_t{part_rows_} * (staged_ ? row_bytes_ : shape.dim));
  // Allows all shared memory that there is, not what this shape needs: the limit belongs to the function, and
  // sessions of other shapes share it.
  check(cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(most)),
        "shared memory of the kernel that encodes");
}

void EncodeLauncher::launch(EncodeParams params, cudaStream_t stream) const {
  if (params.count == 0) return;
  params.staged = staged_;
  params.row_bytes = row_bytes_;
  params.part_rows = part_rows_;
  void* arguments[] = {&params};
  check(cudaLaunchKernel(kernel_, dim3(params.count, params.kv_heads, 2), dim3(kEncodeThreads),
                         arguments, shared_bytes_, stream),
        "encoding keys and values");
}

void launch_set_count(uint32_t* count, uint32_t value, cudaStream_t stream) {
  set_count<<<1, 1, 0, stream>>>(count, value);
  check_launch("counting blocks of codes");
}

}  // namespace keyhole::gpu
