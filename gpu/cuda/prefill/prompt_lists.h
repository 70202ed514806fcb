// The lists that the queries of a prompt's stretch attend where not all heads are dense: their memory, and the order
// in which they are found, pattern by pattern, each for its own heads. A stretch is attended slice by slice, as many
// queries as there is memory for.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/line_choice.h"
#include "gpu/prompt.h"

namespace keyhole::gpu {

/// The most rows of a prompt: lists name blocks by 16 bits.
inline constexpr uint32_t kMostPromptRows = 65535 * kListRows;

/// Query heads that attend by the same pattern.
struct PatternHeads {
  PromptPattern pattern;
  HeadSet heads;
};
/// Groups heads by their patterns, for stretches of `rows` rows. patterns: one, or one for each of q_heads.
[[nodiscard]] std::vector<PatternHeads> group_patterns(std::span<const PromptPattern> patterns,
                                                       uint32_t rows);

/// Finds the lists of one stretch after the other, on the current device; calls enqueue. Throws Error:
/// out_of_device_memory, device_error.
class PromptLists {
 public:
  /// finished: an event recorded behind all that uses the lists; outlives this object.
  PromptLists(const PromptShape& shape, bool has_hopper, const Event& finished,
              const SliceLimits& limits)
      : shape_(shape), has_hopper_(has_hopper), finished_(&finished), limits_(limits) {}

  /// Begins a stretch: takes memory, and finds what holds for all of it. stretch: causal, without window and lists.
  /// Returns the number of queries of a slice, whole tiles; slices are taken from the stretch's end back.
  uint32_t begin(const BlockedParams& stretch, DType dtype, std::span<const PatternHeads> patterns,
                 cudaStream_t stream);
  /// Takes the memory that begin() of n queries and these rows would take.
  void reserve(uint32_t n, uint32_t rows, DType dtype, std::span<const PatternHeads> patterns);
  /// What bytes() will be after reserve() with these arguments.
  [[nodiscard]] size_t bytes_for(uint32_t n, uint32_t rows, DType dtype,
                                 std::span<const PatternHeads> patterns) const;
  /// Finds the lists of a slice and writes them to `slice`. If it returns a second piece, the slice is attended as
  /// two: `slice` leaves a state, and the second piece takes that and writes the outputs.
  std::optional<BlockedParams> choose(BlockedParams& slice, cudaStream_t stream);

  /// Two numbers in device memory, blocks attended and seen; null before the first stretch.
  [[nodiscard]] const unsigned long long* totals() const {
    return totals_.as<unsigned long long>();
  }
  [[nodiscard]] size_t bytes() const;

 private:
  static constexpr size_t kBuffers = 16;
  struct Sizes;
  [[nodiscard]] Sizes sizes_of(uint32_t n, uint32_t rows, DType dtype,
                               std::span<const PatternHeads> patterns) const;
  template <class Self>
  [[nodiscard]] static auto buffers_of(Self& self);
  [[nodiscard]] size_t totals_bytes() const;
  [[nodiscard]] Lines lines_of(const PromptPattern& pattern, const HeadSet& heads) const;
  [[nodiscard]] BlockChoice choice_of(const PatternHeads& group) const;
  void find_lines(const BlockedParams& stretch, cudaStream_t stream);
  void weigh(const BlockedParams& slice, const PromptPattern& pattern, SampledWeights& weights,
             cudaStream_t stream);

  PromptShape shape_;
  bool has_hopper_;
  const Event* finished_;
  SliceLimits limits_;
  // Members of the present stretch:
  DType dtype_ = DType::f16;
  std::vector<PatternHeads> groups_;
  uint32_t column_capacity_ = 0, slash_capacity_ = 0;  // 0: no head has columns and diagonals
  uint32_t last_tile_ = 0;                             // the last tile's first query
  uint32_t line_heads_ = 0;                            // heads whose weights are found together
  // Memory for weights of samples or lines; means; lists; lines and their rows; states between two pieces.
  ScratchBuffer weights_, query_means_, row_means_, counts_, lists_, skips_;
  ScratchBuffer line_counts_, line_rows_, distances_, keys_, values_;
  ScratchBuffer column_counts_, column_lists_, chosen_, outputs_, sums_;
  DeviceBuffer totals_;
};

/// A PromptAttention whose memory can be taken beforehand.
class CudaPromptAttention : public PromptAttention {
 public:
  /// Takes the memory that attend() of n queries and these rows would take, except for learned sinks. If that is more
  /// than there is, waits for earlier stretches. Throws Error(out_of_device_memory).
  virtual void reserve(uint32_t n, uint32_t rows, DType dtype,
                       std::span<const PromptPattern> patterns) = 0;
  /// What bytes() will be after reserve() with these arguments.
  [[nodiscard]] virtual size_t bytes_for(uint32_t n, uint32_t rows, DType dtype,
                                         std::span<const PromptPattern> patterns) const = 0;
};

/// Makes the attention of a prompt on CUDA device `ordinal`. Throws Error(unsupported): why_no_prompt().
[[nodiscard]] std::unique_ptr<CudaPromptAttention> make_cuda_prompt(int ordinal,
                                                                    const PromptShape& shape,
                                                                    const SliceLimits& limits = {});

}  // namespace keyhole::gpu
