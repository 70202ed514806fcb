#include "gpu/cuda/codes/list_choice.cuh"

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/value_sums.cuh"

namespace keyhole::gpu {
namespace {

/// Writes a register of each lane, see MeanTiles. Grid: tiles; a thread has every 256th register.
__global__ void lay_out(const __grid_constant__ MeanTiles p) {
  const uint32_t tile = p.first / MeanTiles::kLists + blockIdx.x;
  const uint32_t words = p.dim / 16 * 128;
  const float odd = p.bits == 2 ? codes::ValueUnits<2>::kEven / codes::ValueUnits<2>::kOdd : 1.0F;
  const auto* const means = reinterpret_cast<const __half*>(p.means);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    const uint32_t a = i % 4, lane = i / 4 % 32, m = i / 128;
    const uint32_t component = 16 * m + lane / 4 + 8 * (a % 2);
    __half two[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t list = tile * MeanTiles::kLists + 2 * (lane % 4) + j + 8 * (a / 2);
      const float x = list < p.end ? __half2float(means[size_t{list} * p.dim + component]) : 0.0F;
      two[j] = __float2half_rn(a % 2 == 0 ? x : x * odd);
    }
    p.tiles[size_t{tile} * words + i] = packed(two[0], two[1]);
  }
}

}  // namespace

cudaError_t lay_out_means(const MeanTiles& means, cudaStream_t stream) {
  if (means.first >= means.end) return cudaSuccess;
  const auto tiles =
      static_cast<uint32_t>(mean_tiles_of(means.end)) - means.first / MeanTiles::kLists;
  lay_out<<<tiles, 256, 0, stream>>>(means);
  return cudaGetLastError();
}

}  // namespace keyhole::gpu

namespace keyhole::gpu::codes {
namespace {

static_assert(kListBlocks == kListGridBlocks && kMostListBlocks == kMostListGridBlocks);

template <int kDim, int kHeadTiles, class Blocks>
ListKernel kernel() {
  using Shared = ListShared<kDim, kHeadTiles, Blocks>;
  using More = MoreShared<kHeadTiles, Blocks>;
  ListKernel k;
  if constexpr (Blocks::kTellByMemory) {
    k.choose = reinterpret_cast<const void*>(&list_grid_kernel<kDim, kHeadTiles, Blocks::kBlocks>);
  } else {
    k.choose = reinterpret_cast<const void*>(&list_kernel<kDim, kHeadTiles, Blocks::kBlocks>);
  }
  k.shared = sizeof(Shared);
  k.shared_of_more = sizeof(More);
  k.list = KeptLists<4 * kHeadTiles>::kBytes;
  k.list_of_more = KeptLists<4 * kHeadTiles>::kMoreBytes;
  // What plans of lists go by.
  constexpr bool kCounts =
      Blocks::kTellByMemory || (Blocks::kBlocks == kListBlocks && kDim * kHeadTiles < 1024);
  static_assert(!kCounts || sizeof(Shared) + sizeof(More) <= lone_bytes(kDim, 4 * kHeadTiles),
                "lone_bytes() is to be raised");
  static_assert(
      kMoreToldAt<kHeadTiles, Blocks> + sizeof(typename More::Told) <= told_bytes(4 * kHeadTiles) ||
          !Blocks::kTellByMemory,
      "told_bytes() is to be raised");
  return k;
}

template <int kDim, class Blocks>
ListKernel kernel_of(uint32_t group) {
  if (group <= 4) return kernel<kDim, 1, Blocks>();
  return group <= 8 ? kernel<kDim, 2, Blocks>() : kernel<kDim, 4, Blocks>();
}

template <template <uint32_t> class BlocksOf>
ListKernel kernel_of(uint32_t dim, uint32_t group, uint32_t blocks) {
  using Usual = BlocksOf<kListBlocks>;
  using Most = BlocksOf<kMostListBlocks>;
  const bool is_most = blocks == kMostListBlocks;
  switch (dim) {
    case 64: return is_most ? ListKernel{} : kernel_of<64, Usual>(group);
    case 80: return is_most ? ListKernel{} : kernel_of<80, Usual>(group);
    case 96: return is_most ? ListKernel{} : kernel_of<96, Usual>(group);
    case 128: return is_most ? kernel_of<128, Most>(group) : kernel_of<128, Usual>(group);
    case 256: return is_most ? kernel_of<256, Most>(group) : kernel_of<256, Usual>(group);
    default: return {};
  }
}

}  // namespace

ListKernel list_kernel_of(uint32_t dim, uint32_t group, uint32_t blocks) {
  return kernel_of<ClusterOfBlocks>(dim, group, blocks);
}

ListKernel list_grid_kernel_of(uint32_t dim, uint32_t group, uint32_t blocks) {
  return kernel_of<GridOfBlocks>(dim, group, blocks);
}

}  // namespace keyhole::gpu::codes
