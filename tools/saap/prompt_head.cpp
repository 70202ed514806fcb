#include "tools/saap/prompt_head.h"

#include <algorithm>
#include <cmath>

#include "tools/llama/blas.h"
#include "tools/llama/rope.h"
#include "tools/llama/vector_math.h"

namespace keyhole::tools {
namespace {

constexpr size_t kBlockRows = 64;  // queries whose scores with all keys lie in memory at once

RopeScaling scaling_of(const TraceRope& rope) {
  RopeScaling scaling;
  if (rope.scaling == "linear") scaling.kind = RopeScaling::Kind::linear;
  if (rope.scaling == "llama3") scaling.kind = RopeScaling::Kind::llama3;
  scaling.factor = rope.factor;
  scaling.low_freq_factor = rope.low_freq_factor;
  scaling.high_freq_factor = rope.high_freq_factor;
  scaling.original_context = rope.original_context;
  return scaling;
}

// Turns `count` rows `[count, d]` back; row i is of token position(i).
template <class Position>
void undo_rope(const TraceRope& rope, size_t dim, std::vector<float>& rows, Position position) {
  if (rope.theta <= 0) return;
  const Rope turn(static_cast<uint32_t>(dim), rope.theta, scaling_of(rope));
  std::vector<float> cosines(dim / 2);
  std::vector<float> sines(dim / 2);
  for (size_t i = 0; i < rows.size() / dim; ++i) {
    turn.angles(position(i), cosines.data(), sines.data());
    for (float& s : sines) s = -s;
    turn.rotate(rows.data() + i * dim, 1, cosines.data(), sines.data());
  }
}

}  // namespace

std::vector<float> PromptHead::priors(size_t first, size_t n) const {
  const size_t c = sizes.size();
  std::vector<float> out;
  for (size_t i = first; i < first + n; ++i) {
    const auto row = log_sizes.begin() + static_cast<ptrdiff_t>(i / group * c);
    out.insert(out.end(), row, row + static_cast<ptrdiff_t>(c));
  }
  return out;
}

std::vector<float> unroped_keys(const TraceInfo& info, const TraceHead& head, size_t begin,
                                size_t end) {
  const size_t d = info.head_dim;
  std::vector<float> keys = head.keys.to_f32();
  keys.erase(keys.begin() + static_cast<ptrdiff_t>(end * d), keys.end());
  keys.erase(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(begin * d));
  undo_rope(info.rope, d, keys, [&](size_t i) { return static_cast<uint32_t>(begin + i); });
  return keys;
}

PromptHead attend_by_partition(const Trace& trace, const TraceHead& head,
                               const Partitions& partitions, const LongRange& range) {
  const TraceInfo& info = trace.info();
  const size_t d = info.head_dim;
  const size_t n = info.tokens;
  const size_t count = partitions.count();
  PromptHead out;
  out.dim = d;
  out.group = info.group();

  std::vector<uint32_t> positions;
  if (head.training_queries) {
    out.queries = head.training_queries->to_f32();
    positions.assign(trace.training_positions().begin(), trace.training_positions().end());
  }
  const std::vector<float> decode = head.queries.to_f32();
  out.queries.insert(out.queries.end(), decode.begin(), decode.end());
  positions.insert(positions.end(), trace.query_positions().begin(), trace.query_positions().end());

  std::vector<uint32_t> labels;
  {
    const std::vector<float> keys = unroped_keys(info, head, 0, n);
    labels = partition_of(partitions, keys.data(), n);
    out.means.resize(count * d);
    out.sizes.resize(count);
    const size_t end =
        size_t{positions.back()} + 1 - std::min<size_t>(range.window, positions.back());
    for (size_t i = std::min(range.sink, end); i < end; ++i) {
      ++out.sizes[labels[i]];
      for (size_t j = 0; j < d; ++j) out.means[labels[i] * d + j] += keys[i * d + j];
    }
    for (size_t c = 0; c < count; ++c) {
      const float share = 1.0F / static_cast<float>(std::max(out.sizes[c], 1U));
      for (size_t j = 0; j < d; ++j) out.means[c * d + j] *= share;
    }
  }

  out.positions = positions;
  std::vector<uint32_t> seen(count);
  size_t token = range.sink;
  for (const uint32_t position : positions) {
    for (; token + range.window <= position; ++token) ++seen[labels[token]];
    for (const uint32_t keys : seen) {
      out.log_sizes.push_back(keys == 0 ? kLogOfNone : std::log(static_cast<float>(keys)));
    }
  }

  const size_t rows = positions.size() * out.group;
  out.targets.assign(rows * count, 0.0F);
  out.mass.assign(rows, 0.0F);
  const std::vector<float> keys = head.keys.to_f32();
  std::vector<float> scores(kBlockRows * n);
  for (size_t first = 0; first < rows; first += kBlockRows) {
    const size_t block = std::min(kBlockRows, rows - first);
    gemm_nt(block, n, d, out.queries.data() + first * d, d, keys.data(), d, 0, scores.data(), n);
    for (size_t r = 0; r < block; ++r) {
      const size_t row = first + r;
      float* weights = scores.data() + r * n;
      const size_t visible = size_t{positions[row / out.group]} + 1;
      if (visible <= range.sink + range.window) continue;
      for (size_t i = 0; i < visible; ++i) weights[i] *= info.scale;
      if (info.softcap > 0) {
        for (size_t i = 0; i < visible; ++i) {
          weights[i] = info.softcap * std::tanh(weights[i] / info.softcap);
        }
      }
      const float top = *std::max_element(weights, weights + visible);
      for (size_t i = 0; i < visible; ++i) weights[i] -= top;
      exp_in_place(weights, visible);
      double resident = 0;
      double middle = 0;
      const size_t end = visible - range.window;
      for (size_t i = 0; i < range.sink; ++i) resident += weights[i];
      for (size_t i = end; i < visible; ++i) resident += weights[i];
      float* target = out.targets.data() + row * count;
      for (size_t i = range.sink; i < end; ++i) {
        middle += weights[i];
        target[labels[i]] += weights[i];
      }
      if (middle <= 0) continue;
      const auto share = static_cast<float>(1 / middle);
      for (size_t c = 0; c < count; ++c) target[c] *= share;
      out.mass[row] = static_cast<float>(middle / (middle + resident));
    }
  }
  undo_rope(info.rope, d, out.queries, [&](size_t row) { return positions[row / out.group]; });
  return out;
}

}  // namespace keyhole::tools
