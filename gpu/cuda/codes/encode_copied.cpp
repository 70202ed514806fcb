#include "gpu/cuda/codes/encode_copied.h"

#include <algorithm>

#include "gpu/cuda/common/check.h"

namespace keyhole::gpu {

void encode_copied(const EncodeLauncher& launcher, const EncodeParams& params, size_t row_bytes,
                   const CopiedRows& copied, cudaStream_t stream) {
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream),
          "copying rows to be encoded to the device");
  };
  const size_t block_bytes = kCodeBlock * row_bytes;
  const size_t head_bytes = copied.blocks * block_bytes;
  std::byte* const values = copied.data + params.kv_heads * head_bytes;
  const size_t block_scales = size_t{2} * params.kv_heads * params.shape.dim;
  const uint32_t end = params.first + params.count;
  for (uint32_t first = params.first; first < end; first += copied.blocks) {
    EncodeParams piece = params;
    piece.first = first;
    piece.count = std::min(copied.blocks, end - first);
    const size_t begin = first * block_bytes, bytes = piece.count * block_bytes;
    for (uint32_t head = 0; head < params.kv_heads; ++head) {
      const size_t from = head * params.rows_stride + begin, to = head * head_bytes;
      copy(copied.data + to, params.keys + from, bytes);
      copy(values + to, params.values + from, bytes);
    }
    // The kernel looks for block `first` behind those before it.
    piece.keys = copied.data - begin;
    piece.values = values - begin;
    piece.rows_stride = head_bytes;
    if (params.row_scales != nullptr) {
      // The scales go straight to where the device keeps them, and are read from there.
      copy(params.row_scales_out + first * block_scales, params.row_scales + first * block_scales,
           piece.count * block_scales * sizeof(uint16_t));
      piece.row_scales = params.row_scales_out;
    }
    launcher.launch(piece, stream);
  }
}

}  // namespace keyhole::gpu
