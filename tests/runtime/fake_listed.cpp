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
  for (const KvView& r : turn.before) rows += static_cast<uint32_t>(r.keys.tokens);
  const size_t bytes = gpu::ListedLayout(shape_, turn.n, rows, true).bytes;
  if (bytes > bytes_) {
    on_call(true);
    bytes_ = bytes;
  }
  on_call(false);
  *calls += 1;
  *places += turn.before.size();
  std::vector<KvView> before(turn.before.begin(), turn.before.end());
  std::vector<gpu::PromptPattern> some(patterns.begin(), patterns.end());
  std::vector<float> sinks;
  const float* const from = turn.layer.sinks;
  if (from != nullptr) sinks.assign(from, from + shape_.q_heads);
  push_([this, turn, rows, before, some, sinks] {
    const std::vector<float> q = read(turn.q);
    saw_bad_ = !std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); });
    std::vector<float> keys = read(turn.k), values = read(turn.v);
    cpu::PromptPiece p;
    p.q = turn.q;
    p.out = turn.out;
    p.lse = turn.lse;
    p.sinks = sinks.empty() ? nullptr : sinks.data();
    p.n = turn.n;
    p.rows = rows;
    p.q_heads = shape_.q_heads;
    p.kv_heads = shape_.kv_heads;
    p.head_dim = shape_.head_dim;
    p.logits = turn.layer.logits;
    for (const bool is_value : {false, true}) {
      cpu::RowRuns& runs = is_value ? p.v : p.k;
      for (const KvView& r : before) runs.add(is_value ? r.values : r.keys);
      std::vector<float>& own = is_value ? values : keys;
      for (float& x : own) x = rounded(x);
      runs.add({dense_tensor(reinterpret_cast<const std::byte*>(own.data()), turn.n,
                             shape_.kv_heads, shape_.head_dim, DType::f32)});
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

std::vector<float> FakeListed::read(const TensorView& t) const {
  const uint32_t d = shape_.head_dim;
  std::vector<float> x;
  for (uint32_t i = 0; i < t.tokens; ++i) {
    for (uint32_t h = 0; h < t.heads; ++h) {
      x.resize(x.size() + d);
      kernels_->to_f32[static_cast<size_t>(t.dtype)](t.row(i, h), x.data() + x.size() - d, d);
    }
  }
  return x;
}

float FakeListed::rounded(float x) const {
  return shape_.dtype == DType::f16 ? cpu::f16_to_f32(cpu::f32_to_f16(x))
                                    : cpu::bf16_to_f32(cpu::f32_to_bf16(x));
}

}  // namespace keyhole::test
