// How a Codes's memory on a device is divided: what plans count and CudaCodes allocates. Offsets are bytes into an
// allocation, each a multiple of 256.
#pragma once

#include "gpu/codes.h"

namespace keyhole::gpu {

/// Parts that a KV head's blocks are divided into by the pass over the codes, at most: as many states of its group wait
/// to be merged. 2 thread blocks on each of 256 multiprocessors, more than any GPU of today has.
[[nodiscard]] constexpr uint32_t most_code_splits(uint32_t kv_heads) {
  constexpr uint32_t kThreadBlocks = 512;
  constexpr uint32_t kMost = 256;  // that the merge has shared memory for
  const uint32_t each = kThreadBlocks / (kv_heads == 0 ? 1 : kv_heads);
  return each < 1 ? 1 : each > kMost ? kMost : each;
}

/// Layers that there is memory for.
[[nodiscard]] constexpr uint32_t coded_layers(const CodesShape& shape) {
  return shape.coded_layers == 0 ? shape.layers : shape.coded_layers;
}

/// Tokens that a step may have, where the device has kernels and shared memory for them.
[[nodiscard]] constexpr uint32_t most_codes_tokens(const CodesShape& shape) {
  const uint32_t group = shape.q_heads / (shape.kv_heads == 0 ? 1 : shape.kv_heads);
  return shape.rows_by_host ? most_hosted_tokens(group) : most_step_tokens(group);
}

/// Rows of queries of a KV head with those that fill the tiles of kernels: 4, 8 or 16.
[[nodiscard]] constexpr uint32_t padded_rows(size_t rows) {
  return rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
}

/// Whether rows may be put in lists: there are no kernels that choose among lists of longer rows.
[[nodiscard]] constexpr bool has_lists(const CodesShape& shape) {
  return shape.list_rows != 0 && is_device_index_dim(shape.code.dim);
}
/// Tokens of a step that may choose among them: its rows of queries have one choice, for which there are kernels of up
/// to kMaxDeviceGroup rows.
[[nodiscard]] constexpr uint32_t most_listed_tokens(const CodesShape& shape) {
  const uint32_t group = shape.q_heads / (shape.kv_heads == 0 ? 1 : shape.kv_heads);
  const uint32_t most = most_codes_tokens(shape), fit = kMaxDeviceGroup / (group == 0 ? 1 : group);
  return fit < 1 ? 1 : fit < most ? fit : most;
}

/// Of heads of 64, 80, 96, 128 and 256 components up to 4, 8 and 16 query heads of a KV head.
using BytesOfShapes = size_t[5][3];
[[nodiscard]] constexpr size_t bytes_of_shape(const BytesOfShapes& bytes, uint32_t dim,
                                              uint32_t group) {
  const uint32_t row = dim <= 64 ? 0 : dim <= 80 ? 1 : dim <= 96 ? 2 : dim <= 128 ? 3 : 4;
  return bytes[row][group <= 4 ? 0 : group <= 8 ? 1 : 2];
}

/// Bytes of shared memory of a thread block of the cluster that chooses a step's rows (gpu/cuda/codes/finish.cuh), for
/// which no other kernel of a step with lists takes more room than there is; beside them it has a number for each 32
/// rows that it looks at. Of shapes that have lists; kernels assert it when they are compiled.
[[nodiscard]] constexpr size_t finish_bytes(uint32_t dim, uint32_t group) {
  constexpr BytesOfShapes kBytes = {{50688, 55808, 71168},
                                    {56320, 62208, 80384},
                                    {61696, 67840, 88064},
                                    {72448, 80128, 104960},
                                    {99072, 111872, 155648}};
  return bytes_of_shape(kBytes, dim, group);
}
/// Thread blocks of that cluster, and threads of each.
inline constexpr uint32_t kChoosingBlocks = 8, kChoosingThreads = 256;
/// Query heads of a KV head that a thread block of the pass over chosen lists attends at a time where shared memory is
/// too little for all of them: of 256 components, and of 128.
[[nodiscard]] constexpr uint32_t narrow_heads(uint32_t dim) {
  return dim > 128 ? 4 : dim == 128 ? 8 : kMaxDeviceGroup;
}
/// The same of the largest thread block of a step with lists whose rows one thread block chooses: the pass over the
/// codes, for narrow_heads() at a time, or the choice among lists.
[[nodiscard]] constexpr size_t lone_bytes(uint32_t dim, uint32_t group) {
  constexpr BytesOfShapes kBytes = {{46432, 49856, 76256},
                                    {61536, 65728, 80352},
                                    {68192, 72896, 83424},
                                    {89952, 95936, 95936},
                                    {93664, 93664, 93664}};
  return bytes_of_shape(kBytes, dim, group);
}

/// Thread blocks of a KV head that choose among its lists where there are no clusters: all run at once. The least, and
/// the most.
inline constexpr uint32_t kListGridBlocks = 8, kMostListGridBlocks = 16;
/// Bytes that each of them tells the others (gpu/cuda/codes/list_blocks.cuh), for so many query heads of a KV head with
/// those that fill tiles of 4; kernels assert that it is enough.
[[nodiscard]] constexpr size_t told_bytes(uint32_t padded_heads) {
  return (4320 + size_t{padded_heads} * 2384 + 127) / 128 * 128;
}

/// Bytes that the choice among a KV head's lists comes to: ChosenLists of gpu/cuda/codes/params.h.
inline constexpr size_t kEndsOfLists = 1280;
/// Bytes of what steps of a layer tell those behind them: ListMemory of gpu/cuda/codes/list_params.h.
inline constexpr size_t kMemoryOfLists = 16;

/// What making the lists of a stretch of rows takes for a time (gpu/cuda/codes/make_lists.h): offsets of its parts.
struct ListWorkLayout {
  ListWorkLayout() = default;
  /// Of a shape with list_rows. Throws as codes_bytes().
  explicit ListWorkLayout(const CodesShape& shape);

  uint32_t rows = 0;   ///< of a stretch at most
  uint32_t heads = 0;  ///< KV heads whose rows there is memory for at a time
  size_t keys = 0, values = 0, labels = 0, order = 0, counts = 0, starts = 0, centroids = 0,
         offsets = 0, begins = 0;
  size_t bytes = 0;
};

struct CodesLayout {
  /// Throws as codes_bytes().
  explicit CodesLayout(const CodesShape& shape);

  /// An allocation of its own: `[layers, capacity, kv_heads, block_bytes]`, of all layers that have codes.
  size_t blocks_bytes = 0;
  // In the other, of the same layers: key_scales `[layers, kv_heads, dim]` and value_scales `[layers, kv_heads]` fp32,
  // counts `[layers, 2]` uint32 (blocks, and those in common with copies), row_scales
  // `[layers, capacity, kv_heads, 2, dim]` bf16 where rows are i8.
  size_t key_scales = 0, value_scales = 0, counts = 0, row_scales = 0;
  // Blocks of all KV heads follow one another: what a prefix of the tokens has is one stretch of memory.
  size_t head_stride = 0;   ///< bytes of a block
  size_t block_stride = 0;  ///< of those of all KV heads
  size_t layer_stride = 0;  ///< of all of the layer's
  size_t row_steps =
      0;  ///< with rows_by_host, `[kv_heads]` uint32: HostRows::steps of gpu/cuda/codes/host_rows.h
  size_t copied =
      0;  ///< likewise, rows that are about to be encoded: K and V `[2, kv_heads, copied_blocks * 256, dim]`
  uint32_t copied_blocks = 0;
  size_t sinks = 0;  ///< where there are any, of all layers of the model: `[layers, q_heads]` fp32
  size_t work = 0;   ///< of the step under way: CodesStep::work of gpu/cuda/codes/codes_kernels.h
  size_t work_bytes = 0;  ///< no less than codes_work_bytes()
  // Lists, where there are any, in an allocation of their own: of each layer its parts, from the beginning of the
  // layer's.
  ListSizes lists{0, 1};     ///< of a KV head
  ListWorkLayout list_work;  ///< behind all layers' lists
  size_t list_pairs = 0, list_ids = 0, list_places = 0, list_figures = 0, list_key_means = 0,
         list_value_means = 0, list_mean_tiles = 0,
         list_counts = 0;    ///< as CodesLists; counts `[1 + kv_heads]`: listed blocks, lists
  size_t list_memory = 0;    ///< ListMemory of gpu/cuda/codes/list_params.h
  size_t list_arrivals = 0;  ///< `[kv_heads]` uint32: CodesLists::arrivals
  size_t list_totals =
      0;  ///< `[1 + capacity, kv_heads]` ListTotals: of no stretch, of the first, ..
  size_t list_stride = 0;  ///< bytes of a layer
  size_t list_bytes = 0;   ///< of that allocation
  size_t figures = 0;      ///< `[layers, kv_heads]` CodeFigures of gpu/code_doubt.h
  size_t arrivals =
      0;  ///< `[capacity, kv_heads]` uint32, zero between launches: EncodeParams::arrivals of gpu/cuda/codes/encode.h
  size_t doubt = 0;         ///< of the step under way: DoubtLayout of gpu/code_doubt.h
  size_t others_bytes = 0;  ///< of that allocation
  size_t bytes = 0;         ///< of both
};

/// What a step and the host exchange of rows that the host reads, in pinned memory, in bytes from its beginning.
struct RowExchangeLayout {
  /// Throws as codes_bytes().
  explicit RowExchangeLayout(const CodesShape& shape);

  /// 64-bit words of a KV head's request: (step, layer), and exact_rows times (step, row), the step in the upper half.
  uint32_t request_words = 0;
  size_t requests = 0;  ///< `[kv_heads, request_words]`
  size_t answers = 0;   ///< `[kv_heads]` DeliveredLine of gpu/resident_layout.h
  size_t rows = 0;      ///< `[kv_heads, exact_rows, 2 (K, V), row_bytes]`
  size_t row_bytes = 0;
  size_t bytes = 0;
};

}  // namespace keyhole::gpu
