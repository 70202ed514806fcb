#include "tools/commands/bench_step/step_data.h"

#include <algorithm>
#include <cstring>

#include "runtime/files/float16.h"
#include "tools/llama/blas.h"

namespace keyhole::tools {
namespace {

// Rows that a thread turns at once: 128 KiB of fp32 at d = 128 and as much again stay in its cache.
constexpr size_t kTile = 256;

void to_f16(const float* in, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; ++i) out[i] = f32_to_f16(in[i]);
}

}  // namespace

LayerData::LayerData(const HeadSource& source, const StepShape& shape, TurnKind turn, uint64_t seed,
                     uint32_t layer, uint64_t context, Team& team)
    : source_(source), shape_(shape), layer_(layer), context_(context), team_(team) {
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    const uint64_t place = uint64_t{layer} << 32U | (shape.first_kv_head + h);
    key_turns_.emplace_back(turn, shape.head_dim, mixed_seed(seed, place, 1));
    value_turns_.emplace_back(turn, shape.head_dim, mixed_seed(seed, place, 2));
  }
}

uint32_t LayerData::source_head(uint32_t kv_head) const {
  const uint64_t place = uint64_t{layer_} * shape_.all_kv_heads() + shape_.first_kv_head + kv_head;
  return static_cast<uint32_t>(place % source_.heads());
}

void LayerData::turn_training_queries() {
  const size_t d = shape_.head_dim;
  const size_t group = shape_.group();
  const uint32_t positions = source_.training_positions();
  training_.resize(positions * shape_.q_elements());
  const SingleThreadedBlas single(team_.size());
  team_.for_each(size_t{positions} * shape_.kv_heads, [&](size_t item, unsigned) {
    const auto kv_head = static_cast<uint32_t>(item % shape_.kv_heads);
    const auto position = static_cast<uint32_t>(item / shape_.kv_heads);
    thread_local std::vector<float> plain, turned;
    plain.resize(group * d);
    turned.resize(group * d);
    for (uint32_t j = 0; j < group; ++j) {
      source_.training_query(source_head(kv_head), position, j, plain.data() + j * d);
    }
    key_turns_[kv_head].apply(plain.data(), group, turned.data());
    to_f16(turned.data(), group * d,
           training_.data() + position * shape_.q_elements() + kv_head * group * d);
  });
}

void LayerData::rows(uint64_t first, size_t count, uint16_t* k, uint16_t* v) const {
  const size_t d = shape_.head_dim;
  const size_t tiles = (count + kTile - 1) / kTile;
  const SingleThreadedBlas single(team_.size());
  team_.for_each(tiles * shape_.kv_heads * 2, [&](size_t item, unsigned) {
    const bool keys = item % 2 == 0;
    const auto kv_head = static_cast<uint32_t>(item / 2 % shape_.kv_heads);
    const size_t begin = item / 2 / shape_.kv_heads * kTile;
    const size_t n = std::min(kTile, count - begin);
    thread_local std::vector<float> plain, turned;
    plain.resize(kTile * d);
    turned.resize(kTile * d);
    source_.rows(source_head(kv_head), keys ? HeadSource::Part::keys : HeadSource::Part::values,
                 first + begin, n, plain.data());
    (keys ? key_turns_ : value_turns_)[kv_head].apply(plain.data(), n, turned.data());
    uint16_t* out = (keys ? k : v) + begin * shape_.kv_elements() + kv_head * d;
    for (size_t i = 0; i < n; ++i) {
      to_f16(turned.data() + i * d, d, out + i * shape_.kv_elements());
    }
  });
}

bool LayerData::queries(uint64_t first, size_t count, uint16_t* q) {
  const uint64_t positions = source_.training_positions();
  if (positions == 0) return false;
  if (training_.empty()) turn_training_queries();
  const size_t tiles = (count + kTile - 1) / kTile;
  team_.for_each(tiles, [&](size_t tile, unsigned) {
    const size_t end = std::min(count, (tile + 1) * kTile);
    for (size_t i = tile * kTile; i < end; ++i) {
      const uint64_t position = std::min(first + i, context_ - 1) * positions / context_;
      std::memcpy(q + i * shape_.q_elements(), training_.data() + position * shape_.q_elements(),
                  shape_.q_elements() * sizeof(uint16_t));
    }
  });
  return true;
}

void LayerData::step(uint32_t step, uint16_t* token) const {
  const size_t d = shape_.head_dim;
  const uint32_t group = shape_.group();
  std::vector<float> plain(d);
  std::vector<float> turned(d);
  uint16_t* k = token + shape_.q_elements();
  uint16_t* v = k + shape_.kv_elements();
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    const uint32_t from = source_head(h);
    for (uint32_t j = 0; j < group; ++j) {
      source_.step_query(from, step, j, plain.data());
      key_turns_[h].apply(plain.data(), 1, turned.data());
      to_f16(turned.data(), d, token + (size_t{h} * group + j) * d);
    }
    source_.rows(from, HeadSource::Part::keys, context_ + step, 1, plain.data());
    key_turns_[h].apply(plain.data(), 1, turned.data());
    to_f16(turned.data(), d, k + h * d);
    source_.rows(from, HeadSource::Part::values, context_ + step, 1, plain.data());
    value_turns_[h].apply(plain.data(), 1, turned.data());
    to_f16(turned.data(), d, v + h * d);
  }
}

}  // namespace keyhole::tools
