// From what a group search returned to what is attended: the union of the heads' results, each key once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "index/index.h"

namespace keyhole::runtime {

/// One worker's room for searching and attending one KV head. Sized once; steps allocate nothing.
class Selection {
 public:
  /// Makes room for searches of `group` heads and `k` results in an index of this type.
  void prepare(const index::Index& index, uint32_t group, uint32_t k);

  /// Searches only; the result is valid until the next call.
  const index::Hits& search(const index::Index& index, const float* queries, uint32_t group,
                            uint32_t k);

  /// Searches and attends with all heads of the group over the union of their hits: a key that one head
  /// found costs the others nothing but arithmetic, as its row has been loaded for the group.
  /// queries `[group, dim]` fp32.
  struct Cost {
    uint64_t keys_scored = 0;
    uint64_t bytes_read = 0;
    uint32_t keys_attended = 0;
    double search_seconds = 0.0;
    double attend_seconds = 0.0;
  };
  Cost search_and_attend(const index::Index& index, const cpu::Kernels& kernels, const KvView& kv,
                         const float* queries, uint32_t group, uint32_t k,
                         const LogitParams& logits, StateView out);

  /// Of the last search: `[group, k]`, `[group]`.
  [[nodiscard]] const index::Hits& hits() const { return hits_; }
  [[nodiscard]] std::span<const uint32_t> union_ids() const { return {union_.data(), union_size_}; }
  [[nodiscard]] size_t bytes() const;

 private:
  void unite(uint32_t group, uint32_t k);

  std::unique_ptr<index::Scratch> scratch_;
  std::vector<uint32_t> ids_, counts_;
  std::vector<float> scores_;
  index::Hits hits_;
  std::vector<uint32_t> union_;
  size_t union_size_ = 0;
  std::vector<uint64_t> seen_;  ///< open addressing: (generation << 32) | id
  uint32_t generation_ = 0;
  uint32_t room_k_ = 0, room_group_ = 0;
};

}  // namespace keyhole::runtime
