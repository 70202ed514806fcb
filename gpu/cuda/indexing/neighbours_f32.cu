// The search for fp32 keys.
#include "gpu/cuda/indexing/plane_tiles.cuh"

namespace keyhole::gpu {
namespace {

constexpr size_t kBytes = PlanePipeline::kBytes + 2 * kTileKeys * sizeof(float) + sizeof(QueryTile);
static_assert(kBytes <= size_t{99} << 10U);

__global__ void __launch_bounds__(kTileQueries, 1) search_planes(const TileArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* extra = reinterpret_cast<float*>(shared + PlanePipeline::kBytes);
  auto& tile =
      *reinterpret_cast<QueryTile*>(shared + PlanePipeline::kBytes + 2 * kTileKeys * sizeof(float));
  if (!begin_tile(args, tile)) return;
  const uint32_t t = threadIdx.x;
  const bool sample = args.maxima != nullptr;
  const uint32_t seen = tile.furthest > args.first_key ? tile.furthest - args.first_key : 0;
  const uint32_t rows =
      sample ? (args.key_count + kSampleEvery - 1) / kSampleEvery : min(args.key_count, seen);
  const uint32_t begin = blockIdx.y * args.share_keys;
  const uint32_t end = min(begin + args.share_keys, rows);
  if (begin >= end) {
    if (!sample && tile.limit[t] != 0)
      args.list_sizes[size_t{tile.row[t]} * args.shares + blockIdx.y] = 0;
    return;
  }
  const uint32_t slices = args.dim / 16;
  const auto key_of = [&](uint32_t step, uint32_t i) {
    const uint32_t at = begin + step * kTileKeys + i;
    if (at >= end) return ~0U;
    return sample ? min(sampled_key(at), args.key_count - 1) : at;
  };
  const auto query_row = [&](uint32_t i) -> const uint16_t* {
    return tile.limit[i] == 0 ? nullptr : args.queries + size_t{tile.row[i]} * slices * 48;
  };
  const auto key_row = [&](uint32_t step, uint32_t i) -> const uint16_t* {
    const uint32_t key = key_of(step, i);
    return key == ~0U ? nullptr
                      : reinterpret_cast<const uint16_t*>(args.keys + key * args.key_stride);
  };
  Keeper keeper(args, tile);
  stream_planes(shared, slices, (end - begin + kTileKeys - 1) / kTileKeys, args.keys, query_row,
                key_row, [&](float(&scores)[2][8][4], uint32_t step) {
                  float* own = extra + step % 2 * kTileKeys;
                  if (args.key_extra != nullptr) {
                    // The other half may still be read by a warp that is one tile behind, never by one two behind.
                    if (t < kTileKeys) {
                      const uint32_t key = key_of(step, t);
                      own[t] = key == ~0U ? 0.0F : args.key_extra[key];
                    }
                    __syncthreads();
                  }
                  const uint32_t row = begin + step * kTileKeys;
                  keeper.take(scores, args.first_key + (sample ? 0 : row), row / kTileKeys,
                              args.key_extra != nullptr ? own : nullptr);
                });
  if (!sample && tile.limit[t] != 0) {
    args.list_sizes[size_t{tile.row[t]} * args.shares + blockIdx.y] = tile.size[t];
  }
}

}  // namespace

cudaError_t launch_search_f32(const TileArgs& args, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      search_planes, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return error;
  const dim3 grid((args.rows + kTileQueries - 1) / kTileQueries, args.shares);
  search_planes<<<grid, kTileQueries, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace keyhole::gpu
