// All that a (layer, KV head) of a session has to find keys with: its index, the partitions of its tail, the sample
// of queries that guides builds, and its settings. Rows [0, indexed()) of a head are in its index; all later rows are
// pending.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/shared.h"
#include "index/index.h"
#include "index/scan/balance.h"
#include "index/tail/tail_tree.h"
#include "runtime/engine/engine.h"
#include "runtime/indexing/query_sample.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

/// A new index of a head's rows, with partitions where they are wanted.
struct BuiltHead {
  std::unique_ptr<index::Index> index;
  cpu::Shared<index::TailTree> tail;  ///< none: not wanted
  index::Balance balance;             ///< of both: the head's own, or one that it is to take
  /// Why the index is a poor one; empty: nothing is known, or nobody asked.
  std::string warning;
};

struct HeadIndex {
  std::unique_ptr<index::Index> index;  ///< null: nothing is indexed
  cpu::Shared<index::TailTree> tail;    ///< of rows [0, tail->count()); none: no partitions
  QuerySample queries;
  HeadParams params;
  uint32_t first_rows = 0;  ///< of its spec: with fewer rows there is no index (index::first_rows)
  /// The space in which the head's keys are compared, averaged and rounded. It is learned once, with the first index
  /// or code of the head's rows (fix_balance()), and kept for all later rows whatever they look like, because saved,
  /// appended and cut rows must agree with earlier ones. It belongs to the head, not to an index: it stays when
  /// another index is chosen, and goes when the head's last row goes.
  std::optional<index::Balance> balance;

  /// Takes a first index in, with its partitions and balance. `built` gets what they replace, which has no rows.
  void take(BuiltHead&& built) {
    std::swap(index, built.index);
    std::swap(tail, built.tail);
    if (!balance) balance = std::move(built.balance);
  }

  [[nodiscard]] uint32_t indexed() const {
    return index == nullptr ? 0 : static_cast<uint32_t>(index->count());
  }
  /// The tree, if it covers all indexed rows; else null.
  [[nodiscard]] const index::TailTree* full_tail() const {
    return tail && tail->count() == indexed() ? tail.get() : nullptr;
  }
  [[nodiscard]] uint64_t bytes() const {
    return (index == nullptr ? 0 : index->bytes()) + (tail ? tail->bytes() : 0);
  }
  /// Bytes of index, tail and query sample that a copy of the session counts: shared memory is counted by the first
  /// of its holders.
  [[nodiscard]] uint64_t bytes_of_others() const {
    return (index == nullptr ? 0 : index->bytes_of_others()) + cpu::bytes_of_others(tail) +
           queries.bytes_of_others();
  }
};

/// The heads of all layers.
class HeadIndexes {
 public:
  /// Reads settings of heads, dense_layers, training_queries, tail_partition and sink of `params`. Both arguments
  /// outlive it.
  HeadIndexes(const Engine& engine, const SessionParams& params);

  [[nodiscard]] uint32_t layers() const { return layers_; }
  [[nodiscard]] uint32_t kv_heads(uint32_t layer) const { return numbers_.of(layer); }
  [[nodiscard]] const HeadNumbers& numbers() const { return numbers_; }
  [[nodiscard]] HeadIndex& at(uint32_t layer, uint32_t kv_head) {
    return heads_[numbers_.at(layer, kv_head)];
  }
  [[nodiscard]] const HeadIndex& at(uint32_t layer, uint32_t kv_head) const {
    return heads_[numbers_.at(layer, kv_head)];
  }
  /// The heads in the order of numbers().
  [[nodiscard]] std::vector<HeadIndex>& all() { return heads_; }
  [[nodiscard]] const std::vector<HeadIndex>& all() const { return heads_; }

  /// Whether the head is attended exactly and never indexed.
  [[nodiscard]] bool is_dense(uint32_t layer, uint32_t kv_head) const {
    return params_->is_dense(layer) || at(layer, kv_head).params.dense;
  }
  /// Whether the device has codes of all the layer's rows: then its heads have no index here.
  [[nodiscard]] bool is_on_device(uint32_t layer) const { return on_device_[layer] != 0; }
  /// Whether a head of the layer has an index or partitions.
  [[nodiscard]] bool has_index(uint32_t layer) const;
  /// Drops the layer's indexes and partitions.
  void drop(uint32_t layer);
  /// Says whether the device has codes of the layer; if it has, drops the layer's indexes and partitions.
  void set_on_device(uint32_t layer, bool on_device);
  /// Whether rows of the head enter an index here.
  [[nodiscard]] bool is_indexed_here(uint32_t layer, uint32_t kv_head) const {
    return !is_on_device(layer) && !is_dense(layer, kv_head);
  }

  /// Returns the head's balance; where it has none, first learns it from `rows` (its first rows, at least one) and
  /// the query sample. For each head one thread at a time, and none while a first index of the head is under way.
  /// Valid until the head's last row goes.
  const index::Balance& fix_balance(uint32_t layer, uint32_t kv_head, const KvView& rows);

  /// Builds an index over all rows of `kv`, and partitions if `with_tail`, without touching the head. It uses the
  /// head's balance as it is now, `balance`, or learns one if there is none. The query sample must not change
  /// meanwhile. Throws what builds throw, Error(cancelled) among it.
  [[nodiscard]] BuiltHead build(uint32_t layer, uint32_t kv_head, const KvView& kv,
                                std::optional<index::Balance> balance, bool with_tail,
                                const index::Progress& progress) const;
  /// Logs, once a session, that an index of a head was built without queries.
  void tell_unguided(const HeadIndex& hd);
  /// Makes an empty tree in the given balance.
  [[nodiscard]] index::TailTree make_tail(uint32_t layer, uint32_t kv_head,
                                          const index::Balance& balance) const;

  /// About how many bytes an index of `rows` rows, or its partitions, will have.
  [[nodiscard]] uint64_t estimate_index(uint32_t layer, uint32_t kv_head, uint32_t rows) const;
  [[nodiscard]] uint64_t estimate_tail(uint32_t layer, uint32_t rows) const;

  /// Bytes of all indexes and partitions as count_bytes() found them, so that a step only reads a number. Call
  /// count_bytes() when an index or a tree has changed.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  void count_bytes();

  /// Saves query samples, balances, indexes and partitions of a layer's heads.
  void save(uint32_t layer, ChecksumWriter& out) const;
  /// Reads what save() wrote. kv: the rows that the sequence has offloaded, of every head; `tokens`: those of the
  /// layer. Throws Error(corrupt | io).
  void load(uint32_t layer, std::span<const KvView> kv, uint32_t tokens, ChecksumReader& in);
  /// Shares what the head `from` has until one of the two changes it. `kv` is a copy of its rows.
  void copy(uint32_t layer, uint32_t kv_head, const KvView& kv, const HeadIndex& from);

 private:
  void save_sample(const HeadIndex& hd, ChecksumWriter& out) const;
  void load_sample(uint32_t layer, uint32_t kv_head, const KvView& kv, uint32_t tokens,
                   ChecksumReader& in);
  [[nodiscard]] index::Balance learn(const HeadIndex& hd, const KvView& rows) const;
  void load_index(uint32_t layer, uint32_t kv_head, const KvView& kv,
                  std::span<const std::byte> bytes);
  void load_tail(uint32_t layer, uint32_t kv_head, size_t rows, std::span<const std::byte> bytes);

  const Engine* engine_;
  const SessionParams* params_;
  uint32_t layers_;
  HeadNumbers numbers_;
  std::vector<HeadIndex> heads_;
  std::vector<char> on_device_;  ///< [layer]
  uint64_t bytes_ = 0;
  bool told_unguided_ = false;
};

}  // namespace keyhole::runtime
