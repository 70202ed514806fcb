#include "tools/llama/aging_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/files/float16.h"

namespace keyhole::tools {

AgingRows::AgingRows(std::shared_ptr<const AgingFormat> format, uint32_t layers, uint32_t aging,
                     uint32_t kv_heads, uint32_t head_dim)
    : format_(std::move(format)),
      aging_(aging),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      layers_(layers) {}

void AgingRows::add(uint32_t layer, const float* k, const float* v, size_t count) {
  Layer& to = layers_[layer];
  const size_t numbers = count * kv_heads_ * head_dim_;
  const auto put = [numbers](std::vector<uint16_t>& rows, const float* from) {
    for (size_t i = 0; i < numbers; ++i) rows.push_back(f32_to_f16(from[i]));
  };
  put(to.k, k);
  put(to.v, v);
  to.tokens += static_cast<uint32_t>(count);
}

bool AgingRows::level() const {
  return std::all_of(layers_.begin(), layers_.end(),
                     [this](const Layer& layer) { return layer.tokens == layers_.front().tokens; });
}

AgingRows::State AgingRows::state(uint32_t tokens) const {
  const AgingLayout& layout = format_->layout();
  return {layout.in_few_bits(KvRows::keys, tokens), layout.in_few_bits(KvRows::values, tokens)};
}

void AgingRows::content(uint32_t layer, uint32_t first, std::vector<float>& k,
                        std::vector<float>& v) const {
  const Layer& from = layers_[layer];
  const size_t row = size_t{kv_heads_} * head_dim_;
  const auto take = [&](const std::vector<uint16_t>& rows, std::vector<float>& out) {
    out.resize((from.tokens - first) * row);
    const size_t skip = (first - from.first) * row;
    for (size_t i = 0; i < out.size(); ++i) out[i] = f16_to_f32(rows[skip + i]);
  };
  take(from.k, k);
  take(from.v, v);
  if (layer >= aging_) return;
  const State now = state(from.tokens);
  round(layer, KvRows::keys, now.keys, first, k);
  round(layer, KvRows::values, now.values, first, v);
}

// `numbers` begin at token `first`, which begins a group of the format or lies in the sink: no group is cut.
void AgingRows::round(uint32_t layer, KvRows rows, TokenRange few, uint32_t first,
                      std::vector<float>& numbers) const {
  const uint32_t begin = std::max(few.begin, first);
  if (begin >= few.end) return;
  const size_t count = few.end - begin, d = head_dim_, row = kv_heads_ * d;
  std::vector<float> head(count * d);
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    float* const all = numbers.data() + (begin - first) * row + h * d;
    for (size_t t = 0; t < count; ++t) std::copy_n(all + t * row, d, head.data() + t * d);
    format_->pass(layer, h, rows, head.data(), count);
    for (size_t t = 0; t < count; ++t) std::copy_n(head.data() + t * d, d, all + t * row);
  }
}

void AgingRows::truncate(uint32_t tokens) {
  for (const Layer& layer : layers_) {
    if (tokens >= layer.tokens || settled(tokens) >= layer.first) continue;
    throw std::runtime_error("a cache whose tokens age keeps its rows from token " +
                             std::to_string(layer.first) + " on: it is to go back to " +
                             std::to_string(tokens) + "; allowed: at most " +
                             std::to_string(kSlack) + " tokens back");
  }
  for (Layer& layer : layers_) {
    if (tokens >= layer.tokens) continue;
    layer.tokens = tokens;
    const size_t left = (layer.tokens - layer.first) * size_t{kv_heads_} * head_dim_;
    layer.k.resize(left);
    layer.v.resize(left);
  }
}

void AgingRows::forget_old() {
  for (Layer& layer : layers_) {
    const uint32_t needed = settled(std::max(settled(layer.tokens), kSlack) - kSlack);
    // Now and then, as what remains is moved.
    if (needed < layer.first + kSlack / 4) continue;
    const auto old = static_cast<ptrdiff_t>((needed - layer.first) * size_t{kv_heads_} * head_dim_);
    layer.k.erase(layer.k.begin(), layer.k.begin() + old);
    layer.v.erase(layer.v.begin(), layer.v.begin() + old);
    layer.first = needed;
  }
}

}  // namespace keyhole::tools
