// Attention of blocks on the device of the tests, as its header says.
#include "tests/runtime/fake_blocked.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "cpu/code_layout.h"
#include "cpu/half.h"
#include "tests/runtime/exact_sums.h"

namespace keyhole::test {

void FakeBlocked::begin(const TensorView& q, const gpu::BlockedLayer& layer, gpu::Stream) {
  const auto n = static_cast<uint32_t>(q.tokens);
  if (n > capacity_) {
    on_call(true);
    capacity_ = n;
  }
  on_call(false);
  *calls += 1;
  n_ = n;
  auto state = std::make_shared<State>();
  state->layer = layer.logits;
  if (layer.sinks != nullptr) state->sinks.assign(layer.sinks, layer.sinks + shape_.q_heads);
  state_ = state;
  push_([this, state, q, n] {
    state->q = read(q);
    state->logits.resize(size_t{n} * shape_.q_heads);
    state->values.resize(state->logits.size());
  });
}

void FakeBlocked::attend(const KvView& rows, gpu::Stream) {
  on_call(false);
  push_([this, state = state_, rows, n = n_] {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      for (uint32_t i = 0; i < rows.keys.tokens; ++i) {
        const std::vector<float> k = row(rows.keys, h, i);
        state->rows.push_back(row(rows.values, h, i));
        for (uint32_t t = 0; t < n; ++t) take(*state, t, h, k, state->rows.back().data());
      }
    }
  });
}

void FakeBlocked::attend_new(const TensorView& k, const TensorView& v, const uint64_t* mask,
                             gpu::Stream) {
  on_call(false);
  std::vector<uint64_t> words;
  if (mask != nullptr) words.assign(mask, mask + n_);
  push_([this, state = state_, k, v, words, n = n_] {
    std::vector<float> keys = read(k), values = read(v);
    for (auto* all : {&keys, &values}) {
      for (float& x : *all) x = rounded(x);
    }
    const uint32_t d = shape_.head_dim;
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      for (uint32_t i = 0; i < n; ++i) {
        const auto* at = keys.data() + (size_t{i} * shape_.kv_heads + h) * d;
        const auto* value = values.data() + (size_t{i} * shape_.kv_heads + h) * d;
        const std::vector<float> key_row(at, at + d);
        state->rows.emplace_back(value, value + d);
        const float* const row = state->rows.back().data();
        for (uint32_t t = i; t < n; ++t) {
          if (words.empty() || (words[t] >> i & 1U) != 0) take(*state, t, h, key_row, row);
        }
      }
    }
  });
}

bool FakeBlocked::attends_codes(const gpu::CodedRows& rows) const {
  return rows.blocks != 0 && rows.dtype == shape_.dtype && rows.kv_heads == shape_.kv_heads;
}

bool FakeBlocked::chooses_codes(const gpu::CodedRows& rows) const {
  return attends_codes(rows) && !*never_chooses && rows.chosen_blocks != 0 &&
         rows.chosen_blocks < rows.blocks;
}

gpu::CodedAttention FakeBlocked::attend_codes(const gpu::CodedRows& rows, gpu::Stream stream,
                                              const std::function<void()>& meanwhile) {
  *coded_calls += 1;
  *chosen_blocks = rows.chosen_blocks;
  wait_();
  if (*refuses_codes) {
    meanwhile();
    return {.refused = true};
  }
  KvView view;
  for (RowsView* part : {&view.keys, &view.values}) {
    part->data = part == &view.keys ? rows.keys : rows.values;
    part->token_stride = shape_.head_dim;
    part->head_stride = static_cast<ptrdiff_t>(rows.kv_head_stride / dtype_size(rows.dtype));
    part->tokens = size_t{rows.blocks} * kCodeBlock;
    part->heads = shape_.kv_heads;
    part->dim = shape_.head_dim;
    part->dtype = rows.dtype;
  }
  const bool doubts = *doubts_codes;
  if (!doubts) attend(view, stream);
  meanwhile();
  wait_();
  if (doubts) attend(view, stream);
  gpu::CodedAttention end{.passes = doubts ? 2U : 1U};
  if (chooses_codes(rows)) {
    end.chosen_blocks = rows.chosen_blocks;
    end.doubted = *doubted;
  }
  return end;
}

void FakeBlocked::finish(const TensorOut& out, float* lse, gpu::Stream) {
  on_call(false);
  push_([this, state = state_, out, lse, n = n_] {
    const uint32_t d = shape_.head_dim;
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        const auto& logits = state->logits[size_t{t} * shape_.q_heads + h];
        const auto& values = state->values[size_t{t} * shape_.q_heads + h];
        const double sink = state->sinks.empty() ? -std::numeric_limits<double>::infinity()
                                                 : double{state->sinks[h]};
        const double top = std::max(sink, *std::max_element(logits.begin(), logits.end()));
        double sum = std::exp(sink - top);
        std::vector<double> o(d);
        for (size_t i = 0; i < logits.size(); ++i) {
          const double w = std::exp(logits[i] - top);
          sum += w;
          add_weighted(o.data(), w, values[i], d);
        }
        for (uint32_t j = 0; j < d; ++j) {
          write(out.row(t, h), out.dtype, j, static_cast<float>(o[j] / sum));
        }
        if (lse != nullptr)
          lse[size_t{t} * shape_.q_heads + h] = static_cast<float>(top + std::log(sum));
      }
    }
  });
}

bool FakeBlocked::saw_bad_queries(gpu::Stream) {
  wait_();
  return std::any_of(state_->q.begin(), state_->q.end(), [](float x) { return !std::isfinite(x); });
}

size_t FakeBlocked::bytes() const {
  return capacity_ == 0 ? 0 : gpu::blocked_bytes(shape_, capacity_);
}

void FakeBlocked::release() {
  wait_();
  capacity_ = 0;
}

float FakeBlocked::element(const void* data, DType dtype, size_t at) {
  switch (dtype) {
    case DType::f16: return cpu::f16_to_f32(static_cast<const uint16_t*>(data)[at]);
    case DType::bf16: return cpu::bf16_to_f32(static_cast<const uint16_t*>(data)[at]);
    case DType::i8: return static_cast<const int8_t*>(data)[at];
    default: return static_cast<const float*>(data)[at];
  }
}

void FakeBlocked::write(std::byte* row, DType dtype, size_t at, float x) {
  switch (dtype) {
    case DType::f16: reinterpret_cast<uint16_t*>(row)[at] = cpu::f32_to_f16(x); break;
    case DType::bf16: reinterpret_cast<uint16_t*>(row)[at] = cpu::f32_to_bf16(x); break;
    default: reinterpret_cast<float*>(row)[at] = x;
  }
}

float FakeBlocked::rounded(float x) const {
  return shape_.dtype == DType::f16 ? cpu::f16_to_f32(cpu::f32_to_f16(x))
                                    : cpu::bf16_to_f32(cpu::f32_to_bf16(x));
}

std::vector<float> FakeBlocked::read(const TensorView& rows) const {
  std::vector<float> x;
  for (uint32_t t = 0; t < rows.tokens; ++t) {
    for (uint32_t h = 0; h < rows.heads; ++h) {
      for (uint32_t j = 0; j < shape_.head_dim; ++j) {
        x.push_back(element(rows.row(t, h), rows.dtype, j));
      }
    }
  }
  return x;
}

std::vector<float> FakeBlocked::row(const RowsView& rows, uint32_t head, uint32_t i) const {
  std::vector<float> x(shape_.head_dim);
  for (uint32_t j = 0; j < shape_.head_dim; ++j) {
    x[j] = element(rows.row(i, head), rows.dtype, j);
    if (rows.dtype == DType::i8) x[j] *= cpu::bf16_to_f32(rows.scales.row(i, head)[j]);
  }
  return x;
}

void FakeBlocked::take(State& state, uint32_t token, uint32_t kv_head, const std::vector<float>& k,
                       const float* v) const {
  const uint32_t group = shape_.q_heads / shape_.kv_heads, d = shape_.head_dim;
  for (uint32_t g = 0; g < group; ++g) {
    const size_t at = size_t{token} * shape_.q_heads + kv_head * group + g;
    const double x = exact_dot(state.q.data() + at * d, k.data(), d) * double{state.layer.scale};
    const double cap = double{state.layer.softcap};
    state.logits[at].push_back(cap > 0 ? cap * std::tanh(x / cap) : x);
    state.values[at].push_back(v);
  }
}

void FakeCopies::read(const void* device, size_t, size_t pitch, size_t rows, gpu::Stream,
                      const Take& take) {
  wait_();
  for (size_t i = 0; i < rows; ++i) take(i, 1, static_cast<const std::byte*>(device) + i * pitch);
}

void FakeCopies::write(const std::byte* data, size_t row_bytes, size_t rows, void* device,
                       size_t pitch, gpu::Stream) {
  wait_();
  for (size_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<std::byte*>(device) + i * pitch, data + i * row_bytes, row_bytes);
  }
}

}  // namespace keyhole::test
