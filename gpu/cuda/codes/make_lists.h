// Lists of near rows (gpu/code_lists.h) made by the device from K and V: rows of a stretch of the text are clustered,
// and encoded about the means of their clusters straight to where steps read them. The host knows no number of it: how
// many lists and pairs of tiles a stretch has stays on the device, and each stretch has memory of its own for the most
// that it may have.
//
//   copy     rows of some KV heads from pinned host memory, once over the bus
//   cluster  k-means of the balanced keys: products with the centroids on tensor cores, rows sorted by cluster, means
//            of these (cluster_rows.cu)
//   divide   clusters of more than 256 rows into pieces of the text; where the lists would take more pairs than there
//            are for the stretch, rows in the order of their clusters are cut into equal lists, which fit
//   encode   each list about its means, as index::encode_rows() does it, bit for bit (encode_lists.cu)
//
// COST. Arithmetic is small: 131,072 rows of 8 KV heads of 128 components in stretches of 16,384 with 256 clusters are
// 69 GFLOP an iteration.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"
#include "cpu/types.h"
#include "gpu/code_lists.h"
#include "gpu/cuda/codes/list_params.h"

namespace keyhole::gpu {

/// The longest rows that are put in lists.
inline constexpr uint32_t kMostListDim = 256;

/// What lists and pairs a KV head has, all stretches up to some one together.
struct ListTotals {
  uint32_t lists = 0, pairs = 0;
};

/// MakeLists::kept_rows of rows of `dim` components: a list has 64 on average, and four thread blocks of a
/// multiprocessor have the shared memory.
[[nodiscard]] constexpr uint32_t kept_list_rows(uint32_t dim) {
  constexpr uint32_t kBytes = 32768;
  return kBytes / (dim * static_cast<uint32_t>(sizeof(float)));
}

/// A stretch of a layer's rows that is put in lists, of KV heads [first_head, first_head + heads). Pointers are the
/// device's.
struct MakeLists {
  CodeShape shape;
  DType dtype = DType::f16;
  uint32_t row_bytes = 0;
  uint32_t pair_bytes = 0;           ///< list_pair_bytes()
  uint32_t first_row = 0, rows = 0;  ///< both multiples of kCodeBlock; rows: kListStretch at most
  uint32_t kv_heads = 0;             ///< of the layer
  uint32_t first_head = 0, heads = 0;
  ListStretch stretch;      ///< of these rows
  uint32_t iterations = 0;  ///< of k-means
  uint32_t kept_rows = 0;   ///< of a list, that a thread block has shared memory for in fp32

  const std::byte* host_keys = nullptr;  ///< row i of KV head h at h * rows_stride + i * row_bytes
  const std::byte* host_values = nullptr;
  size_t rows_stride = 0;
  const uint16_t* row_scales =
      nullptr;                       ///< of dtype i8: `[blocks, kv_heads, 2, dim]` bf16, else null
  const float* key_scale = nullptr;  ///< `[kv_heads, dim]`
  const float* value_scale = nullptr;  ///< `[kv_heads]`

  // Of the work, each for `heads` KV heads: see ListWorkLayout of gpu/codes_layout.h.
  std::byte* keys = nullptr;  ///< `[heads, rows, row_bytes]`
  std::byte* values = nullptr;
  uint16_t* labels = nullptr;     ///< `[heads, rows]` cluster of each row
  uint16_t* order = nullptr;      ///< `[heads, rows]` rows of the first cluster, of the second, ..
  uint16_t* counts = nullptr;     ///< `[heads, rows / 256, clusters]` see cluster_rows.cu
  uint32_t* starts = nullptr;     ///< `[heads, clusters + 1]` where each cluster begins in `order`
  uint16_t* centroids = nullptr;  ///< `[heads, clusters / 8 rounded up, dim / 16, 32, 4]` fp16
  float* offsets = nullptr;       ///< `[heads, clusters rounded up to 8]` half their squares
  uint32_t* begins = nullptr;     ///< `[heads, stretch.lists]` where each list begins in `order`

  // Where the lists go: of all KV heads, with these capacities.
  uint32_t list_capacity = 0, pair_capacity = 0;
  std::byte* pairs = nullptr;
  uint32_t* ids = nullptr;
  ListPlace* places = nullptr;
  ListFigures* figures = nullptr;
  uint16_t* key_means = nullptr;
  uint16_t* value_means = nullptr;
  uint32_t* mean_tiles = nullptr;
  const ListTotals* before = nullptr;  ///< `[kv_heads]` of the stretches before
  ListTotals* after = nullptr;         ///< `[kv_heads]` which are written
};

struct ListWorkLayout;
/// Sets the pointers to the work, which lies at `at`.
void find_work(MakeLists& p, const ListWorkLayout& work, std::byte* at);

/// Enqueues the copies of rows: `keys` and `values`. Throws Error(device_error).
void launch_copy_rows(const MakeLists& p, cudaStream_t stream);
/// Enqueues the clustering of these keys: `order` and `starts`. Throws Error(device_error).
void launch_cluster_rows(const MakeLists& p, cudaStream_t stream);
/// Enqueues the lists of what launch_cluster_rows() has found. Throws Error(device_error).
void launch_encode_lists(const MakeLists& p, cudaStream_t stream);

/// Enqueues that steps find the lists of all stretches up to one: counts `[1 + kv_heads]` becomes `listed` and the
/// lists of each KV head, and `memory` that of no step.
void launch_use_lists(const ListTotals* totals, uint32_t kv_heads, uint32_t listed,
                      uint32_t* counts, ListMemory* memory, cudaStream_t stream);

}  // namespace keyhole::gpu
