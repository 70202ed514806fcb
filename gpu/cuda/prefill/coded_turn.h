// Many query rows over the codes of a layer: memory, passes and what they have come to
// (gpu/cuda/prefill/coded_kernels.h lists the kernels).
//
// A first pass is of all queries. Those whose codes cannot tell which rows weigh (cpu/code_doubt.h) have another,
// alone, in which every row is read exactly that may weigh, up to kMostPasses in all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "gpu/blocked.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/coded_kernels.h"

namespace keyhole::gpu {

class CodedTurn {
 public:
  /// hopper: by the kernels of a device on which hopper_kernels_run_on(). Throws as kernels_major() does.
  CodedTurn(const SessionMemory& session, bool hopper);
  ~CodedTurn() { give_back(); }
  CodedTurn(const CodedTurn&) = delete;
  CodedTurn& operator=(const CodedTurn&) = delete;

  /// Whether there are kernels for these codes.
  [[nodiscard]] static bool supports(const CodedRows& rows);
  /// Whether there are kernels for a choice among their blocks, of so many query heads of a KV head, and something to
  /// choose.
  [[nodiscard]] static bool chooses(const CodedRows& rows, uint32_t group);
  /// Attends. queries: n, heads, queries in two parts, logits, and the state before. Waits for the stream; meanwhile:
  /// see BlockedAttention::attend_codes(). Throws Error(out_of_device_memory | device_error).
  [[nodiscard]] CodedAttention attend(const CodedRows& rows, const BlockedParams& queries,
                                      DType dtype, const float* sinks, cudaStream_t stream,
                                      const std::function<void()>& meanwhile);
  // The state after, as BlockedParams has it, until the next call.
  [[nodiscard]] float* o() const { return params_.o; }
  [[nodiscard]] float2* sums() const { return params_.sums; }

  [[nodiscard]] size_t bytes() const { return memory_.bytes(); }
  /// Gives the memory back, which nothing that was enqueued uses any more.
  void give_back();

 private:
  void lay_out(std::byte* base, size_t& end);
  void reserve();
  /// Divides the query rows of a pass among thread blocks.
  [[nodiscard]] uint32_t splits_of(uint32_t padded) const;
  /// Entries of the lists of a KV head, in the first pass of a turn.
  [[nodiscard]] size_t list_entries() const;
  void enqueue_pass(cudaStream_t stream);
  [[nodiscard]] CodedStatus wait_for_status();

  SessionMemory session_;
  DeviceBuffer memory_;
  PinnedBuffer answer_;          ///< a CodedStatus
  std::optional<Event> before_;  ///< where the stream has attended all other rows
  std::optional<Event> told_;    ///< where answer_ is there
  CodedParams params_;
  uint32_t* chosen_ = nullptr;          ///< CodedParams::chosen
  uint32_t* lists_of_queries_[2] = {};  ///< rows, log-sum-exps and counts of two passes in turn
  bool hopper_;
  bool launches_ahead_;
  uint32_t processors_ = 0;
};

}  // namespace keyhole::gpu
