// Which layers of a session have codes of their offloaded rows on the device, decided anew whenever heads, budgets or
// what lies where have changed. On a device without streams no layer has any, and all calls do nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/session/code_rows.h"

namespace keyhole::runtime {

class CodePlacement {
 public:
  /// All that it is given outlives it; the params may change. copied: of the session that copy() comes for; null: none.
  /// Nothing is placed before place().
  CodePlacement(const Engine& engine, const SessionParams& params, Sequence& sequence,
                IndexKeeper& keeper, const CodePlacement* copied);
  CodePlacement(const CodePlacement&) = delete;
  CodePlacement& operator=(const CodePlacement&) = delete;

  /// Null on a device without streams.
  [[nodiscard]] DeviceCodes* codes() { return codes_.get(); }
  /// What a step of the layer attends on the device in place of the offloaded rows; null: the host attends them.
  [[nodiscard]] gpu::Codes* of_step(uint32_t layer) const {
    const bool attends = codes_ != nullptr && params_->mode == KEYHOLE_MODE_INDEXED;
    return attends ? codes_->of_layer(layer) : nullptr;
  }
  /// A step over the codes of a layer is about to be handed to the device.
  void expect_step(uint32_t layer) {
    if (of_step(layer) != nullptr) codes_->expect_step();
  }

  /// Decides anew for the heads as they are; throws what DeviceCodes::plan() throws.
  void place();
  /// place() after a change that failed. Throws nothing: the first error is the one to tell, the next step finds this
  /// one again.
  void place_again() noexcept;
  /// Decides for heads that are not the session's yet.
  void plan(std::span<const HeadParams* const> heads) {
    if (codes_ != nullptr) codes_->plan(heads);
  }
  /// The next place() tries again what the device had no room for.
  void retry() {
    if (codes_ != nullptr) codes_->retry();
  }
  /// Takes over the codes of the session that is copied, whose rows are copied already.
  void copy();

  /// Bytes of device memory for codes where the session holds `held` bytes of them.
  [[nodiscard]] uint64_t room(const gpu::ResidentShape& shape, size_t held) const;
  /// Room for codes where all that there are make way.
  [[nodiscard]] CodeRoom room_of_all() const;
  /// The offloaded rows of a layer, the first ones, that are pinned for the device to read.
  [[nodiscard]] uint32_t pinned_rows(uint32_t layer) const;
  /// Bytes of codes of one row of a layer that has some, K and V of all heads: what a step over all codes reads.
  [[nodiscard]] double row_bytes(uint32_t layer) const { return codes_->code_row_bytes(layer); }
  [[nodiscard]] size_t bytes() const { return codes_ == nullptr ? 0 : codes_->bytes(); }
  [[nodiscard]] size_t bytes_peak() const { return codes_ == nullptr ? 0 : codes_->bytes_peak(); }

 private:
  void tell_keeper();

  const Engine* engine_;
  const SessionParams* params_;
  Sequence* sequence_;
  IndexKeeper* keeper_;
  CodeRows rows_;
  std::unique_ptr<DeviceCodes> codes_;  ///< null: the device has no streams
};

}  // namespace keyhole::runtime
