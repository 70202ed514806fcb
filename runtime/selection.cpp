#include "runtime/selection.h"

#include <algorithm>
#include <bit>
#include <chrono>

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

void Selection::prepare(const index::Index& index, uint32_t group, uint32_t k) {
  scratch_ = index.make_scratch(group, k);
  if (group == room_group_ && k == room_k_) return;
  const size_t n = size_t{group} * k;
  ids_.resize(n);
  scores_.resize(n);
  counts_.resize(group);
  union_.resize(n);
  seen_.assign(std::bit_ceil(2 * n), 0);
  generation_ = 0;
  room_group_ = group;
  room_k_ = k;
}

const index::Hits& Selection::search(const index::Index& index, const float* queries,
                                     uint32_t group, uint32_t k) {
  hits_ = {ids_.data(), scores_.data(), counts_.data(), 0, 0};
  index.search(queries, group, k, *scratch_, hits_);
  return hits_;
}

Selection::Cost Selection::search_and_attend(const index::Index& index, const cpu::Kernels& kernels,
                                             const KvView& kv, const float* queries, uint32_t group,
                                             uint32_t k, const LogitParams& logits, StateView out) {
  const auto start = Clock::now();
  (void)search(index, queries, group, k);
  unite(group, k);
  const auto searched = Clock::now();
  cpu::attend_ids(kernels, kv, union_ids(), queries, group, logits, out);

  Cost cost;
  cost.keys_scored = hits_.keys_scored;
  cost.bytes_read = hits_.bytes_read + union_size_ * 2 * kv.keys.dim * dtype_size(kv.keys.dtype);
  cost.keys_attended = static_cast<uint32_t>(union_size_);
  cost.search_seconds = seconds(start, searched);
  cost.attend_seconds = seconds(searched, Clock::now());
  return cost;
}

void Selection::unite(uint32_t group, uint32_t k) {
  // A hash set and not a sort: it is linear, and first come first kept puts the best keys in front.
  if (++generation_ == 0) {
    std::fill(seen_.begin(), seen_.end(), 0);
    generation_ = 1;
  }
  const uint64_t stamp = uint64_t{generation_} << 32;
  const size_t mask = seen_.size() - 1;
  union_size_ = 0;
  for (uint32_t h = 0; h < group; ++h) {
    for (uint32_t i = 0; i < counts_[h]; ++i) {
      const uint32_t id = ids_[size_t{h} * k + i];
      const uint64_t entry = stamp | id;
      size_t slot = (id * 0x9E3779B97F4A7C15ULL >> 32) & mask;
      while (seen_[slot] >> 32 == generation_ && seen_[slot] != entry) slot = (slot + 1) & mask;
      if (seen_[slot] == entry) continue;
      seen_[slot] = entry;
      union_[union_size_++] = id;
    }
  }
}

size_t Selection::bytes() const {
  return (ids_.size() + counts_.size() + union_.size()) * sizeof(uint32_t) +
         scores_.size() * sizeof(float) + seen_.size() * sizeof(uint64_t);
}

}  // namespace keyhole::runtime
