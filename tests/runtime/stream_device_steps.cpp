// What the steps of the tests' device compute, on the stream's thread.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "cpu/attention.h"
#include "tests/runtime/exact_sums.h"
#include "tests/runtime/stream_device.h"

namespace keyhole::test {

void FakeDevice::read_token(const TensorView& from, uint32_t token, float* to) const {
  const size_t d = shape_.head_dim;
  for (uint32_t h = 0; h < from.heads; ++h) {
    kernels_->to_f32[static_cast<int>(from.dtype)](from.row(token, h), to + h * d, d);
  }
}

void FakeDevice::run_tokens(uint32_t layer, const gpu::ManyTokens& t, FakeCodes& codes) {
  if (faults_->loses_queries) return;
  Layer& l = layers_[layer];
  if (!await_host(l)) note_timeout();
  Rows& rows = l.rows[(l.sequence + 1) % 2];
  const size_t d = shape_.head_dim, q_size = l.o.size();
  const size_t kv_size = size_t{shape_.kv_heads} * d;
  std::vector<float> scratch(kv_size);
  for (uint32_t i = 0; i < t.q.tokens; ++i) {
    read_token(t.q, i, rows.q.data() + i * q_size);
    for (const bool is_key : {true, false}) {
      std::byte* const to = (is_key ? rows.k : rows.v).data() + i * token_bytes();
      read_token(is_key ? t.k : t.v, i, scratch.data());
      kernels_->from_f32[static_cast<int>(shape_.dtype)](scratch.data(), to, kv_size);
    }
    std::vector<std::byte> k(token_bytes() * shape_.window_capacity), v(k.size());
    const std::byte* const key = rows.k.data() + i * token_bytes();
    (void)take_in(device_, layer, key, rows.v.data() + i * token_bytes(), k.data(), v.data());
  }
  l.sequence += 1;
  l.has_codes = true;
  l.published.store(l.sequence, std::memory_order_release);

  const uint32_t n = device_.sink_count(layer) + device_.window_count(layer);
  std::vector<std::byte> stored_k(n * token_bytes()), stored_v(stored_k.size());
  device_.read(layer, stored_k.data(), stored_v.data());
  std::vector<float> k(n * kv_size), v(n * kv_size);
  kernels_->to_f32[static_cast<int>(shape_.dtype)](stored_k.data(), k.data(), k.size());
  kernels_->to_f32[static_cast<int>(shape_.dtype)](stored_v.data(), v.data(), v.size());
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  for (uint32_t i = 0; i < t.q.tokens; ++i) {
    const float* const q = rows.q.data() + i * q_size;
    std::vector<float> o(q_size), lse(shape_.q_heads), coded(q_size), coded_lse(shape_.q_heads);
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      std::vector<double> logits;
      std::vector<const float*> values;
      for (uint32_t token = 0; token < n; ++token) {
        const uint32_t first = n - t.drafts;
        if (token >= first && (t.sees[i] >> (token - first) & 1U) == 0) continue;
        const size_t at = token * kv_size + h / group * d;
        double x = exact_dot(q + h * d, k.data() + at, d);
        const LogitParams& of_layer = shape_.logits_of(layer);
        x *= double{of_layer.scale};
        const double cap = double{of_layer.softcap};
        logits.push_back(cap > 0 ? cap * std::tanh(x / cap) : x);
        values.push_back(v.data() + at);
      }
      const double top = *std::max_element(logits.begin(), logits.end());
      std::vector<double> sums(d);
      double sum = 0;
      for (size_t token = 0; token < logits.size(); ++token) {
        const double w = std::exp(logits[token] - top);
        sum += w;
        add_weighted(sums.data(), w, values[token], d);
      }
      for (uint32_t j = 0; j < d; ++j) o[h * d + j] = static_cast<float>(sums[j] / sum);
      lse[h] = static_cast<float>(top + std::log(sum));
    }
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const size_t at = size_t{h} * group;
      codes.run(layer, h, q + at * d, group, {coded.data() + at * d, coded_lse.data() + at},
                i == 0);
    }
    const std::array<StateView, 2> states{StateView{o.data(), lse.data()},
                                          StateView{coded.data(), coded_lse.data()}};
    std::vector<float> all(q_size), all_lse(shape_.q_heads);
    cpu::merge_states(states, shape_.q_heads, shape_.head_dim, {all.data(), all_lse.data()});
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      kernels_->from_f32[static_cast<int>(t.out.dtype)](all.data() + h * d, t.out.row(i, h), d);
    }
    if (t.lse != nullptr) std::copy(all_lse.begin(), all_lse.end(), t.lse + i * shape_.q_heads);
  }
  l.attended.store(l.sequence, std::memory_order_release);
  merges_.fetch_add(1);
}

void FakeDevice::run_first_half(const Launch& launch) {
  if (faults_->loses_queries) return;
  Layer& l = layers_[launch.layer];
  // The host must have taken in the step before: nothing else keeps a step with codes from running ahead of it.
  if (launch.codes != nullptr && !await_host(l)) note_timeout();
  Rows& rows = l.rows[(l.sequence + 1) % 2];
  const uint32_t d = shape_.head_dim;
  read_token(launch.q, 0, rows.q.data());
  std::vector<float> scratch(d);
  const auto round = [&](const TensorView& from, std::byte* to) {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      kernels_->to_f32[static_cast<int>(from.dtype)](from.row(0, h), scratch.data(), d);
      kernels_->from_f32[static_cast<int>(shape_.dtype)](
          scratch.data(), to + size_t{h} * d * dtype_size(shape_.dtype), d);
    }
  };
  if (launch.appends) {
    round(launch.k, rows.k.data());
    round(launch.v, rows.v.data());
    std::vector<std::byte> k(token_bytes() * shape_.window_capacity), v(k.size());
    (void)take_in(device_, launch.layer, rows.k.data(), rows.v.data(), k.data(), v.data());
  }
  l.sequence += 1;
  l.published.store(l.sequence, std::memory_order_release);
  l.has_codes = launch.codes != nullptr;
  l.keeps_answer = launch.keeps_answer;
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  if (launch.codes != nullptr) {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const size_t at = size_t{h} * group;
      launch.codes->run(launch.layer, h, rows.q.data() + at * d, group,
                        {l.coded_o.data() + at * d, l.coded_lse.data() + at});
    }
  }
  device_.attend_begin(launch.layer, rows.q.data());
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) device_.run_host_task(h);
  l.attended.store(l.sequence, std::memory_order_release);
}

void FakeDevice::wait_idle(uint32_t layer) const {
  const Layer& l = layers_[layer];
  const uint32_t published = l.published.load(std::memory_order_acquire);
  while (!reached(l.attended.load(std::memory_order_acquire), published)) {
    std::this_thread::yield();
  }
}

bool FakeDevice::await_host(const Layer& l) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(faults_->timeout_ms);
  for (const auto& head : l.delivered) {
    while (!reached(head.load(std::memory_order_acquire), l.sequence)) {
      if (l.given_up.load(std::memory_order_acquire) == l.sequence) return true;
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
  }
  return true;
}

void FakeDevice::note_timeout() {
  const std::lock_guard lock(mutex_);
  failure_ = Status::timeout;
  failure_text_ = "the host did not answer";
}

void FakeDevice::run_second_half(uint32_t layer, const TensorOut& out, float* lse) {
  Layer& l = layers_[layer];
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  const uint32_t d = shape_.head_dim;
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(faults_->timeout_ms);
  bool ok = !faults_->loses_queries;
  for (uint32_t h = 0; ok && !l.has_codes && h < shape_.kv_heads; ++h) {
    while (ok && !reached(l.delivered[h].load(std::memory_order_acquire), l.sequence)) {
      if (l.given_up.load(std::memory_order_acquire) == l.sequence) ok = false;
      if (ok && std::chrono::steady_clock::now() > end) {
        ok = false;
        note_timeout();
      }
      std::this_thread::yield();
    }
  }
  std::vector<float> o(l.o.size(), std::nanf("")), sums(l.lse.size(), std::nanf(""));
  for (uint32_t h = 0; ok && h < shape_.kv_heads; ++h) {
    const size_t at = size_t{h} * group;
    const std::array<StateView, 2> states{
        device_.host_state(h), l.has_codes
                                   ? StateView{l.coded_o.data() + at * d, l.coded_lse.data() + at}
                                   : StateView{l.o.data() + at * d, l.lse.data() + at}};
    cpu::merge_states(states, group, d, {o.data() + at * d, sums.data() + at});
  }
  faults_->on_answer(layer, l.sequence, o.data(), sums.data());
  if (l.keeps_answer) {
    l.answers[l.sequence % 2] = {o, sums};
    l.answered.store(l.sequence, std::memory_order_release);
  }
  for (uint32_t h = 0; h < shape_.q_heads; ++h) {
    kernels_->from_f32[static_cast<int>(out.dtype)](o.data() + size_t{h} * d, out.row(0, h), d);
  }
  if (lse != nullptr) std::copy(sums.begin(), sums.end(), lse);
  merges_.fetch_add(1);
}

}  // namespace keyhole::test
