// Sessions whose tokens lie nowhere else, when tokens are removed from the middle, positions are shifted, and states
// are saved and restored: beside a model of llama.cpp's memory, which knows of each cell whose token it has, and at
// which position.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/batch.h"
#include "tools/engines/llama.cpp/cells.h"
#include "tools/engines/llama.cpp/read_back.h"
#include "tools/engines/llama.cpp/sequences.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {
namespace {

constexpr uint32_t kRoom = 96;  // cells of a stream
constexpr int kTalks = 3;       // sequences

/// A token that is told apart from all others, and the position to which its key is turned.
using Placed = std::pair<int, int>;

/// A session that holds such tokens.
class Listed final : public Session {
 public:
  [[nodiscard]] uint32_t tokens(uint32_t /*layer*/) const override {
    return static_cast<uint32_t>(held.size());
  }
  void attend(uint32_t, const Rows&, const Rows&, const Rows&, const Rows&) override {}
  void append(uint32_t, const Rows&, const Rows&) override {}
  void truncate(uint32_t n) override { held.resize(std::min<size_t>(held.size(), n)); }
  /// A row of keys is the token, and its position, that of values its negative.
  void read(uint32_t, uint32_t first, const Rows& k, const Rows& v) override {
    for (const Rows* rows : {&k, &v}) {
      auto* out = static_cast<int16_t*>(const_cast<void*>(rows->data));
      for (int64_t i = 0; i < rows->tokens; ++i) {
        const Placed& token = held.at(first + static_cast<size_t>(i));
        const int sign = rows == &k ? 1 : -1;
        *out++ = static_cast<int16_t>(sign * token.first);
        *out++ = static_cast<int16_t>(sign * token.second);
      }
    }
  }
  void build() override {}
  [[nodiscard]] std::unique_ptr<Session> fork() override {
    auto copy = std::make_unique<Listed>();
    copy->held = held;
    return copy;
  }
  [[nodiscard]] std::string describe() const override { return ""; }
  std::vector<Placed> held;
};

class Lists final : public SessionSource, public Rewriter {
 public:
  [[nodiscard]] std::unique_ptr<Session> make() override { return std::make_unique<Listed>(); }
  void rewrite(Session& session, const Rewriting& change) override {
    std::vector<Placed>& held = static_cast<Listed&>(session).held;
    std::vector<Placed> now(held.begin(), held.begin() + change.first);
    for (size_t i = 0; i < change.kept.size(); ++i) {
      if (change.kept[i] < change.first) throw std::runtime_error("a first token is kept again");
      const Placed& token = held.at(change.kept[i]);
      now.emplace_back(token.first, token.second + change.turns.at(i));
    }
    rewritten += static_cast<int>(change.kept.size());
    held = std::move(now);
  }
  void turn(uint32_t /*layer*/, const Rows& keys, std::span<const int32_t> by) override {
    auto* out = static_cast<int16_t*>(const_cast<void*>(keys.data));
    for (size_t i = 0; i < by.size(); ++i)
      out[2 * i + 1] = static_cast<int16_t>(out[2 * i + 1] + by[i]);
  }
  int rewritten = 0;
};

class Memory {
 public:
  /// Of one stream, or of one for each sequence. `refill`: sessions were filled from cells, as on a card, and are alone
  /// now.
  explicit Memory(bool unified, bool refill = false)
      : unified_(unified),
        rooms_(unified ? 1 : kTalks, std::vector<Cell>(kRoom)),
        cells_(static_cast<uint32_t>(rooms_.size()), kRoom),
        sequences(
            cells_, 64, refill,
            [this](uint32_t stream, uint32_t cell) {
              return restored_.count(stream * kRoom + cell) != 0;
            },
            [this](uint32_t stream, uint32_t first, uint32_t count) {
              for (uint32_t j = first; j < first + count; ++j) {
                restored_[stream * kRoom + j] = in_session(stream, j);
                read_out_.insert(stream * kRoom + j);
              }
            }) {}

  [[nodiscard]] int next(int s) const {
    int last = -1;
    for (const Cell& cell : room(s)) {
      if (cell.owners.count(s) != 0) last = std::max(last, cell.position);
    }
    return last + 1;
  }
  [[nodiscard]] size_t free(int s) const {
    return static_cast<size_t>(std::count_if(room(s).begin(), room(s).end(),
                                             [](const Cell& c) { return c.owners.empty(); }));
  }
  /// A batch of `n` new tokens. Their session has to hold what the mask shows, each at its position.
  void extend(int s, int n) {
    std::vector<uint32_t> fresh;
    const int at = next(s);
    for (uint32_t j = 0; j < kRoom && fresh.size() < static_cast<size_t>(n); ++j) {
      Cell& cell = room(s)[j];
      if (!cell.owners.empty()) continue;
      cell = {{s}, at + static_cast<int>(fresh.size()), ++last_};
      cells_.write(stream(s), j);
      restored_.erase(stream(s) * kRoom + j);
      fresh.push_back(j);
    }
    ASSERT_EQ(fresh.size(), static_cast<size_t>(n));
    std::vector<uint16_t> mask(fresh.size() * kRoom, 0xFC00);
    std::vector<Placed> past;
    for (uint32_t j = 0; j < kRoom; ++j) {
      const Cell& cell = room(s)[j];
      if (cell.owners.count(s) == 0) continue;
      if (cell.position < at) past.emplace_back(cell.token, cell.position);
      for (size_t i = 0; i < fresh.size(); ++i) {
        if (cell.position <= at + static_cast<int>(i)) mask[i * kRoom + j] = 0;
      }
    }
    sequences.begin_batch(true);
    const Sequences::StreamRows rows{stream(s), mask.data(), fresh};
    const auto quick = sequences.go_on({&rows, 1}, kRoom, kRoom);
    std::optional<Part> part;
    if (quick) {
      part = quick->front().front();
    } else {
      const Batch batch = read_batch(mask.data(), kRoom, kRoom, fresh);
      auto parts = sequences.place(stream(s), batch, fresh, lists, &lists);
      if (!parts) throw std::runtime_error("a window");
      ASSERT_EQ(parts->size(), 1U);
      part = (*parts)[0];
    }
    std::vector<Placed>& held = static_cast<Listed&>(*part->sequence->session).held;
    EXPECT_EQ(part->past, past.size());
    while (held.size() < part->past) {
      held.push_back(restored_.at(stream(s) * kRoom + part->sequence->tokens[held.size()].cell));
    }
    std::vector<Placed> sorted = held;
    std::sort(sorted.begin(), sorted.end());
    std::sort(past.begin(), past.end());
    ASSERT_EQ(sorted, past) << "sequence " << s;
    for (const uint32_t j : fresh) held.emplace_back(room(s)[j].token, room(s)[j].position);
    for (const uint32_t id : read_out_) restored_.erase(id);
    read_outs += static_cast<int>(read_out_.size());
    read_out_.clear();
  }
  void remove(int s, int from, int to) {
    for (Cell& cell : room(s)) {
      if (cell.position >= from && cell.position < to) cell.owners.erase(s);
    }
  }
  /// shift(), but not where others have these tokens.
  void shift_own(int s, int keep, int n) {
    for (const Cell& cell : room(s)) {
      if (cell.owners.count(s) != 0 && cell.owners.size() > 1 && cell.position >= keep) return;
    }
    shift(s, keep, n);
  }
  /// Removes `n` tokens behind the first `keep`, and lets those behind take their places: of others that have these,
  /// too.
  void shift(int s, int keep, int n) {
    remove(s, keep, keep + n);
    std::vector<int32_t> by(rooms_.size() * kRoom, 0);
    for (uint32_t j = 0; j < kRoom; ++j) {
      Cell& cell = room(s)[j];
      if (cell.owners.count(s) == 0 || cell.position < keep + n) continue;
      cell.position -= n;
      by[size_t{stream(s)} * kRoom + j] = -n;
      const auto found = restored_.find(stream(s) * kRoom + j);
      if (found != restored_.end()) found->second.second -= n;
    }
    sequences.shift(by);
  }
  /// What is saved of a sequence, of keys and of values, cell by cell.
  void save(int s) {
    for (uint32_t j = 0; j < kRoom; ++j) {
      const Cell& cell = room(s)[j];
      if (cell.owners.count(s) == 0 || restored_.count(stream(s) * kRoom + j) != 0) continue;
      ASSERT_EQ(-in_session(stream(s), j, true).first, cell.token)
          << "cell " << j << " of sequence " << s;
      ASSERT_EQ(in_session(stream(s), j), Placed(cell.token, cell.position))
          << "cell " << j << " of sequence " << s;
    }
  }
  /// save(), and the other sequence becomes what was saved.
  void restore(int s, int to) {
    save(s);
    std::vector<Cell> saved;
    for (const Cell& cell : room(s)) {
      if (cell.owners.count(s) != 0) saved.push_back(cell);
    }
    remove(to, 0, 1 << 20);
    if (free(to) < saved.size()) return;
    uint32_t j = 0;
    for (const Cell& cell : saved) {
      while (!room(to)[j].owners.empty()) ++j;
      room(to)[j] = {{to}, cell.position, cell.token};
      cells_.write(stream(to), j);
      restored_[stream(to) * kRoom + j] = {cell.token, cell.position};
    }
  }
  /// The sequence's tokens from a position on lie in its cells as if these had been filled from outside.
  void replace_by_restored(int s, int from) {
    for (uint32_t j = 0; j < kRoom; ++j) {
      const Cell& cell = room(s)[j];
      if (cell.owners.count(s) == 0 || cell.position < from) continue;
      cells_.write(stream(s), j);
      restored_[stream(s) * kRoom + j] = {cell.token, cell.position};
    }
  }
  /// All tokens of a sequence become another's, behind its `at` tokens.
  void give(int from, int to, int at) {
    std::vector<int32_t> by(rooms_.size() * kRoom, 0);
    for (uint32_t j = 0; j < kRoom; ++j) {
      Cell& cell = room(from)[j];
      if (cell.owners.count(from) == 0) continue;
      cell.owners = {to};
      cell.position += at;
      by[size_t{stream(from)} * kRoom + j] = at;
    }
    sequences.shift(by);
  }
  void copy(int from, int to) {
    remove(to, 0, 1 << 20);
    if (unified_) {
      for (Cell& cell : room(from)) {
        if (cell.owners.count(from) != 0) cell.owners.insert(to);
      }
      return;
    }
    room(to) = room(from);
    for (Cell& cell : room(to)) {
      if (cell.owners.erase(from) != 0) cell.owners.insert(to);
    }
    cells_.copy_stream(stream(from), stream(to));
    for (uint32_t j = 0; j < kRoom; ++j) {
      restored_.erase(stream(to) * kRoom + j);
      const auto found = restored_.find(stream(from) * kRoom + j);
      if (found != restored_.end()) restored_[stream(to) * kRoom + j] = found->second;
    }
  }

 private:
  struct Cell {
    std::set<int> owners;
    int position = 0;
    int token = 0;
  };
  [[nodiscard]] Placed in_session(uint32_t stream, uint32_t cell, bool values = false) {
    int16_t row[2] = {};
    read_back(sequences, &lists, {0, values, Number::kF16, 1, 2}, stream, cell, 1,
              reinterpret_cast<std::byte*>(row));
    return {row[0], row[1]};
  }
  [[nodiscard]] uint32_t stream(int s) const { return unified_ ? 0 : static_cast<uint32_t>(s); }
  std::vector<Cell>& room(int s) { return rooms_[stream(s)]; }
  [[nodiscard]] const std::vector<Cell>& room(int s) const { return rooms_[stream(s)]; }

  bool unified_;
  std::vector<std::vector<Cell>> rooms_;
  Cells cells_;
  // Of cells that were filled from outside, for good, and of those that a batch had read out, which its session has
  // then.
  std::map<uint32_t, Placed> restored_;
  std::set<uint32_t> read_out_;
  int last_ = 0;

 public:
  Sequences sequences;
  Lists lists;
  int read_outs = 0;  // cells
};

TEST(LlamaCppRewriting, WhatLeftTheMiddleIsTakenOutOfTheSession) {
  Memory memory(true);
  memory.extend(0, 10);
  memory.remove(0, 2, 4);
  memory.extend(0, 1);
  EXPECT_EQ(memory.lists.rewritten, 6);
  // Of the two cells one is filled again. In the other's somebody may have the token still: it stays.
  EXPECT_EQ(memory.sequences.all().size(), 2U);
}

TEST(LlamaCppRewriting, ACopyKeepsWhatLeftTheMiddle) {
  Memory memory(true);
  memory.extend(0, 10);
  memory.copy(0, 1);
  memory.remove(0, 2, 4);
  memory.extend(0, 1);
  memory.extend(1, 1);
  EXPECT_EQ(memory.lists.rewritten, 6);
}

TEST(LlamaCppRewriting, AContextShiftNeedsNoSecondSession) {
  for (const int keep : {0, 3}) {
    Memory memory(true);
    memory.extend(0, 20);
    memory.shift(0, keep, 8);
    memory.extend(0, 1);
    EXPECT_EQ(memory.lists.rewritten, 12 - keep);
    EXPECT_EQ(memory.sequences.all().size(), 1U);
    memory.extend(0, 1);
    EXPECT_EQ(memory.lists.rewritten, 12 - keep);
  }
}

TEST(LlamaCppRewriting, TwoShiftsAddUp) {
  Memory memory(true);
  memory.extend(0, 20);
  memory.shift(0, 1, 4);
  memory.shift(0, 2, 5);
  memory.extend(0, 2);
  EXPECT_EQ(memory.lists.rewritten, 10);
}

// Cells that two sequences share have one position, and what one of them removes is the other's still. Nothing tells of
// a copy that has not gone on, but that its cells were passed over.
TEST(LlamaCppRewriting, AShiftedCopyThatNeverWentOnLeavesTheOtherItsTokens) {
  for (const bool refill : {false, true}) {
    for (const int keep : {0, 3}) {
      Memory memory(true, refill);
      memory.extend(0, 20);
      memory.copy(0, 1);
      memory.shift(1, keep, 8);
      memory.extend(1, 1);
      memory.save(0);
      memory.extend(0, 1);
      memory.save(1);
      memory.extend(1, 1);
    }
  }
}

// Of a copy's own tokens, which its shift has turned, none is the other's, whose next token lies below them.
TEST(LlamaCppRewriting, WhatAShiftHasTurnedIsSomebodys) {
  for (const bool refill : {false, true}) {
    Memory memory(true, refill);
    memory.extend(0, 4);
    memory.extend(1, 10);
    memory.copy(1, 2);
    memory.extend(2, 5);
    memory.remove(0, 0, 1 << 20);
    memory.shift(2, 1, 3);
    memory.extend(1, 1);
    memory.save(2);
    memory.extend(2, 1);
    memory.save(1);
    memory.extend(1, 1);
  }
}

TEST(LlamaCppRewriting, WhatACopyCutsOffIsTheOthersBehindACellThatWasFilledAgain) {
  for (const bool refill : {false, true}) {
    Memory memory(true, refill);
    memory.extend(0, 10);
    memory.copy(0, 1);
    memory.extend(0, 5);
    memory.extend(1, 1);
    memory.copy(0, 2);
    memory.remove(0, 10, 1 << 20);
    memory.remove(2, 10, 11);
    memory.extend(1, 1);
    memory.extend(0, 1);
    memory.save(2);
    memory.extend(2, 1);
  }
}

// Between a shift and its next batch others may take the cells that it gave up, its first one among them.
TEST(LlamaCppRewriting, AShiftedSequenceOutlivesItsFirstToken) {
  Memory memory(true);
  memory.extend(0, 20);
  memory.extend(1, 4);
  memory.shift(0, 0, 8);
  memory.extend(1, 6);
  memory.extend(0, 1);
  EXPECT_EQ(memory.lists.rewritten, 12);
}

// First tokens that are removed where they are leave their cells to others.
TEST(LlamaCppRewriting, FirstTokensThatLeaveTakeNoSessionAlong) {
  for (const int gone : {1, 3}) {
    Memory memory(true);
    memory.extend(0, 12);
    memory.extend(1, 4);
    memory.remove(0, 0, gone);
    memory.extend(1, gone);
    memory.extend(0, 1);
    EXPECT_EQ(memory.lists.rewritten, 12 - gone);
    EXPECT_EQ(memory.sequences.all().size(), 2U);
    memory.extend(0, 1);
    EXPECT_EQ(memory.lists.rewritten, 12 - gone);
  }
}

// More first tokens than those whose cells, filled again, are the sign of a sequence that is gone.
TEST(LlamaCppRewriting, ManyFirstTokensThatLeaveTakeNoSessionAlongWhereThereIsRoom) {
  Memory memory(true);
  memory.extend(0, 50);
  memory.extend(1, 4);
  memory.remove(0, 0, 34);
  memory.extend(1, 34);
  memory.extend(0, 1);
  EXPECT_EQ(memory.lists.rewritten, 16);
}

TEST(LlamaCppRewriting, ASequenceWhoseCellsArePassedOverIsSomebodys) {
  Memory memory(true);
  memory.extend(0, 60);
  memory.extend(1, 4);
  memory.remove(0, 0, 34);
  memory.extend(1, 36);  // both sequences have had more tokens than there are cells
  memory.extend(1, 1);
  EXPECT_EQ(memory.sequences.all().size(), 2U);
  memory.extend(0, 1);
  EXPECT_EQ(memory.lists.rewritten, 26);
}

TEST(LlamaCppRewriting, ASequenceThatWasRemovedGoesWhenAPromptTakesItsCells) {
  Memory memory(true);
  memory.extend(0, 80);
  memory.remove(0, 0, 1 << 20);
  memory.extend(1, 40);
  EXPECT_EQ(memory.sequences.all().size(), 1U);
}

TEST(LlamaCppRewriting, ARemovedSequenceGoesWithTheStepsThatTakeItsCells) {
  Memory memory(true);
  memory.extend(0, 80);
  memory.remove(0, 0, 1 << 20);
  for (int i = 0; i < 40; ++i) memory.extend(1, 1);
  EXPECT_EQ(memory.sequences.all().size(), 1U);
}

// A window in a cache as large as others' loses a token with every step.
TEST(LlamaCppRewriting, FirstTokensThatLeaveOneByOneAreAWindow) {
  Memory memory(true);
  memory.extend(0, 12);
  memory.remove(0, 0, 1);
  memory.extend(0, 1);
  memory.remove(0, 0, 2);
  EXPECT_THROW(memory.extend(0, 1), std::runtime_error);
}

TEST(LlamaCppRewriting, WhatACopyGoesOnWithoutIsKeptWhileItLiesInACell) {
  Memory memory(true);
  memory.extend(0, 10);
  memory.remove(0, 2, 5);
  memory.extend(0, 1);
  EXPECT_EQ(memory.sequences.all().size(), 2U);
  memory.extend(0, 1);
  EXPECT_EQ(memory.sequences.all().size(), 2U);
  memory.extend(0, 1);  // the last of the three cells
  EXPECT_EQ(memory.sequences.all().size(), 1U);
  EXPECT_EQ(memory.lists.rewritten, 5);
}

TEST(LlamaCppRewriting, WhatACopyGoesOnWithoutIsTurnedWithTheOthers) {
  Memory memory(true);
  memory.extend(0, 10);
  memory.copy(0, 1);
  memory.remove(1, 4, 8);
  memory.extend(1, 1);
  memory.remove(1, 0, 1 << 20);
  memory.shift(0, 1, 2);
  memory.extend(2, 1);
  memory.extend(0, 1);  // with what `alone` has kept
}

TEST(LlamaCppRewriting, InAStreamOfItsOwnNobodyElseHasWhatLeft) {
  Memory memory(false);
  memory.extend(0, 10);
  memory.remove(0, 2, 5);
  memory.extend(0, 1);
  EXPECT_EQ(memory.sequences.all().size(), 1U);
  memory.remove(0, 6, 1 << 20);
  memory.extend(0, 2);
  EXPECT_EQ(memory.sequences.all().size(), 1U);
}

TEST(LlamaCppRewriting, ACopyInAnotherStreamOutlivesItsSource) {
  Memory memory(false);
  memory.extend(0, 10);
  memory.copy(0, 1);
  memory.extend(0, 2);
  memory.remove(0, 0, 1 << 20);
  memory.extend(0, 40);
  memory.extend(1, 1);
  EXPECT_EQ(memory.sequences.all().size(), 2U);
  EXPECT_EQ(memory.lists.rewritten, 0);
}

TEST(LlamaCppRewriting, AStreamThatWasCopiedIsShiftedAlone) {
  for (const int shifted : {0, 1}) {
    Memory memory(false);
    memory.extend(0, 20);
    memory.copy(0, 1);
    memory.shift(shifted, 2, 8);
    memory.extend(0, 1);
    memory.extend(1, 1);
    EXPECT_EQ(memory.lists.rewritten, 10) << shifted;
  }
}

TEST(LlamaCppRewriting, WhatACopyStillHasIsNotTakenOut) {
  Memory memory(true);
  memory.extend(0, 20);
  memory.copy(0, 1);
  memory.extend(1, 1);
  memory.extend(0, 1);
  memory.copy(0, 1);
  memory.extend(1, 1);
  memory.remove(1, 4, 8);
  memory.extend(1, 1);
  memory.save(0);
  memory.extend(0, 1);
}

TEST(LlamaCppRewriting, StatesAreSavedOutOfSessionsAlsoBehindAShift) {
  Memory memory(true);
  memory.extend(0, 12);
  memory.extend(1, 5);
  memory.save(0);
  memory.shift(0, 2, 4);
  memory.save(0);
  memory.save(1);
  EXPECT_EQ(memory.lists.rewritten, 0);
  memory.extend(0, 1);
  EXPECT_EQ(memory.lists.rewritten, 6);
  memory.save(0);
}

TEST(LlamaCppRewriting, WhatIsInNoSessionIsNotSaved) {
  Memory memory(true);
  memory.extend(0, 4);
  memory.sequences.clear();
  EXPECT_THROW(memory.save(0), std::runtime_error);
}

TEST(LlamaCppRewriting, RestoredTokensAreBroughtWhereTheSessionLacksThem) {
  for (const bool unified : {true, false}) {
    Memory memory(unified);
    memory.extend(0, 12);
    memory.restore(0, 1);
    memory.extend(1, 2);
    memory.restore(1, 0);
    memory.extend(0, 2);
    memory.extend(1, 1);
  }
}

/// Nobody has gone on with the end of a sequence since it was restored, and of its beginning a token is gone.
TEST(LlamaCppRewriting, WhatAGapHidesOfASessionComesAlongWithWhatWasRestored) {
  for (const bool unified : {true, false}) {
    for (const bool refill : {true, false}) {
      Memory memory(unified, refill);
      memory.extend(0, 12);
      memory.replace_by_restored(0, 8);
      memory.remove(0, 3, 5);
      memory.extend(0, 1);
      EXPECT_EQ(memory.read_outs, 3) << "tokens 5 to 7";
      memory.save(0);
      memory.extend(0, 2);
      EXPECT_EQ(memory.read_outs, 3);
    }
  }
}

TEST(LlamaCppRewriting, TokensOfTwoSessionsBecomeOne) {
  Memory memory(true);
  memory.extend(0, 6);
  memory.extend(1, 4);
  memory.give(1, 0, 6);
  memory.extend(0, 1);
  EXPECT_EQ(memory.read_outs, 4);
  memory.save(0);
}

TEST(LlamaCppRewriting, WithoutARewriterItIsAnError) {
  Cells cells(1, kRoom);
  Sequences sequences(cells, 8, false);
  Lists lists;
  std::vector<uint32_t> fresh{0, 1, 2, 3};
  for (const uint32_t j : fresh) cells.write(0, j);
  Batch batch{BatchKind::kRuns, {{{0, 1, 2, 3}, std::vector<uint8_t>(kRoom, 0), 0}}};
  sequences.begin_batch(true);
  (void)sequences.place(0, batch, fresh, lists, &lists);
  std::vector<uint8_t> past(kRoom, 0);
  past[0] = past[3] = 1;
  cells.write(0, 4);
  batch.runs = {{{0}, past, 2}};
  fresh = {4};
  sequences.begin_batch(false);
  EXPECT_THROW((void)sequences.place(0, batch, fresh, lists), std::runtime_error);
}

TEST(LlamaCppRewriting, RandomOperationsLeaveEachSessionWithWhatItsMaskShows) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  int refused = 0;
  int all = 0;
  for (int round = 0; round < 200; ++round) {
    Memory memory(round % 2 == 0);
    for (int i = 0; i < 60; ++i) {
      const int s = below(kTalks);
      const int n = memory.next(s);
      switch (below(9)) {
        case 0: memory.remove(s, 1 + below(n + 1), 1 << 20); break;
        case 1:
          if (n > 8) {
            const int from = below(n - 4);
            memory.remove(s, from, from + 1 + (below(4) == 0 ? below(n) : below(3)));
          }
          break;
        case 2:
        case 3:
          if (n > 8) memory.shift_own(s, below(4), 1 + below(n / 2));
          break;
        case 4:
          if (n > 0) memory.copy(s, (s + 1 + below(kTalks - 1)) % kTalks);
          break;
        case 6:
          ++all;
          try {
            memory.restore(s, (s + 1 + below(kTalks - 1)) % kTalks);
          } catch (
              const std::runtime_error&) {  // another's batch was refused that had the same tokens
            ++refused;
          }
          break;
        case 5:
          if (below(6) == 0) memory.remove(s, 0, 1 << 20);
          break;
        default: break;
      }
      const int t = below(kTalks);
      const int count = 1 + below(below(3) == 0 ? 12 : 2);
      if (memory.free(t) < static_cast<size_t>(count)) {
        memory.remove(t, 0, 1 << 20);
      } else {
        ++all;
        try {
          memory.extend(t, count);
        } catch (const std::runtime_error&) {
          memory.sequences.drop_current();
          memory.remove(t, 0, 1 << 20);
          ++refused;
        }
      }
      if (HasFatalFailure()) FAIL() << "round " << round << ", operation " << i;
    }
  }
  // Of two sequences with tokens in common one has lost some that lay behind those that the other has given up.
  std::printf("%d of %d batches refused\n", refused, all);
  EXPECT_LE(refused * 1000, all);
}

}  // namespace
}  // namespace keyhole::llama_cpp
