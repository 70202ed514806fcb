// Attention of one layer's step over codes that lie on the device (cpu/code_layout.h): attend_codes() is one pass
// over all codes, finish_codes() reads the heaviest rows exactly and merges everything, resident tokens too.
//
// Kernels exist for any group, head dimensions of 64, 80, 96, 128, 256 and 512, and 2 or 4 bits, as many for values as
// for keys; steps have up to 48 query rows, of 512 components 32. Other shapes give cudaErrorInvalidValue, see
// codes_have_kernels().
//
// settle_codes() takes a second look where codes could not tell which rows weigh, if finish_codes() has not.
//
// ORDER on the stream: what writes `block_count` and the codes; resident_step, where it makes the resident state;
// attend_codes(); finish_codes(); settle_codes(). Nothing here allocates or waits, so all of it may be captured: the
// number of blocks is read when the kernels run, and launches are the same for every number up to the capacity.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/code_layout.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"
#include "gpu/codes.h"
#include "gpu/cuda/codes/host_rows.h"
#include "gpu/cuda/codes/list_params.h"
#include "gpu/cuda/exchange/step_params.h"

namespace keyhole::gpu {

/// attend_codes() leaves one maximum for so many rows.
inline constexpr uint32_t kMaximumRows = 32;
/// The most steps of one launch.
inline constexpr uint32_t kMostJointSteps = 16;

/// The state of doubt of a step's heads, and where it lies (gpu/code_doubt.h). Steps of one stream can share all but
/// `figures`.
struct CodesDoubt {
  DoubtBoard* board =
      nullptr;  ///< `[parts]`; null: nothing is asked, and no kernel takes a second look
  uint32_t* list = nullptr;        ///< `[parts, kv_heads]`
  DoubtRecord* records = nullptr;  ///< `[parts, kv_heads]`
  float* queries = nullptr;  ///< `[parts, kv_heads, group, dim]`, the group that of the first part
  const CodeFigures* figures = nullptr;  ///< `[kv_heads]`
};
/// Divides memory of DoubtLayout::bytes, aligned to 16 and zero at first.
[[nodiscard]] inline CodesDoubt doubt_in(std::byte* memory, const DoubtLayout& layout,
                                         const CodeFigures* figures) {
  return {reinterpret_cast<DoubtBoard*>(memory), reinterpret_cast<uint32_t*>(memory + layout.list),
          reinterpret_cast<DoubtRecord*>(memory + layout.records),
          reinterpret_cast<float*>(memory + layout.queries), figures};
}

/// One step of one layer. All pointers are to memory that the device can read: its own, unless stated otherwise.
struct CodesStep {
  CodeShape shape;
  uint32_t kv_heads = 0;
  uint32_t group =
      0;  ///< query heads of a KV head, 1..16; of several tokens all of theirs, token by token, up to kMostStepRows
  uint32_t tokens = 1;          ///< tokens of the step; divides `group`
  uint32_t block_capacity = 0;  ///< blocks of 256 rows that a KV head has space for
  uint32_t splits = 0;          ///< thread blocks of a KV head, see code_splits()
  uint32_t fill =
      0;  ///< thread blocks of a KV head that fill the device, see code_fill(); of step_codes() alone
  LogitParams logits;
  /// Whether finish_codes() runs a cluster of thread blocks per KV head (compute capability 9.0 or newer) or one
  /// thread block. prepare_codes() clears it where the device cannot run clusters. Steps without it are not launched
  /// ahead, but for a pass behind a choice by clusters: the settling kernel at their end is not, and between it and
  /// launches ahead 24 to 63 us were lost (bench/RESULTS.md, "Kernels of older devices").
  bool cluster = true;
  /// Pairs of tiles, 32 rows each, that a warp of attend_codes() has under way or at hand, 2 or 3; chunks with `wide`,
  /// where halves of them come one after the other (WideKernels::has_halves) also 1. prepare_codes() sets the number
  /// for which the device has shared memory.
  int stages = 2;
  /// Whether the pass is the one for many query rows (gpu/cuda/codes/wide.cuh); see codes_are_wide(). What follows it
  /// takes the tokens in parts (StepParts), each with `exact_rows` rows of its own.
  bool wide = false;
  /// Tokens of such a part; 0: prepare_codes() decides. Parts run side by side, and one of few query rows ends sooner:
  /// by one thread block 6 rows of 256 components take 40 us, 12 of them 97 (an H200 in 99 KiB of shared memory). So
  /// they are as small as lets all of them run at once.
  uint32_t part_tokens = 0;
  /// Whether a thread block of the pass has narrow_heads() query heads of a group of more, so that codes are read once
  /// for each so many: with lists, which are few, where there is no shared memory for all heads. See
  /// codes_are_narrow().
  bool narrow = false;
  /// Whether the pass for many query rows may be the one by Hopper's warpgroup products (gpu/cuda/codes/warpgroup.cuh);
  /// set by prepare_codes().
  bool warpgroups = false;
  /// Whether families of steps have kernels for this shape; set by prepare_codes().
  bool shares = false;
  uint32_t processors = 1;  ///< of the device; set by prepare_codes()
  size_t block_shared =
      SIZE_MAX;  ///< bytes of shared memory that a thread block may have; set by prepare_codes()
  /// Clusters of what follows the pass for many query rows that the device runs at once; set by prepare_codes().
  uint32_t clusters_at_once = 0;

  const uint32_t* block_count =
      nullptr;  ///< one number, <= block_capacity, the same for all KV heads; 0: no codes yet
  /// Steps of one launch with the same `family` (not null) have the same codes, balance and logits in their first
  /// blocks, as many as the smallest of their `family_count`: these blocks are attended for several of the steps at
  /// once.
  const void* family = nullptr;
  const uint32_t* family_count = nullptr;  ///< as block_count
  const std::byte* blocks =
      nullptr;                       ///< block b of KV head h at b * block_stride + h * head_stride
  size_t block_stride = 0;           ///< bytes
  size_t head_stride = 0;            ///< bytes
  const float* key_scale = nullptr;  ///< `[kv_heads, dim]` of the balanced space
  const float* value_scale = nullptr;  ///< `[kv_heads]`
  TensorView q;                        ///< `[tokens, kv_heads * group / tokens, dim]`

  /// The `exact_rows` (0..kMostDeviceRows) rows of a KV head with the largest weight in any head of its group are
  /// read from `keys` and `values` and attended exactly, in place of their codes. The memory is pinned host memory or
  /// the device's: row i of KV head h at h * kv_head_stride + i * row_stride; rows `[dim]` of `dtype`, aligned to 16
  /// bytes.
  uint32_t exact_rows = 0;
  DType dtype = DType::f16;
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  size_t kv_head_stride = 0;  ///< bytes
  size_t row_stride = 0;      ///< bytes
  /// How the host reads the exact rows instead; then `keys` and `values` are not used.
  HostRows host_rows;
  /// The device's copy of the scales of rows of dtype i8, `[block_capacity, kv_heads, 2, dim]` bf16; else null.
  const uint16_t* row_scales = nullptr;

  /// Sink and window come in one of two ways, or not at all. The first: they are attended in the same pass.
  /// `resident` says where they lie (its ring, kv, states, k, v and their dtype). Where it counts, finish_codes()
  /// publishes q, k and v, once the host has taken those of the step before, and takes the new token in.
  bool has_resident = false;
  StepParams resident;
  /// The second way, of one token alone: their state, to be merged, with lse in natural log; null: none. An earlier
  /// kernel on the stream has written it.
  const float* resident_o = nullptr;    ///< `[kv_heads * group, dim]`
  const float* resident_lse = nullptr;  ///< `[kv_heads * group]`

  CodesDoubt doubt;

  /// Lists of the layer's rows, where the step is to read those that weigh (gpu/cuda/codes/list_choice.cuh) in place of
  /// all blocks: of up to 16 query rows, and with rows that the device reads.
  CodesLists lists;

  const float* sinks = nullptr;  ///< `[kv_heads * group]` learned sinks, natural log; null: none

  /// Work space of codes_work_bytes(), aligned to 16, whose contents before do not matter. Steps of one stream can
  /// share it.
  std::byte* work = nullptr;

  TensorOut out;         ///< as q
  float* lse = nullptr;  ///< `[tokens, kv_heads * group / tokens]`, natural log; null: not wanted
  uint32_t* chosen =
      nullptr;  ///< `[parts, kv_heads, exact_rows]`, the rows read exactly, in no order; null: not wanted
};

/// Whether steps of so many query rows, of so many tokens together, have the pass for many rows. It alone takes more
/// than 16, and heads of 512; otherwise the other one is faster, where a thread block may have the shared memory that
/// it takes, but for several tokens of 256 components on Hopper.
[[nodiscard]] bool codes_are_wide(const CodeShape& shape, uint32_t group,
                                  size_t shared_of_block = SIZE_MAX, uint32_t tokens = 1);

/// CodesStep::narrow of a step with lists. Where it is true, codes_are_wide() is true, too.
[[nodiscard]] bool codes_are_narrow(const CodeShape& shape, uint32_t group, size_t shared_of_block);

/// Whether kernels exist for the shape, of one token.
[[nodiscard]] bool codes_have_kernels(const CodeShape& shape, uint32_t group);

/// The number of thread blocks per KV head that fill `multiprocessors` of so many bytes of shared memory each. wide:
/// CodesStep::wide, and narrow. A wide pass has Hopper's kernels where these run on the current device, which the
/// caller makes that of the step: its thread blocks are others then. So it is for code_splits().
[[nodiscard]] uint32_t code_fill(const CodeShape& shape, uint32_t kv_heads, uint32_t group,
                                 uint32_t multiprocessors,
                                 size_t shared_of_multiprocessor = SIZE_MAX, bool wide = false,
                                 bool narrow = false);
/// The number of thread blocks per KV head of a step, at most code_fill(): as many as have work with `block_capacity`
/// blocks of codes and `resident_capacity` resident tokens.
[[nodiscard]] uint32_t code_splits(const CodeShape& shape, uint32_t kv_heads, uint32_t group,
                                   uint32_t block_capacity, uint32_t multiprocessors,
                                   size_t shared_of_multiprocessor = SIZE_MAX,
                                   uint32_t resident_capacity = 0, bool wide = false,
                                   bool narrow = false);

/// The bytes of CodesStep::work. They depend on the shape, kv_heads, group, block_capacity and splits, and on lists as
/// prepare_codes() has left them.
[[nodiscard]] size_t codes_work_bytes(const CodesStep& step);

/// Call before the first step on device `device`, the current one, of steps of this shape, group, block_capacity and
/// `cluster`. Chooses the kernel (step.cluster) and the number of stages, and lets both kernels have all of the
/// device's shared memory (shared_memory_of()), once for all steps of all sessions. Where a cluster needs more than
/// there is (compute capability 12.0 gives 99 KiB) it takes one thread block. needs: gets the bytes of shared memory of
/// the largest thread block. Returns cudaErrorInvalidValue where there are no kernels for the shape, and
/// cudaErrorNotSupported where the device has too little shared memory for it: 99 KiB are enough for every shape, with
/// CodesStep::wide as codes_are_wide() says. Of a step with lists it chooses how these are chosen among
/// (CodesLists::blocks, by_memory); CodesStep::narrow is the caller's.
[[nodiscard]] cudaError_t prepare_codes(CodesStep& step, int device, size_t* needs = nullptr);

/// Enqueues the choice among the lists of a step that has some; attend_codes() does so itself. `ahead`: as there.
[[nodiscard]] cudaError_t choose_lists(const CodesStep& step, cudaStream_t stream, bool ahead);
/// Enqueues the layout of mean values for tensor cores.
[[nodiscard]] cudaError_t lay_out_means(const MeanTiles& means, cudaStream_t stream);

/// Enqueues the pass over the codes and over resident tokens, of a step with lists the choice among them before.
/// `ahead`: the kernel is set up before the kernel in front of it on the stream has ended, and waits for that end
/// (gpu/cuda/common/launch.h; compute capability 9.0 or newer).
[[nodiscard]] cudaError_t attend_codes(const CodesStep& step, cudaStream_t stream, bool ahead);

/// Enqueues the choice of this step's heaviest rows, their exact attention, and the merge. `ahead`: as in
/// attend_codes(), which must stand directly before it on the stream.
[[nodiscard]] cudaError_t finish_codes(const CodesStep& step, cudaStream_t stream, bool ahead);

/// Enqueues the second look at codes that could not tell which rows weigh, after finish_codes(). Enqueues nothing
/// without `doubt`, where no row is read exactly, and where a cluster of thread blocks takes that look itself
/// (CodesStep::cluster).
[[nodiscard]] cudaError_t settle_codes(const CodesStep& step, cudaStream_t stream);

/// What the steps of one launch must have in common. Codes, lengths, capacities, tensors, exact rows and work spaces
/// are each step's own.
struct CodesKind {
  const void* attend = nullptr;  ///< the kernel; null: the step goes alone
  uint32_t kv_heads = 0, clusters = 0, fill = 0;
  int stages = 0;

  bool operator==(const CodesKind&) const = default;
};
/// The kind of a prepared step. Steps with 64 or 128 components and groups of up to 8 can be joined, by kernels of
/// clusters, where the device reads the exact rows and there is no resident state. Those of one token with lists read
/// all codes there: they can be joined where that is no slower.
[[nodiscard]] CodesKind codes_kind(const CodesStep& step);

/// Enqueues all kernels for 1 to kMostJointSteps steps of one kind, each with a work space of its own. With several
/// steps, one has 1 to `splits` thread blocks per KV head, depending on what the others have to read: its result may
/// differ by rounding from that of attend_codes() and finish_codes().
[[nodiscard]] cudaError_t step_codes(std::span<const CodesStep> steps, cudaStream_t stream,
                                     bool ahead);

}  // namespace keyhole::gpu
