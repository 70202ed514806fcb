// Keeps the indexes of a session's heads as the sequence grows and shrinks: it knows what is indexed, and does whole
// builds, blocks in the background and changes of settings. Which keys a step searches is the step's business.
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
  /// All arguments outlive it. params: see HeadIndexes and AppendBlocks.
  IndexKeeper(const Engine& engine, const SessionParams& params, const Sequence& sequence,
              MemoryCheck check_memory);

  [[nodiscard]] HeadIndex& head(uint32_t layer, uint32_t kv_head) {
    return heads_.at(layer, kv_head);
  }
  [[nodiscard]] const HeadIndex& head(uint32_t layer, uint32_t kv_head) const {
    return heads_.at(layer, kv_head);
  }
  /// The heads in the order of numbers().
  [[nodiscard]] const std::vector<HeadIndex>& heads() const { return heads_.all(); }
  [[nodiscard]] const HeadNumbers& numbers() const { return heads_.numbers(); }
  /// The settings of heads(), which stay where they are as long as the keeper lives.
  [[nodiscard]] std::vector<const HeadParams*> head_params() const;
  /// Whether the head is attended exactly and never indexed.
  [[nodiscard]] bool is_dense(uint32_t layer, uint32_t kv_head) const {
    return heads_.is_dense(layer, kv_head);
  }
  /// Says whether the device has codes of all the layer's offloaded rows, see HeadIndexes.
  void set_on_device(uint32_t layer, bool on_device);
  [[nodiscard]] bool is_on_device(uint32_t layer) const { return heads_.is_on_device(layer); }
  /// Number of rows of a layer that all its heads have indexed. Dense heads do not count; 0 if all are dense. All
  /// rows where the device has codes.
  [[nodiscard]] uint32_t indexed(uint32_t layer) const;

  /// Takes a sample of a prompt's queries `[tokens, q_heads, dim]`, which are those of the prompt's tokens that `of`
  /// says; token 0 of the prompt is the one at `position`. A first index under way is begun anew.
  void sample_queries(uint32_t layer, const TensorView& q, const TokenSample& of,
                      uint32_t position);
  /// The stride of the sample: only positions that are multiples of it are wanted.
  [[nodiscard]] uint32_t query_stride(uint32_t layer) const;
  /// Takes the sample of the same head of another keeper, see QuerySample::take_moved(). A first index under way is
  /// begun anew.
  template <class Turn>
  void take_moved_queries(uint32_t layer, uint32_t kv_head, const QuerySample& from, uint32_t first,
                          uint32_t count, const Turn& turn) {
    blocks_.cancel_first(layer);
    head(layer, kv_head).queries.take_moved(from, first, count, turn);
  }
  /// Forgets the sampled queries of tokens from `position` on.
  void forget_queries(uint32_t layer, uint32_t position);

  /// Brings all offloaded rows into the indexes, see FullBuild; calls `after` before it throws what went wrong.
  /// Throws Error(out_of_memory), when nothing has changed except that blocks under way have ended, or what a build
  /// throws.
  void build(const BuildProgress& progress, const std::function<void(bool has_first)>& after);

  // Blocks, see AppendBlocks.
  [[nodiscard]] bool append_is_due(uint32_t layer) const { return blocks_.is_due(layer); }
  bool advance_append(uint32_t layer) { return blocks_.advance(layer); }

  /// Cuts the indexes before the sequence keeps only `tokens` tokens of the layer, `rows` of them offloaded. Where
  /// there is no memory to cut an index or its partitions, the layer's heads lose theirs: all rows are pending then,
  /// and the log says so.
  void truncate(uint32_t layer, uint32_t rows, uint32_t tokens);

  /// See HeadIndexes::fix_balance().
  const index::Balance& fix_balance(uint32_t layer, uint32_t kv_head, const KvView& rows) {
    return heads_.fix_balance(layer, kv_head, rows);
  }

  /// Drops all indexes and gives all heads this (valid) spec; none is dense by itself any more. Strong guarantee.
  void set_index(const std::string& spec);
  /// Gives heads()[i] this budget. True: it differs from the one before.
  bool set_budget(size_t i, const Budget& budget);

  /// The estimated bytes of first indexes under way, see AppendBlocks.
  [[nodiscard]] uint64_t promised_bytes() const { return blocks_.promised_bytes(); }
  [[nodiscard]] bool has_first_under_way() const { return blocks_.has_first_under_way(); }
  /// Bytes of indexes and partitions; below: of partitions alone, and of query samples.
  [[nodiscard]] uint64_t index_bytes() const { return heads_.bytes(); }
  [[nodiscard]] uint64_t tail_bytes() const;
  [[nodiscard]] uint64_t sample_bytes() const;
  /// The part of these that copies of the session count, or the session that this is a copy of.
  [[nodiscard]] uint64_t bytes_of_others() const;
  [[nodiscard]] double build_seconds() const { return build_seconds_; }
  [[nodiscard]] const AppendBlocks::Figures& append_figures() const { return blocks_.figures(); }
  void reset_figures();
  /// What `from` has counted so far goes on here.
  void take_figures(const IndexKeeper& from) {
    build_seconds_ = from.build_seconds_;
    blocks_.take_figures(from.blocks_);
  }

  /// Saves the block under way of each layer, and the query sample, index and partitions of each head; settings of
  /// heads are saved elsewhere.
  void save(ChecksumWriter& out) const;
  /// Reads what save() wrote; the sequence is loaded already. begin_loaded() begins blocks that were under way, to be
  /// taken in by the same steps as in the session that was saved. Throws Error(corrupt | io).
  void load(ChecksumReader& in);
  void begin_loaded() { blocks_.begin_loaded(); }
  /// Becomes a copy of `from`, of whose sequence this one's is a copy. Both share what is indexed.
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
