// What every (layer, KV head) of a session has to find keys with: its index, the partitions of its
// tail, the sample of queries that guides builds, and its settings. Rows [0, indexed()) of a head
// are in its index; all later rows are pending.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "index/index.h"
#include "index/tail/tail_tree.h"
#include "runtime/build/query_sample.h"
#include "runtime/engine/engine.h"
#include "runtime/plan/checksum_io.h"

namespace keyhole::runtime {

struct HeadIndex {
  std::unique_ptr<index::Index> index;    ///< null: nothing is indexed
  std::unique_ptr<index::TailTree> tail;  ///< of rows [0, tail->count()); null: no partitions
  QuerySample queries;
  HeadParams params;

  [[nodiscard]] uint32_t indexed() const {
    return index == nullptr ? 0 : static_cast<uint32_t>(index->count());
  }
  /// The tree, where it covers what is indexed.
  [[nodiscard]] const index::TailTree* full_tail() const {
    return tail != nullptr && tail->count() == indexed() ? tail.get() : nullptr;
  }
  [[nodiscard]] uint64_t bytes() const {
    return (index == nullptr ? 0 : index->bytes()) + (tail == nullptr ? 0 : tail->bytes());
  }
};

/// An index of a head's rows, and its partitions where they are wanted.
struct BuiltHead {
  std::unique_ptr<index::Index> index;
  std::unique_ptr<index::TailTree> tail;
  std::string warning;  ///< what makes the index a poor one; empty: nothing is known, or was asked
};

/// The heads of all layers.
class HeadIndexes {
 public:
  /// Of `params`: settings of heads, dense_layers, training_queries, tail_partition, sink. Both
  /// outlive it.
  HeadIndexes(const Engine& engine, const SessionParams& params);

  [[nodiscard]] uint32_t layers() const { return layers_; }
  [[nodiscard]] uint32_t kv_heads() const { return kv_heads_; }
  [[nodiscard]] HeadIndex& at(uint32_t layer, uint32_t kv_head) {
    return heads_[size_t{layer} * kv_heads_ + kv_head];
  }
  [[nodiscard]] const HeadIndex& at(uint32_t layer, uint32_t kv_head) const {
    return heads_[size_t{layer} * kv_heads_ + kv_head];
  }
  /// [layer * kv_heads + kv_head]
  [[nodiscard]] std::vector<HeadIndex>& all() { return heads_; }
  [[nodiscard]] const std::vector<HeadIndex>& all() const { return heads_; }

  /// Attended exactly: never indexed.
  [[nodiscard]] bool is_dense(uint32_t layer, uint32_t kv_head) const {
    return params_->is_dense(layer) || at(layer, kv_head).params.dense;
  }

  /// Builds an index over all rows of `kv`, and partitions if `with_tail`, without touching the
  /// head. The query sample must not change meanwhile. Throws what builds throw, Error(cancelled)
  /// among it.
  [[nodiscard]] BuiltHead build(uint32_t layer, uint32_t kv_head, const KvView& kv, bool with_tail,
                                const index::Progress& progress) const;
  [[nodiscard]] std::unique_ptr<index::TailTree> make_tail(uint32_t layer, uint32_t kv_head) const;

  /// Bytes that an index of `rows` rows, or its partitions, will have, about.
  [[nodiscard]] uint64_t estimate_index(uint32_t layer, uint32_t kv_head, uint32_t rows) const;
  [[nodiscard]] uint64_t estimate_tail(uint32_t rows) const;

  /// Of all indexes and partitions: counted by count_bytes(), so that a step reads a number. Call
  /// it when an index or a tree has changed.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  void count_bytes();

  /// A head's query sample, index and partitions; kv: the rows that the sequence has offloaded.
  void save(uint32_t layer, uint32_t kv_head, ChecksumWriter& out) const;
  /// Throws Error(corrupt | io).
  void load(uint32_t layer, uint32_t kv_head, const KvView& kv, ChecksumReader& in);
  void copy(uint32_t layer, uint32_t kv_head, const KvView& kv, const HeadIndex& from);

 private:
  void load_index(uint32_t layer, uint32_t kv_head, const KvView& kv, const std::string& bytes);
  void load_tail(uint32_t layer, uint32_t kv_head, size_t rows, const std::string& bytes);

  const Engine* engine_;
  const SessionParams* params_;
  uint32_t layers_, kv_heads_;
  std::vector<HeadIndex> heads_;
  uint64_t bytes_ = 0;
};

}  // namespace keyhole::runtime
