// A device with streams, as an engine and its sessions see it: all that they have on a device is made here. CUDA is one
// (make_cuda_device()), a model whose layers have different shapes is served by another around it (gpu/mixed_device.h),
// and tests make up theirs. Which devices a machine has is asked of the functions below, which every build answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/kernel_limits.h"
#include "gpu/resident.h"
#include "gpu/step.h"

namespace keyhole::gpu {

class Codes;
struct CodesShape;
class Windows;
struct WindowsShape;
class BlockedAttention;
class ListedAttention;
struct BlockedShape;
class PromptAttention;
struct PromptShape;
class HostCopies;
class PinnedMemory;
class RankStates;
struct RankStatesShape;
class NeighbourSearch;
struct NeighbourConfig;
class KMeans;
struct KMeansConfig;

/// What a device may lack.
enum class DevicePart : uint8_t {
  codes,        ///< make_codes() and make_pin(); without them offloaded tokens are the host's
  windows,      ///< make_windows(); without it sliding layers lie in host memory
  blocked,      ///< make_blocked(); without it new tokens are attended one by one
  listed,       ///< make_listed(); without it patterns of extends are dense
  prompts,      ///< make_prompt(); without it prompts have no attention of their own
  rank_states,  ///< make_rank_states(); without it spread sessions take host tensors alone
  builds        ///< make_neighbours() and make_kmeans(); without them the host builds indexes alone
};

/// Every function may be called from any thread. What is made for a Resident is destroyed before it, and nothing that
/// was made needs the Device any more. A function whose part the device lacks returns null; all others throw
/// Error(unsupported) where the device has no kernels for a shape, Error(out_of_device_memory) and Error(device_error).
class Device {
 public:
  virtual ~Device() = default;

  /// For people, e.g. "NVIDIA H200".
  [[nodiscard]] virtual const std::string& name() const = 0;
  [[nodiscard]] virtual bool has(DevicePart part) const = 0;
  /// Bytes of the device's memory that are free now; nothing: that is not known.
  [[nodiscard]] virtual std::optional<size_t> free_bytes() const { return std::nullopt; }

  /// Resident tokens of a session. A session has a Resident for each shape of its layers, and they share `session`,
  /// whose limit counts.
  [[nodiscard]] virtual std::unique_ptr<Resident> make_resident(
      const ResidentShape& shape, const std::shared_ptr<SessionOnDevice>& session) const = 0;

  // Parts of the session that `resident`, made by this device, belongs to. Their memory counts against the session's
  // limit.
  /// Codes for the Resident's steps. Throws Error(invalid_argument) for heads, layers or logits that are not the
  /// Resident's, and Error(unsupported) for a shape without kernels (why_no_codes()).
  [[nodiscard]] virtual std::unique_ptr<Codes> make_codes(Resident& resident,
                                                          const CodesShape& shape) const;
  /// Sliding layers. Throws Error(invalid_argument) for a shape that no session has.
  [[nodiscard]] virtual std::unique_ptr<Windows> make_windows(Resident& resident,
                                                              const WindowsShape& shape) const;
  /// Attention of many new tokens, which takes memory when it is used. Throws Error(unsupported) for a shape without
  /// kernels (why_no_blocked()).
  [[nodiscard]] virtual std::unique_ptr<BlockedAttention> make_blocked(
      Resident& resident, const BlockedShape& shape) const;
  /// Attention of many new tokens by patterns, which takes memory when it is used. Throws as make_blocked().
  [[nodiscard]] virtual std::unique_ptr<ListedAttention> make_listed(
      Resident& resident, const BlockedShape& shape) const;

  /// Pins host memory for this device. Throws Error(unsupported) where the device has other addresses for host memory
  /// than the host.
  [[nodiscard]] virtual std::unique_ptr<PinnedMemory> make_pin() const;
  /// Copies between device and host, which every device with streams has. Throws Error(out_of_memory) without pinned
  /// memory (2 x 8 MiB).
  [[nodiscard]] virtual std::unique_ptr<HostCopies> make_copies() const;
  /// Attention of prompts. Throws Error(unsupported) for a shape without kernels (why_no_prompt()).
  [[nodiscard]] virtual std::unique_ptr<PromptAttention> make_prompt(
      const PromptShape& shape) const;
  /// States of the ranks of a spread sequence. Throws Error(unsupported) for more ranks than kMostMergedStates.
  [[nodiscard]] virtual std::unique_ptr<RankStates> make_rank_states(
      const RankStatesShape& shape) const;

  // Workspaces for builds of indexes.
  [[nodiscard]] virtual std::unique_ptr<NeighbourSearch> make_neighbours(
      const NeighbourConfig& config) const;
  [[nodiscard]] virtual std::unique_ptr<KMeans> make_kmeans(const KMeansConfig& config) const;
};

/// How a CUDA device works.
struct CudaConfig {
  int ordinal = 0;                      ///< which device
  bool probe_signal = true;             ///< choose `signal` by trying: a wait of some milliseconds
  Signal signal = Signal::device_wait;  ///< otherwise
  uint32_t timeout_ms = 10000;          ///< of waits on the device, and of waits for it
};

/// A CUDA device, which has every part. Throws Error(unsupported) in a build without CUDA, or without such a device.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(const CudaConfig& config);

struct DeviceInfo {
  std::string name;  ///< e.g. "NVIDIA H200"
  size_t memory_bytes = 0;
  int compute_major = 0, compute_minor = 0;
};

/// The major compute capability whose kernels run on CUDA device `ordinal`: its own; or an older one, where this build
/// has no newer code for it (PTX of 8.0 runs on every later device, without what came later); or at most the one in the
/// environment variable KEYHOLE_CUDA_CAPABILITY ("8.0"), with which a newer device takes the ways of an older one, in
/// no more shared memory than that has. "12.0" leaves a device of 9.0 what 12.0 has, too: clusters and launches ahead,
/// 99 KiB of shared memory, and none of the instructions that 9.0 alone has.
/// Throws Error(invalid_argument) for another text there, Error(device_error) where the device has no kernels;
/// Error(unsupported) in a build without CUDA.
[[nodiscard]] int kernels_major(int ordinal);

/// Why no session can run on the device; empty: it can. Kernels need compute capability 8.0 (asynchronous copies to
/// shared memory, bf16 on tensor cores).
[[nodiscard]] std::string unsupported_reason(const DeviceInfo& device);

/// Why sessions of models of this shape do not run on a device; empty: they do. 99 KiB of shared memory, which all
/// devices of compute capability 8.0 or newer have, are enough for every shape.
[[nodiscard]] std::string unsupported_shape(uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim);

/// The GPUs that this build and machine can see; empty without CUDA. Never throws.
[[nodiscard]] std::vector<DeviceInfo> cuda_devices();

/// Bytes of a device's memory that are free now; 0 where there is no such device. Throws nothing.
[[nodiscard]] size_t cuda_free_bytes(int ordinal);

/// Why cuda_devices() is empty, for people: "built without CUDA", "no driver", ...
[[nodiscard]] std::string cuda_status();

}  // namespace keyhole::gpu
