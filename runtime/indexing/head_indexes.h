// What every (layer, KV head) of a session has to find keys with: its index, the partitions of its
// tail, the sample of queries that guides builds, and its settings. Rows [0, indexed()) of a head
// are in its index; all later rows are pending.
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

/// An index of a head's rows, and its partitions where they are wanted.
struct BuiltHead {
  std::unique_ptr<index::Index> index;
  cpu::Shared<index::TailTree> tail;  ///< none: not wanted
  index::Balance balance;             ///< of both: the head's, or the one that it is to take
  std::string warning;  ///< what makes the index a poor one; empty: nothing is known, or was asked
};

struct HeadIndex {
  std::unique_ptr<index::Index> index;  ///< null: nothing is indexed
  cpu::Shared<index::TailTree> tail;    ///< of rows [0, tail->count()); none: no partitions
  QuerySample queries;
  HeadParams params;
  uint32_t first_rows = 0;  ///< of its spec: with fewer there is no index (index::first_rows)
  /// The space in which the head's keys are compared, averaged and rounded. Learned once, with the first index or
  /// code of the head's rows (fix_balance()), and the same for all that comes later, whatever that looks like: what is
  /// saved, appended and cut must agree with what was there. It is the head's, not an index's, so it stays when
  /// another index is chosen, and goes when the head's last row goes.
  std::optional<index::Balance> balance;

  /// Takes a first index in, with its partitions and balance. What stood for no rows is left in `built`.
  void take(BuiltHead&& built) {
    std::swap(index, built.index);
    std::swap(tail, built.tail);
    if (!balance) balance = std::move(built.balance);
  }

  [[nodiscard]] uint32_t indexed() const {
    return index == nullptr ? 0 : static_cast<uint32_t>(index->count());
  }
  /// The tree, where it covers what is indexed.
  [[nodiscard]] const index::TailTree* full_tail() const {
    return tail && tail->count() == indexed() ? tail.get() : nullptr;
  }
  [[nodiscard]] uint64_t bytes() const {
    return (index == nullptr ? 0 : index->bytes()) + (tail ? tail->bytes() : 0);
  }
  /// Of index, tail and query sample, bytes that a copy of the session counts: of what several share, the first that
  /// still has it does.
  [[nodiscard]] uint64_t bytes_of_others() const {
    return (index == nullptr ? 0 : index->bytes_of_others()) + cpu::bytes_of_others(tail) +
           queries.bytes_of_others();
  }
};

/// The heads of all layers.
class HeadIndexes {
 public:
  /// Of `params`: settings of heads, dense_layers, training_queries, tail_partition, sink. Both
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
  /// By numbers().
  [[nodiscard]] std::vector<HeadIndex>& all() { return heads_; }
  [[nodiscard]] const std::vector<HeadIndex>& all() const { return heads_; }

  /// Attended exactly: never indexed.
  [[nodiscard]] bool is_dense(uint32_t layer, uint32_t kv_head) const {
    return params_->is_dense(layer) || at(layer, kv_head).params.dense;
  }
  /// The device has codes of all the layer's rows: its heads have no index here.
  [[nodiscard]] bool is_on_device(uint32_t layer) const { return on_device_[layer] != 0; }
  /// Whether a head of the layer has an index or partitions.
  [[nodiscard]] bool has_index(uint32_t layer) const;
  /// Drops the layer's indexes and partitions.
  void drop(uint32_t layer);
  /// Drops the layer's indexes and partitions if it is.
  void set_on_device(uint32_t layer, bool on_device);
  /// Whether rows of the head enter an index here.
  [[nodiscard]] bool is_indexed_here(uint32_t layer, uint32_t kv_head) const {
    return !is_on_device(layer) && !is_dense(layer, kv_head);
  }

  /// The head's balance; where it has none, first learns it from `rows` (its first rows, at least one) and the query
  /// sample. One thread at a time for each head, and none while a first index of the head is under way. Valid
  /// until the head's last row goes.
  const index::Balance& fix_balance(uint32_t layer, uint32_t kv_head, const KvView& rows);

  /// Builds an index over all rows of `kv`, and partitions if `with_tail`, without touching the
  /// head: in its balance as it is now, `balance`, or one learned here if it has none. The query sample
  /// must not change meanwhile. Throws what builds throw, Error(cancelled) among it.
  [[nodiscard]] BuiltHead build(uint32_t layer, uint32_t kv_head, const KvView& kv,
                                std::optional<index::Balance> balance, bool with_tail,
                                const index::Progress& progress) const;
  /// Logs, once a session, that an index of a head was built without queries.
  void tell_unguided(const HeadIndex& hd);
  /// An empty tree in the given balance.
  [[nodiscard]] index::TailTree make_tail(uint32_t layer, uint32_t kv_head,
                                          const index::Balance& balance) const;

  /// Bytes that an index of `rows` rows, or its partitions, will have, about.
  [[nodiscard]] uint64_t estimate_index(uint32_t layer, uint32_t kv_head, uint32_t rows) const;
  [[nodiscard]] uint64_t estimate_tail(uint32_t layer, uint32_t rows) const;

  /// Of all indexes and partitions: counted by count_bytes(), so that a step reads a number. Call
  /// it when an index or a tree has changed.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  void count_bytes();

  /// Query samples, balances, indexes and partitions of a layer's heads.
  void save(uint32_t layer, ChecksumWriter& out) const;
  /// Throws Error(corrupt | io). kv: the rows that the sequence has offloaded, of every head; `tokens` of the layer.
  void load(uint32_t layer, std::span<const KvView> kv, uint32_t tokens, ChecksumReader& in);
  /// Shares what the head `from` has, whose rows `kv` is a copy of, until one of the two changes it.
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
