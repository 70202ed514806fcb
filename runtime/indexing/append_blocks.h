// Brings pending tokens into the indexes block by block while steps are made, without keyhole_session_build.
//
// The rows of layer l are cut into rounds of append_block rows, the cuts shifted by l * append_block / layers, so
// that layers take turns. The step that finds rows beyond a cut begins a block: for each head all rows that are
// pending then, but no more than kRoundsPerBlock * append_block, so that no step waits for a whole build where a
// prompt of 128k tokens was never built. The step that finds rows beyond the next cut takes the block in and begins
// the next one. Between the two a background thread works on the block; what it has not done by then, the step does
// on the engine's threads.
//
// A head without an index begins its first one in the same way, once half an append_block of rows is there. From
// fewer rows too little could be learned (the scales of codes, the centres of partitions), and attending them all
// costs less than a search.
//
// Which rows a step finds indexed depends on the calls alone, never on how fast a thread was.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/indexing/background_builder.h"
#include "runtime/indexing/head_indexes.h"
#include "runtime/kv/sequence.h"

namespace keyhole::runtime {

/// Throws Error(out_of_memory) where the session may not take this many more bytes for `what`.
using MemoryCheck = std::function<void(uint64_t bytes, const char* what)>;

class AppendBlocks {
 public:
  /// A block holds at most this many times append_block rows: 8192 by default, about a second of one thread's work.
  static constexpr uint32_t kRoundsPerBlock = 8;

  struct Figures {
    uint64_t blocks = 0;              ///< blocks taken in
    uint64_t waits = 0;               ///< steps that needed a block which was not finished
    double wait_seconds = 0.0;        ///< time that these steps waited
    double background_seconds = 0.0;  ///< time that the thread has worked
  };

  /// Reads append_block, append_mode, dense_layers and mode of `params` (first indexes are begun in
  /// KEYHOLE_MODE_INDEXED alone). All arguments outlive it.
  AppendBlocks(const Engine& engine, const SessionParams& params, const Sequence& sequence,
               HeadIndexes& heads, MemoryCheck check_memory);

  /// Whether advance() would take a block in or begin one.
  [[nodiscard]] bool is_due(uint32_t layer) const;
  /// Takes a block in and begins another, where one is due; every step of the layer calls it first. True: an index
  /// has changed. Throws nothing: a block that fails is logged, its rows stay pending, and a later step tries again.
  bool advance(uint32_t layer);

  /// Ends the block under way without a result.
  void cancel(uint32_t layer) noexcept;
  /// cancel() if the block builds a first index. Called before the query sample or the budget that it was begun with
  /// changes.
  void cancel_first(uint32_t layer) noexcept;
  /// The end of the rows of the block under way; 0: there is none.
  [[nodiscard]] uint32_t block_end(uint32_t layer) const {
    return jobs_[layer] == nullptr ? 0 : jobs_[layer]->rows;
  }

  [[nodiscard]] bool has_first_under_way() const;
  /// The estimated bytes of the blocks under way, for which there must be room when they are taken in.
  [[nodiscard]] uint64_t promised_bytes() const;

  [[nodiscard]] const Figures& figures() const { return figures_; }
  void reset_figures() { figures_ = {}; }
  void take_figures(const AppendBlocks& from) { figures_ = from.figures_; }

  /// Saves which block is under way, so that a copy can begin the same one, to be taken in by the same step.
  void save(uint32_t layer, ChecksumWriter& out) const;
  /// Reads what save() wrote; begin_loaded() then begins that block. Throws Error(corrupt | io).
  void load(uint32_t layer, ChecksumReader& in);
  void begin_loaded();
  void begin_same(const AppendBlocks& from);

 private:
  /// A block before it is begun. end = 0: none.
  struct Block {
    uint32_t end = 0;             ///< no head's part goes beyond this row
    uint32_t round = 0;           ///< in which it was begun
    std::vector<uint32_t> heads;  ///< KV heads that take part
  };

  /// The number of the round that row `rows` of a layer falls into.
  [[nodiscard]] uint32_t round_of(uint32_t layer, uint32_t rows) const;
  /// The number of rows from which on a layer begins first indexes.
  [[nodiscard]] uint32_t first_rows(uint32_t layer) const;
  [[nodiscard]] bool is_refused(uint32_t layer) const {
    return refused_[layer] == round_of(layer, sequence_->rows(layer)) + 1;
  }
  [[nodiscard]] bool wants_first(uint32_t layer, uint32_t kv_head) const;
  [[nodiscard]] bool wants_block(uint32_t layer) const;
  [[nodiscard]] Block next_block(uint32_t layer) const;
  [[nodiscard]] Block block_under_way(uint32_t layer) const;
  /// The end of a head's part of a block up to row `block_end`.
  [[nodiscard]] uint32_t end_of(uint32_t layer, uint32_t kv_head, uint32_t block_end) const;
  [[nodiscard]] bool has_first(uint32_t layer, const Block& block) const;
  /// The estimated bytes of a block: of first indexes, and of what others grow by, with their tails.
  [[nodiscard]] uint64_t estimate(uint32_t layer, const Block& block) const;
  /// Throws Error(out_of_memory) where these may not be taken; no block is begun before the next round then.
  void check_room(uint32_t layer, const Block& block);
  void begin(uint32_t layer, const Block& block);
  [[nodiscard]] AppendJob::Part part_of(uint32_t layer, uint32_t kv_head, uint32_t end) const;
  void take_in(uint32_t layer);
  void take_in_part(uint32_t layer, AppendJob::Part& part);
  void report_wait(uint32_t layer, double seconds);
  void report_failure(uint32_t layer, const char* what);
  void report_unbuilt(uint32_t layer, const Block& block);
  void report_poor(uint32_t layer, const AppendJob& job);

  const Engine* engine_;
  const SessionParams* params_;
  const Sequence* sequence_;
  HeadIndexes* heads_;
  MemoryCheck check_memory_;
  std::vector<std::unique_ptr<AppendJob>> jobs_;  ///< [layer]; null: no block under way
  std::vector<uint32_t>
      refused_;  ///< [layer] round + 1 in which a first index failed, or a block had no room
  std::vector<Block> loaded_;  ///< [layer] until begin_loaded()
  Figures figures_;
  uint64_t failures_ = 0;
  bool told_unbuilt_ = false, told_poor_ = false;
  BackgroundBuilder builder_;  // last: it ends before anything that it reads
};

}  // namespace keyhole::runtime
