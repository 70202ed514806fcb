// Attention of listed blocks on the device of the tests, as its header says.
#include "tests/runtime/fake_listed.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/half.h"
#include "gpu/listed_layout.h"

namespace keyhole::test {

void FakeListed::attend(const gpu::ListedTurn& turn, std::span<const gpu::PromptPattern> patterns,
                        gpu::Stream) {
  uint32_t rows = turn.n;
  for (const gpu::KvRows& r : turn.before) rows += r.count;
  const size_t bytes = gpu::ListedLayout(shape_, turn.n, rows, true).bytes;
  if (bytes > bytes_) {
    on_call(true);
    bytes_ = bytes;
  }
  on_call(false);
  *calls += 1;
  *places += turn.before.size();
  std::vector<gpu::KvRows> before(turn.before.begin(), turn.before.end());
  std::vector<gpu::PromptPattern> some(patterns.begin(), patterns.end());
  std::vector<float> sinks;
  const float* const from = turn.layer.sinks;
  if (from != nullptr) sinks.assign(from, from + shape_.q_heads);
  push_([this, turn, rows, before, some, sinks] {
    const std::vector<float> q = read(turn.q, turn.n, shape_.q_heads);
    saw_bad_ = !std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); });
    std::vector<float> keys = read(turn.k, turn.n, shape_.kv_heads),
                       values = read(turn.v, turn.n, shape_.kv_heads);
    cpu::PromptPiece p;
    p.q = rows_of(turn.q);
    p.out = rows_of(turn.out);
    p.lse = turn.lse;
    p.sinks = sinks.empty() ? nullptr : sinks.data();
    p.n = turn.n;
    p.rows = rows;
    p.q_heads = shape_.q_heads;
    p.kv_heads = shape_.kv_heads;
    p.head_dim = shape_.head_dim;
    p.logits = turn.layer.logits;
    const size_t row = shape_.head_dim * sizeof(float);
    for (const bool is_value : {false, true}) {
      cpu::RowRuns& runs = is_value ? p.v : p.k;
      for (const gpu::KvRows& r : before) add(runs, r, is_value);
      std::vector<float>& own = is_value ? values : keys;
      for (float& x : own) x = rounded(x);
      runs.add(turn.n,
               {reinterpret_cast<std::byte*>(own.data()), shape_.kv_heads * row, row, DType::f32});
    }
    prompt_.attend(p, some);
  });
}

bool FakeListed::saw_bad_queries(gpu::Stream) {
  wait_();
  return saw_bad_;
}

gpu::PromptBlocks FakeListed::blocks() const {
  wait_();
  return prompt_.blocks();
}

void FakeListed::release() {
  wait_();
  bytes_ = 0;
}

cpu::TokenRows FakeListed::rows_of(const gpu::DeviceTokens& t) {
  const size_t element = dtype_size(t.dtype);
  return {static_cast<std::byte*>(t.data), t.token_stride * element, t.head_stride * element,
          t.dtype};
}

std::vector<float> FakeListed::read(const gpu::DeviceTokens& t, uint32_t n, uint32_t heads) const {
  const uint32_t d = shape_.head_dim;
  std::vector<float> x(size_t{n} * heads * d);
  const cpu::RowRuns runs(rows_of(t));
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t h = 0; h < heads; ++h)
      runs.read(*kernels_, i, h, 0, d, x.data() + (size_t{i} * heads + h) * d);
  }
  return x;
}

void FakeListed::add(cpu::RowRuns& runs, const gpu::KvRows& r, bool is_value) const {
  const size_t d = shape_.head_dim;
  cpu::HeadScales scales;
  if (r.dtype == DType::i8) {
    scales = {{r.scales + (is_value ? d : 0), shape_.kv_heads * 2 * d, 0}, 2 * d};
  }
  std::byte* const data = const_cast<std::byte*>(is_value ? r.values : r.keys);
  runs.add(r.count, {data, d * dtype_size(r.dtype), r.head_stride, r.dtype}, scales);
}

float FakeListed::rounded(float x) const {
  return shape_.dtype == DType::f16 ? cpu::f16_to_f32(cpu::f32_to_f16(x))
                                    : cpu::bf16_to_f32(cpu::f32_to_bf16(x));
}

}  // namespace keyhole::test
