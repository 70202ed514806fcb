#include "runtime/session/code_placement.h"

#include <algorithm>

namespace keyhole::runtime {

CodePlacement::CodePlacement(const Engine& engine, const SessionParams& params, Sequence& sequence,
                             IndexKeeper& keeper, const CodePlacement* copied)
    : engine_(&engine),
      params_(&params),
      sequence_(&sequence),
      keeper_(&keeper),
      rows_(engine, sequence, keeper) {
  if (sequence.resident().stream_steps() == nullptr) return;
  const gpu::Device& device = engine.stream_device();
  codes_ = std::make_unique<DeviceCodes>(
      params, engine.model(),
      [this, &device](const gpu::CodesShape& shape) {
        return device.make_codes(sequence_->resident(), shape);
      },
      device.has(gpu::DevicePart::codes)
          ? DeviceCodes::MakePin([&device] { return device.make_pin(); })
          : nullptr,
      [this](size_t held) { return room(params_->resident_shape(engine_->model()), held); }, rows_,
      engine.log(),
      RowServer::Waits{engine.effective_config().spin_us, engine.effective_config().timeout_ms});
  if (copied != nullptr && copied->codes_ != nullptr) codes_->expect_copy_of(*copied->codes_);
}

uint64_t CodePlacement::room(const gpu::ResidentShape& shape, size_t held) const {
  const SlidingRings& rings = sequence_->rings();
  return engine_->code_room_of(shape, params_->device_memory_limit, held,
                               {rings.device_bytes(), rings.device_bytes_to_come()});
}

CodeRoom CodePlacement::room_of_all() const {
  CodeRoom of_new = engine_->code_room(params_->device_memory_limit);
  if (!of_new || codes_ == nullptr) return of_new;
  return [this](const gpu::ResidentShape& shape) { return room(shape, codes_->bytes()); };
}

void CodePlacement::place() {
  if (codes_ == nullptr) return;
  codes_->plan(keeper_->head_params());
  tell_keeper();
}

void CodePlacement::place_again() noexcept {
  try {
    place();
  } catch (...) {  // NOLINT: see the header
  }
}

void CodePlacement::copy() {
  if (codes_ == nullptr) return;
  codes_->copy();
  tell_keeper();
}

void CodePlacement::tell_keeper() {
  for (uint32_t layer = 0; layer < engine_->model().layers; ++layer) {
    keeper_->set_on_device(layer, codes_->layer_has(layer));
  }
}

uint32_t CodePlacement::pinned_rows(uint32_t layer) const {
  const gpu::Codes* const codes = codes_->of_layer(layer);
  const bool pinned = codes != nullptr && !codes_->rows_by_host();
  if (!pinned) return 0;
  // A fork has codes before its own addresses are pinned, and a truncation of shared rows unpins some that have codes.
  const auto there = static_cast<uint32_t>(codes_->pinned_rows(layer));
  return std::min({codes->count(layer) * kCodeBlock, sequence_->rows(layer), there});
}

}  // namespace keyhole::runtime
