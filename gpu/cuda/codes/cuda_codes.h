// Codes in the memory of a CUDA device: a store that encodes rows, and says where a step finds what it reads. It
// enqueues no step.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "gpu/codes.h"
#include "gpu/cuda/codes/host_rows.h"
#include "gpu/resident.h"

namespace keyhole::gpu {

struct CodesStep;  // gpu/cuda/codes/codes_kernels.h

class CudaCodes final : public Codes {
 public:
  /// Codes in the memory of device `ordinal`. waits: how steps wait for rows that the host reads. resident_tokens:
  /// the most resident tokens of a layer of the session, which steps attend, too. Throws Error: unsupported,
  /// invalid_argument, out_of_device_memory, device_error.
  explicit CudaCodes(const CodesShape& shape, int ordinal = 0, const RowWaits& waits = {},
                     uint32_t resident_tokens = 0);
  ~CudaCodes() override;

  void set_balance(uint32_t layer, uint32_t kv_head, const float* key_scale,
                   float value_scale) override;
  void set_rows(uint32_t layer, const KvView& rows) override;
  void encode(uint32_t layer, uint32_t first, uint32_t count, Stream stream) override;
  void truncate(uint32_t layer, uint32_t blocks, Stream stream) override;
  [[nodiscard]] uint32_t count(uint32_t layer) const override;
  [[nodiscard]] bool takes_lists(uint32_t layer) const override;
  bool make_lists(uint32_t layer, uint32_t begin, uint32_t rows) override;
  void use_lists(uint32_t layer, Stream stream) override;
  void stop_lists(uint32_t layer) override;
  [[nodiscard]] uint32_t made_lists(uint32_t layer) const override;
  [[nodiscard]] uint32_t listed(uint32_t layer) const override;
  void copy_layer(uint32_t layer, Codes& from) override;
  [[nodiscard]] CudaCodes* on_cuda() override { return this; }
  [[nodiscard]] CodedRows coded_rows(uint32_t layer) const override;
  void complete() override;
  uint32_t serve_rows(uint32_t kv_head) override;
  void give_up_rows(uint32_t step) override;
  [[nodiscard]] uint32_t most_tokens(uint32_t layer) const override;
  void read(uint32_t layer, uint32_t kv_head, uint32_t block, std::byte* out) const override;
  [[nodiscard]] size_t bytes() const override;
  [[nodiscard]] CodesDoubts doubts() const override;

  /// Learns of device memory before it is taken, when it may throw Error(out_of_device_memory), and of memory that is
  /// given back.
  struct Account {
    std::function<void(size_t)> claim;
    std::function<void(size_t)> release;
  };
  /// Sets the account. claimed: bytes of the present memory that the account knows of already. In the end all is
  /// released.
  void set_account(Account account, size_t claimed);

  /// What kernels of a step of the layer are told of its codes and rows, with the step's queries, `[tokens, q_heads,
  /// head_dim]`: who enqueues it adds the resident tokens, or their state, and where the answer goes (codes_kernels.h).
  /// tokens: 1..most_tokens().
  [[nodiscard]] CodesStep describe(uint32_t layer, const TensorView& q, uint32_t tokens = 1) const;
  /// Whether these kernels are set up before those in front of them on the stream have ended, see attend_codes().
  [[nodiscard]] bool launches_ahead() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// For the steps of the resident tokens that lie at `place`, which outlive it, and within their session's limit. Throws
/// Error: unsupported (why_no_codes()), invalid_argument (heads, layers or logits that are not theirs),
/// out_of_device_memory (with the bytes needed and there), device_error.
[[nodiscard]] std::unique_ptr<Codes> make_cuda_codes(const ResidentPlace& place,
                                                     const CodesShape& shape);

}  // namespace keyhole::gpu
