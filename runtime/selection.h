// From what a group search came upon to what is attended: the union of the heads' best keys, every key that
// was scored, or those of them that weigh something; each key once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "index/index.h"
#include "keyhole/keyhole.h"
#include "runtime/tail_reader.h"

namespace keyhole::runtime {

/// Parts of the search of one KV head, at most.
inline constexpr uint32_t kMaxParts = 16;

struct SearchParams {
  uint32_t k = 0;  ///< keys wanted per head
  keyhole_attend_mode attend = KEYHOLE_ATTEND_TOPK;
  float min_weight = 0.0F;                      ///< of KEYHOLE_ATTEND_WEIGHT
  uint32_t position = index::kUnknownPosition;  ///< token position of the queries
  uint32_t part = 0;                            ///< of `parts`, see index::SearchArgs
  uint32_t parts = 1;
  TailWork tail{};  ///< its goal's max_rows: beyond what the search finds
};

/// One worker's room for searching and attending one KV head. Sized once; steps allocate nothing.
class Selection {
 public:
  /// An index that will be searched, what will be attended of it, and its tail's partitions.
  struct Use {
    const index::Index* index;
    keyhole_attend_mode attend;
    const index::TailTree* tail = nullptr;
  };
  /// Makes room for searches of `group` heads and `k` results in indexes of these types, up to these sizes, and
  /// drops that for others.
  void prepare(std::span<const Use> uses, uint32_t group, uint32_t k);
  void prepare(const index::Index& index, uint32_t group, uint32_t k, keyhole_attend_mode attend) {
    const Use use{&index, attend};
    prepare({&use, 1}, group, k);
  }
  /// Whether searches in indexes of this type have room.
  [[nodiscard]] bool has_room(const Use& use) const;

  /// Searches only, for the best k; the result is valid until the next call.
  const index::Hits& search(const index::Index& index, const float* queries, uint32_t group,
                            const SearchParams& params);

  struct Cost {
    uint64_t keys_scored = 0;
    uint64_t bytes_read =
        0;  ///< by the search; of the attended rows K and V, or V where K was not needed
    uint32_t keys_attended = 0;
    double search_seconds = 0.0;  ///< until it was known what to attend
    double attend_seconds = 0.0;
    TailCost tail;  ///< its bytes are in bytes_read, its seconds in search_seconds
  };
  /// Searches and attends with all heads of the group over one set of rows: a key that one head found costs
  /// the others nothing but arithmetic, as its row has been loaded for the group. Where scores of the keys
  /// as they are stored are at hand, only values are read.
  /// queries `[group, dim]` fp32. tail: where the state of what was not read goes; written if there is a tree.
  Cost search_and_attend(const index::Index& index, const cpu::Kernels& kernels, const KvView& kv,
                         const float* queries, uint32_t group, const SearchParams& params,
                         const LogitParams& logits, StateView out, StateView tail = {});

  /// The end of a search in parts, each of which has search()ed: hits[p] of part p become the best k, and are
  /// attended. Does not depend on which thread had which part.
  Cost attend_parts(std::span<const index::Hits> hits, const cpu::Kernels& kernels,
                    const KvView& kv, const float* queries, uint32_t group,
                    const SearchParams& params, const LogitParams& logits, StateView out,
                    StateView tail = {});

  /// Of the last search() or search_and_attend() in mode TOPK: `[group, k]`, `[group]`.
  [[nodiscard]] const index::Hits& hits() const { return hits_; }
  /// The distinct rows that the last search_and_attend() attended; valid until the next call.
  [[nodiscard]] std::span<const uint32_t> attended() const { return attended_; }
  [[nodiscard]] size_t bytes() const;

 private:
  /// What searches of one index type need.
  struct Room {
    const index::TypeDecl* type = nullptr;
    std::unique_ptr<index::Scratch> scratch;
    size_t log_bytes = 0;  ///< of the scratch, for what explore() logs
  };
  [[nodiscard]] Room& room(const index::Index& index);

  /// Attends to attended_, and what stands for the rest.
  void attend(const cpu::Kernels& kernels, const KvView& kv, const float* queries, uint32_t group,
              const SearchParams& params, const LogitParams& logits, const index::Scored* scored,
              StateView out, StateView tail, Cost& cost);
  void unite(uint32_t group, uint32_t k);
  void merge(std::span<const index::Hits> parts, uint32_t group, uint32_t k);

  std::vector<Room> rooms_;
  TailReader tail_reader_;
  std::vector<uint32_t> ids_, counts_;
  std::vector<float> scores_;
  index::Hits hits_;
  float coverage_
      [kMaxGroup];  ///< of hits_, where a mean value stands for the rest; negative: not told
  std::vector<uint32_t> union_;
  std::span<const uint32_t> attended_;  ///< in union_, or in the scratch
  std::vector<uint64_t> seen_;          ///< open addressing: (generation << 32) | id
  uint32_t generation_ = 0;
  uint32_t room_k_ = 0, room_group_ = 0;
};

}  // namespace keyhole::runtime
