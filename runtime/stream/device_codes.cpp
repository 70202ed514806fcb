#include "runtime/stream/device_codes.h"

#include <algorithm>
#include <string>

#include "gpu/host_pin.h"

namespace keyhole::runtime {
namespace {

// Rows that are pinned together while a decoder appends tokens, 256 KiB an array at d = 128 in 16 bits: a call of the
// driver takes some 10 us, whatever the size.
constexpr size_t kPinnedAhead = 1024;

}  // namespace

DeviceCodes::DeviceCodes(const SessionParams& params, const ModelShape& model, Make make,
                         MakePin make_pin, CodeSource& source, const Log& log)
    : params_(&params),
      model_(model),
      make_(std::move(make)),
      make_pin_(std::move(make_pin)),
      source_(&source),
      log_(log),
      layers_(model.layers) {
  plan_.layers.assign(model.layers, 0);
}

void DeviceCodes::plan(std::span<const HeadParams* const> heads) {
  CodePlan wanted = plan_codes(*params_, model_, heads, specs_);
  if (wanted.any() && source_->row_block() != kCodeBlock) {
    // The session began with another index, and its rows do not fill blocks.
    wanted.layers.assign(model_.layers, 0);
  }
  if (wanted == plan_ || (is_refused_ && wanted == refused_)) return;
  drop();
  if (!wanted.any()) return;
  try {
    make(wanted);
  } catch (const Error& e) {
    if (params_->partitions == KEYHOLE_PLACE_DEVICE) {
      drop();
      throw;
    }
    plan_ = wanted;
    give_up(e.what());
  }
}

void DeviceCodes::give_up(const std::string& why) {
  is_refused_ = true;
  refused_ = plan_;
  drop();
  log_(KEYHOLE_LOG_WARNING, "no codes on the device, the host attends what is offloaded: " + why);
}

void DeviceCodes::make(const CodePlan& plan) {
  const gpu::CodesShape shape = codes_shape(plan, params_->max_tokens, *params_, model_);
  if (!make_ || !make_pin_) throw Error(Status::unsupported, "the device has no codes");
  if (const std::string why = gpu::why_no_codes(shape); !why.empty()) {
    throw Error(Status::unsupported, why);
  }
  const size_t bytes = gpu::codes_bytes(shape);
  const size_t held = gpu::cuda_resident_bytes(params_->resident_shape(model_));
  const size_t limit = params_->device_memory_limit;
  if (limit != 0 && held + bytes > limit) {
    throw Error(Status::out_of_device_memory, "codes on the device need " + std::to_string(bytes) +
                                                  " bytes more than the " + std::to_string(held) +
                                                  " held, device_memory_limit is " +
                                                  std::to_string(limit));
  }
  pin_ = make_pin_();
  codes_ = make_(shape);
  plan_ = plan;
  bytes_peak_ = std::max(bytes_peak_, this->bytes());
  const size_t row_bytes = this->row_bytes();
  for (uint32_t layer = 0; layer < model_.layers; ++layer) {
    if (!layer_has(layer)) continue;
    const KvView first = source_->rows(layer, 0);
    size_t stride = source_->row_capacity() * row_bytes;
    if (model_.kv_heads > 1) {
      stride = static_cast<size_t>(source_->rows(layer, 1).keys.data - first.keys.data);
    }
    codes_->set_rows(layer, first.keys.data, first.values.data, stride, source_->scales(layer));
  }
}

void DeviceCodes::drop() {
  version_ += 1;
  codes_.reset();
  pin_.reset();
  plan_ = {};
  plan_.layers.assign(model_.layers, 0);
  for (uint32_t layer = 0; layer < model_.layers; ++layer) {
    if (layers_[layer].pieces.empty()) continue;
    layers_[layer] = {};
    source_->set_pinned(layer, 0);
  }
}

bool DeviceCodes::is_current(uint32_t layer) const {
  return size_t{codes_->count(layer)} * kCodeBlock == source_->rows(layer, 0).keys.count;
}

void DeviceCodes::update(uint32_t layer, gpu::Stream stream) {
  if (is_current(layer)) return;
  const size_t rows = source_->rows(layer, 0).keys.count;
  pin(layer, rows);
  if (!layers_[layer].has_balance) set_balance(layer);
  const uint32_t first = codes_->count(layer);
  codes_->encode(layer, first, static_cast<uint32_t>(rows / kCodeBlock) - first, stream);
}

void DeviceCodes::pin(uint32_t layer, size_t rows) {
  Layer& l = layers_[layer];
  const size_t begin = l.pinned();
  if (rows <= begin) return;
  const size_t end = std::max(
      rows, std::min(begin + kPinnedAhead, source_->row_capacity() / kCodeBlock * kCodeBlock));
  // Until all of it is known to be pinned, none of it may be given back.
  l.pieces.push_back({begin, end});
  source_->set_pinned(layer, end);
  const size_t row_bytes = this->row_bytes();
  for (uint32_t h = 0; h < model_.kv_heads; ++h) {
    const KvView kv = source_->rows(layer, h);
    for (const std::byte* array : {kv.keys.data, kv.values.data}) {
      pin_->add(array + begin * row_bytes, (end - begin) * row_bytes);
    }
  }
  const size_t from = scale_bytes(layer, begin);
  const size_t to = scale_bytes(layer, end);
  if (from != to) {
    pin_->add(reinterpret_cast<const std::byte*>(source_->scales(layer)) + from, to - from);
  }
}

size_t DeviceCodes::scale_bytes(uint32_t layer, size_t rows) const {
  if (source_->scales(layer) == nullptr) return 0;
  const size_t bytes = rows / kScaleRows * 2 * model_.kv_heads * model_.head_dim * sizeof(uint16_t);
  return (bytes + gpu::kPinAlignment - 1) / gpu::kPinAlignment * gpu::kPinAlignment;
}

void DeviceCodes::set_balance(uint32_t layer) {
  for (uint32_t h = 0; h < model_.kv_heads; ++h) {
    const index::Balance& balance = source_->balance(layer, h);
    codes_->set_balance(layer, h, balance.key_scale.data(), balance.value_scale);
  }
  layers_[layer].has_balance = true;
}

void DeviceCodes::truncate(uint32_t layer, size_t rows, gpu::Stream stream) {
  if (!layer_has(layer)) return;
  const auto blocks = static_cast<uint32_t>(rows / kCodeBlock);
  if (blocks < codes_->count(layer)) codes_->truncate(layer, blocks, stream);
  // With no rows left, the head's balance is learned anew.
  Layer& l = layers_[layer];
  if (rows == 0) l.has_balance = false;
  const size_t pinned = l.pinned();
  while (!l.pieces.empty() && l.pieces.back().begin >= rows) l.pieces.pop_back();
  if (l.pinned() == pinned) return;
  const size_t row_bytes = this->row_bytes();
  for (uint32_t h = 0; h < model_.kv_heads; ++h) {
    const KvView kv = source_->rows(layer, h);
    for (const std::byte* array : {kv.keys.data, kv.values.data}) {
      pin_->drop(array + l.pinned() * row_bytes, array + pinned * row_bytes);
    }
  }
  if (const auto* scales = reinterpret_cast<const std::byte*>(source_->scales(layer))) {
    pin_->drop(scales + scale_bytes(layer, l.pinned()), scales + scale_bytes(layer, pinned));
  }
  source_->set_pinned(layer, l.pinned());
}

}  // namespace keyhole::runtime
