// Steps of sliding layers: the device attends all of it and nobody serves them, so that a step counts when it is
// enqueued or announced.
#include <algorithm>
#include <iterator>
#include <string>

#include "runtime/stream/device_rows.h"
#include "runtime/stream/stream_runner.h"

namespace keyhole::runtime {

void StreamRunner::enqueue_window(uint32_t layer, const TensorView& q, const TensorView* k,
                                  const TensorView* v, const gpu::SeenDrafts& drafts,
                                  const TensorOut* out, float* lse) {
  const uint32_t appends = k != nullptr ? 1 : 0;
  check_no_open_step();
  note_window_failure();
  failure_.rethrow();
  const uint64_t id = capture_of_step();
  if (id == 0) check_tokens(layer, appends, 0);
  gpu::Windows& windows = windows_->on_device(layer);
  if (id != 0) {
    prepare_capture(id, layer);
    captures_.newest().add({.layer = layer, .appends = appends});
  } else {
    windows_->move_to_device(layer);
  }
  launch(id != 0, [&] {
    const uint32_t place = windows_->number_on_device(layer);
    if (out == nullptr) {
      windows.begin(place, q, k, v, stream_);
    } else {
      windows.step(place, q, k, v, drafts, *out, lse, stream_);
    }
  });
  if (id == 0) note_window_step(layer, appends);
  if (out != nullptr) return;
  is_open_ = true;
  open_layer_ = layer;
  open_capture_ = id;
}

void StreamRunner::note_window_step(uint32_t layer, uint32_t appends) {
  windows_->note_appended(layer, appends);
  window_steps_ += 1;
}

void StreamRunner::note_window_failure() {
  if (windows_ == nullptr) return;
  std::string text;
  const Status status = windows_->failure(text);
  if (status != Status::ok) failure_.set(status, text);
}

void StreamRunner::place_windows(std::span<const StreamStep> steps) {
  for (const StreamStep& step : steps) {
    if (model_.slides(step.layer)) windows_->move_to_device(step.layer);
  }
}

void StreamRunner::keep_newest(KeptTokens tokens) {
  check_no_open_step();
  check_not_capturing();
  note_window_failure();
  failure_.rethrow();
  KeptTokens sliding{{}, tokens.of, tokens.kept};
  const auto slides = [&](uint32_t layer) { return model_.slides(layer); };
  std::copy_if(tokens.layers.begin(), tokens.layers.end(), std::back_inserter(sliding.layers),
               slides);
  std::erase_if(tokens.layers, slides);
  if (!sliding.layers.empty()) keep_newest_of_windows(sliding);
  if (tokens.layers.empty()) return;
  StreamStep step;
  step.coded = true;  // light
  step.keeps = std::make_shared<const KeptTokens>(std::move(tokens));
  const KeptTokens& k = *step.keeps;
  launch(false, [&] { steps_->keep_newest(k.layers, k.of, k.kept, stream_); });
  const uint32_t ticket = server_.submit(step);
  for (const uint32_t layer : k.layers) tickets_[layer] = ticket;
  knows_held_ = false;  // counts are others now
}

void StreamRunner::keep_newest_of_windows(const KeptTokens& tokens) {
  std::vector<uint32_t> places;
  for (const uint32_t layer : tokens.layers) places.push_back(windows_->number_on_device(layer));
  gpu::Windows& windows = windows_->on_device(tokens.layers.front());
  launch(false, [&] { windows.keep_newest(places, tokens.of, tokens.kept, stream_); });
  const auto dropped = tokens.of - static_cast<uint32_t>(tokens.kept.size());
  for (const uint32_t layer : tokens.layers) windows_->note_dropped(layer, dropped);
}

}  // namespace keyhole::runtime
