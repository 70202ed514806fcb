// Which session goes on with which new tokens. llama.cpp says of a batch what each token sees, in cells, and never
// which sequence it is, nor that tokens were removed or copied: all of that is found here, by comparing what a run of
// new tokens sees with what each session holds.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/batch.h"
#include "tools/engines/llama.cpp/cells.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

/// A session, and which tokens it holds, or will hold when the batch under way is done. `tokens` is in the order of the
/// session; the newest ones may not have reached all layers yet.
struct Sequence {
  uint32_t stream = 0;
  std::vector<Token> tokens;
  std::unique_ptr<Session> session;
  /// By how many positions the key of each token is to be turned before the session goes on. Empty: no key is.
  std::vector<int32_t> turns;
  /// It has many tokens that no keyhole_session_build has seen.
  bool unbuilt = false;
  /// Tokens were appended to its list that its session has to be brought.
  bool is_refilled = false;
  /// Number of the last batch that it took part in.
  uint64_t batch = 0;
  /// What a mask shows to whom sees `tokens` and nothing else, see blind_row(); empty: it was not made.
  std::vector<uint16_t> sight;
  /// Behind the last cell of `tokens` that `sight` shows.
  uint32_t sight_end = 0;
  /// Cells::changes() when `sight` was what `tokens` are and all of these lay in their cells.
  uint64_t sighted = 0;
  /// A copy without some of `tokens` has gone on in its place. These are in `alone`: as long as one of them lies in its
  /// cell, somebody may have it.
  bool is_left = false;
  std::vector<Token> alone;
  /// Its first token, and no other, was taken out when its last batch came.
  bool slid = false;
  /// The same number have those of which one has gone on with a copy of another; 0: none has.
  uint64_t family = 0;
  /// It has not gone on since llama.cpp passed over one of its cells when it looked for free ones: it is somebody's.
  bool is_passed_over = false;
};

/// Rows of a batch, and the sequence that goes on with them.
struct Part {
  Sequence* sequence = nullptr;
  /// Tokens that the sequence holds before these.
  uint32_t past = 0;
  uint32_t stream = 0;
  std::vector<uint32_t> rows;
};

class Sequences {
 public:
  /// Whether the caller can bring the token of a cell of a stream.
  using Brings = std::function<bool(uint32_t stream, uint32_t cell)>;
  /// Has the tokens of `count` cells of a stream from `first` on read out of the sessions where find() has them, so
  /// that the caller can bring them.
  using ReadsOut = std::function<void(uint32_t stream, uint32_t first, uint32_t count)>;
  /// `cells` outlives this. Of sessions without use the oldest go where there are more than `most`. `refill`: tokens
  /// that no session holds can be had from llama.cpp's cache; else a batch that needs them is an error, but where
  /// `brings` says of each that it can be had. `reads_out`: of tokens that are in other sessions than the one that goes
  /// on, or behind a gap in it.
  Sequences(Cells& cells, size_t most, bool refill, Brings brings = {}, ReadsOut reads_out = {})
      : cells_(cells),
        most_(most),
        refill_(refill),
        brings_(std::move(brings)),
        reads_out_(std::move(reads_out)) {}

  /// A new batch begins: sequences may be changed again. `rewrites`: whether place() has a rewriter then.
  void begin_batch(bool rewrites) {
    ++batch_;
    rewrites_ = rewrites;
    places_.clear();
  }

  /// A batch's rows of one stream: its mask, as in read_batch(), and the cell that each row fills.
  struct StreamRows {
    uint32_t stream = 0;
    const uint16_t* mask = nullptr;
    std::span<const uint32_t> new_cells;
  };
  /// The quick way of most batches: where all rows of each stream go on with all tokens of one sequence, or of several
  /// one after the other, and no cell has changed since the last batch of these but those of this one, appends the new
  /// tokens to their lists, and returns the parts of each stream. None: nothing has changed, and read_batch() and
  /// place() have to find out.
  ///   row_stride, seen  of each stream, as in read_batch()
  [[nodiscard]] std::optional<std::vector<std::vector<Part>>> go_on(
      std::span<const StreamRows> streams, int64_t row_stride, uint32_t seen);

  /// Finds or makes the sequence of each run of a stream's part of the batch, and appends the new tokens to its list.
  /// Its session is cut to the tokens that are in the run's past; others of them may be missing there, which the caller
  /// appends layer by layer (`past` tokens before the new ones). None: there is no rewriter, and
  /// a run sees all of a sequence but its first token, for the second time in a row, as with a sliding window; nothing
  /// has changed then.
  /// Throws std::runtime_error where `refill` is needed and off.
  ///   rewriter  NULL: the cells have what sessions lack. Else they do not, and sessions out of whose middle tokens
  ///             were removed, or whose keys are to be turned, are rewritten
  [[nodiscard]] std::optional<std::vector<Part>> place(uint32_t stream, const Batch& batch,
                                                       std::span<const uint32_t> new_cells,
                                                       SessionSource& source,
                                                       Rewriter* rewriter = nullptr);

  /// Positions of tokens have changed, by `by` of each cell of each stream, and the cells do not have their keys: the
  /// cells get new numbers, and sequences remember the turns until place() goes on with them.
  void shift(std::span<const int32_t> by);

  /// A token in the list of a sequence.
  struct Place {
    Sequence* sequence = nullptr;
    uint32_t number = 0;
  };
  /// In which session the token of a stream's cell is, between batches or while one is placed; without a sequence where
  /// no session has it, as those that the batch brings.
  [[nodiscard]] Place find(uint32_t stream, uint32_t cell) const;

  /// Forgets those that take part in the batch under way.
  void drop_current();
  /// Forgets all: what the cells hold was changed by others.
  void clear() {
    sequences_.clear();
    places_.clear();
  }

  [[nodiscard]] const std::vector<std::unique_ptr<Sequence>>& all() const { return sequences_; }

 private:
  struct Match {
    Sequence* sequence = nullptr;
    uint32_t length = 0;
    bool in_place = false;
    /// Behind these the run sees all of its past, but not all of the sequence.
    bool gaps = false;
    /// All of the sequence but its first token is seen.
    bool slides = false;
  };
  [[nodiscard]] bool sees(const Run& run, uint32_t stream, const Token& token) const;
  [[nodiscard]] uint32_t common(const Sequence& sequence, uint32_t stream, const Run& run) const;
  [[nodiscard]] bool lacks_beginning(const Sequence& sequence, uint32_t stream,
                                     const Run& run) const;
  [[nodiscard]] bool is_window(uint32_t stream, const Run& run) const;
  [[nodiscard]] Match best(uint32_t stream, const Run& run, uint32_t last_new) const;
  [[nodiscard]] Match with_gaps(uint32_t stream, const Run& run, uint32_t last_new) const;
  Sequence& take(const Match& match, const Run& run, uint32_t stream, SessionSource& source,
                 Rewriter* rewriter);
  void rewrite(Sequence& sequence, const Run& run, uint32_t stream, Rewriter* rewriter) const;
  void leave(Sequence& sequence, const Match& match, const Run& run, uint32_t stream) const;
  void keep_for_copies(size_t number, std::span<const int32_t> by);
  [[nodiscard]] bool is_wanted(const Token& token, uint32_t stream) const;
  [[nodiscard]] bool is_free(const Sequence& sequence, uint32_t stream) const;
  [[nodiscard]] bool is_strict(const Sequence& sequence) const;
  [[nodiscard]] bool loses_nothing(const Sequence& sequence, uint32_t stream, const Run& run) const;
  [[nodiscard]] bool may_turn(const Sequence& sequence, uint32_t stream, const Run& run,
                              uint32_t last_new) const;
  [[nodiscard]] bool is_dead_everywhere(const Sequence& sequence) const;
  [[nodiscard]] bool is_gone(const Sequence& sequence, uint32_t stream) const;
  [[nodiscard]] bool is_dead(const Sequence& sequence, uint32_t stream) const;
  [[nodiscard]] bool is_of_no_use(Sequence& sequence) const;
  [[nodiscard]] bool can_refill(const Match& match, uint32_t stream, const Run& run);
  void refill(Sequence& sequence, const Run& run);
  void drop_useless(uint32_t stream, std::span<const uint32_t> new_cells);
  [[nodiscard]] bool was_passed_over(const Sequence& sequence, uint32_t stream,
                                     std::span<const uint32_t> new_cells) const;
  void look(Sequence& sequence) const;
  [[nodiscard]] bool goes_on_with(const Sequence& sequence, const StreamRows& rows,
                                  int64_t row_stride, uint32_t seen, size_t written) const;

  Cells& cells_;
  size_t most_;
  bool refill_;
  Brings brings_;
  ReadsOut reads_out_;
  bool rewrites_ = false;  // place() has a rewriter in the batch under way, or had one in the last
  uint64_t batch_ = 0;
  uint64_t last_family_ = 0;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  // Where the token of each cell is, when the cells had changed `placed_` times; empty: it was not asked.
  mutable std::vector<Place> places_;
  mutable uint64_t placed_ = 0;
};

}  // namespace keyhole::llama_cpp
