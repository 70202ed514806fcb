// Keeps the indexes of a session's heads as the sequence grows and shrinks: what is indexed, whole
// builds, blocks in the background, changes of settings. Which keys a step searches it leaves to
// the step.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "runtime/indexing/append_blocks.h"
#include "runtime/indexing/full_build.h"
#include "runtime/indexing/head_indexes.h"

namespace keyhole::runtime {

class IndexKeeper {
 public:
  /// All that it is given outlives it. params: see HeadIndexes and AppendBlocks.
  IndexKeeper(const Engine& engine, const SessionParams& params, const Sequence& sequence,
              MemoryCheck check_memory);

  [[nodiscard]] HeadIndex& head(uint32_t layer, uint32_t kv_head) {
    return heads_.at(layer, kv_head);
  }
  [[nodiscard]] const HeadIndex& head(uint32_t layer, uint32_t kv_head) const {
    return heads_.at(layer, kv_head);
  }
  /// By numbers().
  [[nodiscard]] const std::vector<HeadIndex>& heads() const { return heads_.all(); }
  [[nodiscard]] const HeadNumbers& numbers() const { return heads_.numbers(); }
  /// The settings of heads(), which stay where they are as long as it lives.
  [[nodiscard]] std::vector<const HeadParams*> head_params() const;
  /// Attended exactly: never indexed.
  [[nodiscard]] bool is_dense(uint32_t layer, uint32_t kv_head) const {
    return heads_.is_dense(layer, kv_head);
  }
  /// The device has codes of all the layer's offloaded rows, or no longer: see HeadIndexes.
  void set_on_device(uint32_t layer, bool on_device);
  [[nodiscard]] bool is_on_device(uint32_t layer) const { return heads_.is_on_device(layer); }
  /// Rows of a layer that all its heads have indexed, dense ones left out; 0 if all of them are
  /// dense. All of them where the device has codes.
  [[nodiscard]] uint32_t indexed(uint32_t layer) const;

  /// Takes what the samples want of a prompt's queries `[tokens, q_heads, dim]`, of which token 0 is the one at `position`. A
  /// first index under way is begun anew.
  void sample_queries(uint32_t layer, const RowsIn& q, uint32_t position);
  /// Of the positions, the multiples of this number alone are wanted.
  [[nodiscard]] uint32_t query_stride(uint32_t layer) const;
  /// Forgets those of tokens from `position` on.
  void forget_queries(uint32_t layer, uint32_t position);

  /// Brings all offloaded rows into the indexes, see FullBuild, with `after` before it throws what
  /// went wrong. Throws Error(out_of_memory), and then has changed nothing but that blocks under
  /// way have ended, or what a build throws.
  void build(const BuildProgress& progress, const std::function<void(bool has_first)>& after);

  // Blocks, see AppendBlocks.
  [[nodiscard]] bool append_is_due(uint32_t layer) const { return blocks_.is_due(layer); }
  bool advance_append(uint32_t layer) { return blocks_.advance(layer); }

  /// The sequence is about to keep `tokens` tokens of the layer, `rows` of them offloaded. Where there is no memory to cut
  /// an index or its partitions, the layer's heads lose theirs: all rows are pending, and the log says so.
  void truncate(uint32_t layer, uint32_t rows, uint32_t tokens);

  /// See HeadIndexes.
  const index::Balance& fix_balance(uint32_t layer, uint32_t kv_head, const KvView& rows) {
    return heads_.fix_balance(layer, kv_head, rows);
  }

  /// Drops all indexes; heads are of this (valid) spec from now on, and none is dense by itself. Strong guarantee.
  void set_index(const std::string& spec);
  /// heads()[i] has this budget from now on. True: it is another one.
  bool set_budget(size_t i, const Budget& budget);

  /// What first indexes under way will take, see AppendBlocks.
  [[nodiscard]] uint64_t promised_bytes() const { return blocks_.promised_bytes(); }
  [[nodiscard]] bool has_first_under_way() const { return blocks_.has_first_under_way(); }
  /// Of indexes and partitions; of partitions alone; of query samples.
  [[nodiscard]] uint64_t index_bytes() const { return heads_.bytes(); }
  [[nodiscard]] uint64_t tail_bytes() const;
  [[nodiscard]] uint64_t sample_bytes() const;
  /// Of these, those that copies of the session count, or of which it is one.
  [[nodiscard]] uint64_t bytes_of_others() const;
  [[nodiscard]] double build_seconds() const { return build_seconds_; }
  [[nodiscard]] const AppendBlocks::Figures& append_figures() const { return blocks_.figures(); }
  void reset_figures();

  /// Of each layer the block under way, and of each head its query sample, index and partitions;
  /// settings of heads are not among it.
  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io). The sequence is loaded already. begin_loaded() begins blocks that
  /// were under way: they are taken in by the same steps as those of the session that was saved.
  void load(ChecksumReader& in);
  void begin_loaded() { blocks_.begin_loaded(); }
  /// Becomes a copy of `from`, of whose sequence this one's is a copy. What both have indexed they share.
  void copy_from(const IndexKeeper& from);

 private:
  /// Cuts the indexes and partitions of the layer's heads to `rows` rows.
  void cut(uint32_t layer, uint32_t rows);

  const Engine* engine_;
  const Sequence* sequence_;
  MemoryCheck check_memory_;
  HeadIndexes heads_;
  AppendBlocks blocks_;
  double build_seconds_ = 0.0;
};

}  // namespace keyhole::runtime
