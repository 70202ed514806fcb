// Codes on the device of the tests, as its header says.
#include "tests/runtime/fake_codes.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "cpu/attention_state.h"
#include "cpu/row_access.h"
#include "tests/runtime/exact_sums.h"

namespace keyhole::test {

void FakePinned::add(const std::byte* data, size_t bytes) {
  on_call();
  while (*pause_us_ == kNever) std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (*pause_us_ != 0) std::this_thread::sleep_for(std::chrono::microseconds(*pause_us_));
  const std::lock_guard lock(mutex_);
  if (bytes_ + bytes > *limit_) throw Error(Status::out_of_memory, "planted: too much is locked");
  if (reinterpret_cast<uintptr_t>(data) % gpu::kPinAlignment != 0 ||
      bytes % gpu::kPinAlignment != 0) {
    throw Error(Status::invalid_argument, "planted: not whole pages");
  }
  if (holds(data, 1) || holds(data + bytes - 1, 1)) {
    throw Error(Status::internal, "planted: pinned already");
  }
  // The same pages at addresses that stay with them, as a device's do; one by one, as some may be a copy's own.
  Range& range = ranges_[data];
  range.bytes = bytes;
  for (size_t at = 0; at < bytes; at += gpu::kPinAlignment) {
    void* const page =
        mremap(const_cast<std::byte*>(data) + at, 0, gpu::kPinAlignment, MREMAP_MAYMOVE);
    range.pages.push_back(page == MAP_FAILED ? nullptr : static_cast<std::byte*>(page));
  }
  bytes_ += bytes;
}

void FakePinned::drop(const std::byte* from, const std::byte* to) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto at = ranges_.lower_bound(from);
       at != ranges_.end() && (to == nullptr || at->first < to);) {
    bytes_ -= at->second.bytes;
    for (std::byte* page : at->second.pages) {
      if (page != nullptr) munmap(page, gpu::kPinAlignment);
    }
    at = ranges_.erase(at);
  }
}

size_t FakePinned::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

bool FakePinned::is_pinned(const std::byte* data, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  return holds(data, bytes);
}

bool FakePinned::sees_what_the_host_sees() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [data, range] : ranges_) {
    for (size_t i = 0; i < range.pages.size(); ++i) {
      const std::byte* const page = data + i * gpu::kPinAlignment;
      if (range.pages[i] == nullptr) return false;
      if (std::memcmp(page, range.pages[i], gpu::kPinAlignment) != 0) return false;
    }
  }
  return true;
}

bool FakePinned::holds(const std::byte* data, size_t bytes) const {
  for (const std::byte* end = data + bytes; data < end;) {
    auto at = ranges_.upper_bound(data);
    if (at == ranges_.begin()) return false;
    --at;
    if (at->first + at->second.bytes <= data) return false;
    data = at->first + at->second.bytes;
  }
  return true;
}

FakeCodes::FakeCodes(const gpu::CodesShape& shape, const cpu::Kernels& kernels,
                     std::function<void(std::function<void()>)> push, std::function<void()> wait,
                     const FakePinned* pinned)
    : shape_(shape),
      kernels_(&kernels),
      push_(std::move(push)),
      wait_(std::move(wait)),
      pinned_(pinned),
      layers_(shape.layers),
      heads_(size_t{shape.layers} * shape.kv_heads) {
  for (uint32_t h = 0; h < shape.kv_heads; ++h) requests_.push_back(std::make_unique<Request>());
  if (shape.sinks != nullptr) {
    sinks_.assign(shape.sinks, shape.sinks + size_t{shape.layers} * shape.q_heads);
  }
}

uint32_t FakeCodes::serve_rows(uint32_t kv_head) {
  if (!shape_.rows_by_host) return 0;
  Request& r = *requests_[kv_head];
  const uint32_t step = r.asked.load(std::memory_order_acquire);
  if (step == r.served) return step;
  if (wrong_request) throw Error(Status::invalid_argument, "planted: no such layer");
  if (answer_pause != 0) std::this_thread::sleep_for(std::chrono::microseconds(answer_pause));
  const KvView& own = layers_[r.layer].rows;
  const size_t bytes = shape_.code.dim * dtype_size(shape_.dtype);
  for (size_t i = 0; i < r.rows.size(); ++i) {
    std::memcpy(r.bytes.data() + 2 * i * bytes, own.keys.row(r.rows[i], kv_head), bytes);
    std::memcpy(r.bytes.data() + (2 * i + 1) * bytes, own.values.row(r.rows[i], kv_head), bytes);
  }
  rows_served += static_cast<uint32_t>(r.rows.size());
  r.served = step;
  r.answered.store(step, std::memory_order_release);
  return step;
}

uint32_t FakeCodes::most_tokens(uint32_t) const {
  return gpu::most_step_tokens(shape_.q_heads / shape_.kv_heads);
}

void FakeCodes::set_balance(uint32_t layer, uint32_t kv_head, const float* key_scale,
                            float value_scale) {
  on_call();
  name(layer);
  index::Balance& balance = head(layer, kv_head).balance;
  balance.key_scale.assign(key_scale, key_scale + shape_.code.dim);
  balance.value_scale = value_scale;
}

void FakeCodes::set_rows(uint32_t layer, const KvView& rows) {
  on_call();
  if ((rows.keys.scales.data != nullptr) != (shape_.dtype == DType::i8)) {
    throw Error(Status::invalid_argument, "planted: scales of rows that have none, or none");
  }
  name(layer);
  layers_[layer].rows = rows;
}

void FakeCodes::copy_layer(uint32_t layer, gpu::Codes& from) {
  on_call();
  const auto& other = static_cast<const FakeCodes&>(from);
  other.wait_();
  wait_();
  name(layer);
  if (layers_[layer].wanted != 0) throw Error(Status::invalid_argument, "planted: has blocks");
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    const Head& source = other.heads_[size_t{layer} * shape_.kv_heads + h];
    head(layer, h).balance = source.balance;
    head(layer, h).blocks = source.blocks;
  }
  layers_[layer].wanted = layers_[layer].count = other.layers_[layer].wanted;
  copied_ += layers_[layer].count;
}

gpu::CodedRows FakeCodes::coded_rows(uint32_t layer) const {
  const Layer& l = layers_[layer];
  gpu::CodedRows r;
  if (shape_.rows_by_host || l.wanted == 0) return r;
  r.code = shape_.code;
  r.kv_heads = shape_.kv_heads;
  r.blocks = l.wanted;
  r.keys = r.blocks_at = l.rows.keys.data;
  r.values = l.rows.values.data;
  r.row_bytes = static_cast<uint32_t>(shape_.code.dim * dtype_size(shape_.dtype));
  r.kv_head_stride = l.rows.keys.head_stride * dtype_size(shape_.dtype);
  r.dtype = shape_.dtype;
  return r;
}

void FakeCodes::complete() {
  on_call();
  if (!shape_.blocks_later) throw Error(Status::invalid_argument, "planted: is complete");
  shape_.blocks_later = false;
}

void FakeCodes::encode(uint32_t layer, uint32_t first, uint32_t count, gpu::Stream) {
  on_call();
  if (shape_.blocks_later) throw Error(Status::invalid_argument, "planted: not complete");
  if (!layers_[layer].is_named) throw Error(Status::invalid_argument, "planted: no memory");
  if (first > layers_[layer].wanted || first + count > shape_.blocks) {
    throw Error(Status::invalid_argument, "planted: blocks that do not follow, or beyond capacity");
  }
  check_pinned(layer, first, count);
  push_([this, layer, first, count] {
    check_pinned(layer, first, count);
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      Head& own = head(layer, h);
      const size_t bytes = shape_.code.block_bytes();
      own.blocks.resize(size_t{first + count} * bytes);
      for (uint32_t b = first; b < first + count; ++b) {
        index::encode_block(shape_.code, own.balance, *kernels_,
                            rows(layer, h, size_t{first + count} * kCodeBlock),
                            size_t{b} * kCodeBlock, own.blocks.data() + b * bytes);
      }
    }
    layers_[layer].count = first + count;
  });
  layers_[layer].wanted = first + count;  // where nothing was enqueued, nothing has changed
}

void FakeCodes::truncate(uint32_t layer, uint32_t blocks, gpu::Stream) {
  on_call();
  push_([this, layer, blocks] { layers_[layer].count = blocks; });
  layers_[layer].wanted = blocks;
}

void FakeCodes::read(uint32_t layer, uint32_t kv_head, uint32_t block, std::byte* out) const {
  wait_();
  const size_t bytes = shape_.code.block_bytes();
  std::memcpy(out, heads_[size_t{layer} * shape_.kv_heads + kv_head].blocks.data() + block * bytes,
              bytes);
}

const index::Balance& FakeCodes::balance(uint32_t layer, uint32_t kv_head) const {
  return heads_[size_t{layer} * shape_.kv_heads + kv_head].balance;
}

void FakeCodes::run(uint32_t layer, uint32_t kv_head, const float* q, uint32_t group, StateView out,
                    bool asks) {
  const size_t n = rests_ ? 0 : size_t{layers_[layer].count} * kCodeBlock;
  check_pinned(layer, 0, layers_[layer].count);
  const uint32_t d = shape_.code.dim;
  std::map<size_t, size_t> asked;  // places of rows in what the host hands over
  if (asks && !ask(layer, kv_head, n, asked)) {
    std::fill_n(out.o, size_t{group} * d, std::nanf(""));
    std::fill_n(out.lse, group, std::nanf(""));
    return;
  }
  const size_t row_bytes = d * dtype_size(shape_.dtype);
  const KvView kv = rows(layer, kv_head, n);
  const auto read = [&](const RowsView& from, size_t i, float* to) {
    const auto at = asked.find(i);
    if (at == asked.end()) return cpu::read_row(*kernels_, from, i, to);
    RowsView one = from.slice(i, 1);
    one.data = requests_[kv_head]->bytes.data() + 2 * at->second * row_bytes +
               (from.data == kv.keys.data ? 0 : row_bytes);
    cpu::read_row(*kernels_, one, 0, to);
  };
  const std::vector<float> queries(q, q + size_t{group} * d);
  // Kept from step to step, or most of a step were the kernel's pages for them.
  thread_local std::vector<float> keys, values;
  keys.resize(std::max(keys.size(), n * d));
  values.resize(keys.size());
  for (size_t i = 0; i < n; ++i) {
    read(kv.keys, i, keys.data() + i * d);
    read(kv.values, i, values.data() + i * d);
  }
  const LogitParams& p = shape_.logits_of(layer);
  for (uint32_t g = 0; g < group; ++g) {
    std::vector<double> logits(n), o(d, 0.0);
    double most = -INFINITY, sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
      logits[i] = p.scale * exact_dot(queries.data() + size_t{g} * d, keys.data() + i * d, d);
      if (p.softcap > 0) logits[i] = p.softcap * std::tanh(logits[i] / p.softcap);
      most = std::max(most, logits[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const double w = std::exp(logits[i] - most);
      sum += w;
      add_weighted(o.data(), w, values.data() + i * d, d);
    }
    out.lse[g] = n == 0 ? kMinusInf : static_cast<float>(most + std::log(sum));
    for (uint32_t j = 0; j < d; ++j) {
      out.o[g * d + j] = n == 0 ? 0.0F : static_cast<float>(o[j] / sum);
    }
    if (sinks_.empty()) continue;
    // The state (0, sink), by its definition.
    const double sink = sinks_[(size_t{layer} * shape_.kv_heads + kv_head) * group + g];
    const double weight = out.lse[g] == kMinusInf ? 0.0 : 1.0 / (1.0 + std::exp(sink - out.lse[g]));
    for (uint32_t j = 0; j < d; ++j) {
      out.o[g * d + j] = static_cast<float>(out.o[g * d + j] * weight);
    }
    out.lse[g] = static_cast<float>(weight == 0.0       ? sink
                                    : sink == -INFINITY ? out.lse[g]
                                                        : out.lse[g] - std::log(weight));
  }
}

bool FakeCodes::ask(uint32_t layer, uint32_t kv_head, size_t n, std::map<size_t, size_t>& asked) {
  if (!shape_.rows_by_host || shape_.exact_rows == 0) return true;
  Request& r = *requests_[kv_head];
  const uint32_t step = r.asked.load(std::memory_order_relaxed) + 1;
  r.layer = layer;
  r.rows.clear();
  for (uint32_t i = 0; i < kAsked && n != 0; ++i) r.rows.push_back((i * 97 + step * 31) % n);
  r.bytes.assign(r.rows.size() * 2 * shape_.code.dim * dtype_size(shape_.dtype), std::byte{0x7F});
  for (size_t i = 0; i < r.rows.size(); ++i) asked[r.rows[i]] = i;
  requests += 1;
  r.asked.store(step, std::memory_order_release);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (r.answered.load(std::memory_order_acquire) != step) {
    const uint32_t abandoned = abandoned_.load(std::memory_order_acquire);
    const bool is_late = std::chrono::steady_clock::now() > end;
    if (is_late || (abandoned != 0 && static_cast<int32_t>(abandoned - step) >= 0)) {
      on_failure(is_late ? "planted: the rows have not come" : "planted: the rows were given up");
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

void FakeCodes::check_pinned(uint32_t layer, uint32_t first, uint32_t count) {
  if (shape_.rows_by_host) return;
  const size_t block = kCodeBlock * shape_.code.dim * dtype_size(shape_.dtype);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    const KvView rows = layers_[layer].rows.head(h);
    for (const std::byte* data : {rows.keys.data, rows.values.data}) {
      if (!pinned_->is_pinned(data + first * block, count * block)) unpinned = true;
    }
  }
  const RowScales& scales = layers_[layer].rows.keys.scales;
  if (scales.data == nullptr) return;
  const auto* at = reinterpret_cast<const std::byte*>(scales.data + first * scales.stride);
  if (!pinned_->is_pinned(at, count * scales.stride * sizeof(uint16_t))) unpinned = true;
}

void FakeCodes::name(uint32_t layer) {
  named_ += layers_[layer].is_named ? 0 : 1;
  layers_[layer].is_named = true;
  if (shape_.coded_layers != 0 && named_ > shape_.coded_layers) {
    throw Error(Status::invalid_argument, "planted: more layers than there is memory for");
  }
}

FakeCodes::Head& FakeCodes::head(uint32_t layer, uint32_t kv_head) {
  return heads_[size_t{layer} * shape_.kv_heads + kv_head];
}

KvView FakeCodes::rows(uint32_t layer, uint32_t kv_head, size_t n) const {
  return layers_[layer].rows.head(kv_head).slice(0, n);
}

}  // namespace keyhole::test
