// Masks as llama.cpp makes them, and the sessions that go on with them.
#include "tools/engines/llama.cpp/sequences.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/batch.h"
#include "tools/engines/llama.cpp/cells.h"
#include "tools/engines/llama.cpp/placing.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {
namespace {

constexpr uint32_t kCells = 32;

/// A session without K and V, which counts.
class Counted final : public Session {
 public:
  [[nodiscard]] uint32_t tokens(uint32_t /*layer*/) const override { return held; }
  void attend(uint32_t /*layer*/, const Rows& q, const Rows&, const Rows&, const Rows&) override {
    held += static_cast<uint32_t>(q.tokens);
  }
  void append(uint32_t /*layer*/, const Rows& k, const Rows& /*v*/) override {
    held += static_cast<uint32_t>(k.tokens);
  }
  void truncate(uint32_t n) override { held = std::min(held, n); }
  void read(uint32_t, uint32_t, const Rows&, const Rows&) override {}
  void build() override {}
  [[nodiscard]] std::unique_ptr<Session> fork() override {
    auto copy = std::make_unique<Counted>();
    copy->held = held;
    return copy;
  }
  [[nodiscard]] std::string describe() const override { return ""; }
  uint32_t held = 0;
};

class Source final : public SessionSource {
 public:
  [[nodiscard]] std::unique_ptr<Session> make() override {
    ++made;
    return std::make_unique<Counted>();
  }
  int made = 0;
};

/// A cache of one stream as llama.cpp keeps it: whose token, if anybody's, lies in each cell, and at which position.
class Fake {
 public:
  struct New {
    int sequence;
    int position;
    uint32_t cell;
  };

  explicit Fake(bool refill = true) : cells(1, kCells), sequences(cells, 8, refill) {}

  void write(const std::vector<New>& tokens) {
    for (const New& t : tokens) {
      owners[t.cell] = {t.sequence};
      positions[t.cell] = t.position;
      cells.write(0, t.cell);
    }
  }
  Batch read(const std::vector<New>& tokens, int window = 1000) {
    std::vector<uint16_t> mask(tokens.size() * kCells, 0xFC00);
    new_cells.clear();
    for (size_t i = 0; i < tokens.size(); ++i) {
      new_cells.push_back(tokens[i].cell);
      for (uint32_t j = 0; j < kCells; ++j) {
        const bool own = std::count(owners[j].begin(), owners[j].end(), tokens[i].sequence) > 0;
        if (own && positions[j] <= tokens[i].position &&
            positions[j] > tokens[i].position - window) {
          mask[i * kCells + j] = 0;
        }
      }
    }
    last_mask = mask;
    return read_batch(mask.data(), kCells, kCells, new_cells);
  }
  /// The quick way of a batch.
  std::optional<std::vector<Part>> go_on_with_all(const std::vector<New>& tokens) {
    write(tokens);
    sequences.begin_batch(false);
    (void)read(tokens);
    const Sequences::StreamRows rows{0, last_mask.data(), new_cells};
    auto parts = sequences.go_on({&rows, 1}, kCells, kCells);
    if (!parts) return std::nullopt;
    return parts->front();
  }
  std::optional<Part> go_on(const std::vector<New>& tokens) {
    const auto parts = go_on_with_all(tokens);
    if (!parts) return std::nullopt;
    EXPECT_EQ(parts->size(), 1U);
    return parts->front();
  }
  /// A batch as the backend has it; sessions have all tokens afterwards.
  std::vector<Part> add(const std::vector<New>& tokens) {
    write(tokens);
    sequences.begin_batch(false);
    const Batch batch = read(tokens);
    auto parts = sequences.place(0, batch, new_cells, source);
    if (!parts) throw std::runtime_error("a window");
    for (const Part& part : *parts) {
      static_cast<Counted&>(*part.sequence->session).held =
          static_cast<uint32_t>(part.past + part.rows.size());
    }
    return *parts;
  }
  /// `n` tokens of a sequence from a position on, in cells from one on.
  static std::vector<New> run(int sequence, int position, uint32_t cell, int n) {
    std::vector<New> tokens;
    for (int i = 0; i < n; ++i) tokens.push_back({sequence, position + i, cell + uint32_t(i)});
    return tokens;
  }
  void remove(int sequence, int from, int to) {
    for (uint32_t j = 0; j < kCells; ++j) {
      if (positions[j] >= from && positions[j] < to) std::erase(owners[j], sequence);
    }
  }

  Cells cells;
  Source source;
  Sequences sequences;
  std::vector<uint32_t> new_cells;
  std::vector<uint16_t> last_mask;
  std::vector<int> owners[kCells];
  int positions[kCells] = {};
};

TEST(LlamaCppBatch, OneSequenceIsOneRun) {
  Fake fake;
  fake.write(Fake::run(0, 0, 0, 5));
  const auto tokens = Fake::run(0, 5, 5, 3);
  fake.write(tokens);
  const Batch batch = fake.read(tokens);
  ASSERT_EQ(batch.kind, BatchKind::kRuns);
  ASSERT_EQ(batch.runs.size(), 1U);
  EXPECT_EQ(batch.runs[0].rows, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(batch.runs[0].past_count, 5U);
}

TEST(LlamaCppBatch, SequencesOfOneStreamAreRunsOfTheirOwnHoweverTheyAreMixed) {
  Fake fake;
  const std::vector<Fake::New> tokens{{0, 0, 0}, {1, 0, 1}, {0, 1, 2}, {1, 1, 3}};
  fake.write(tokens);
  const Batch batch = fake.read(tokens);
  ASSERT_EQ(batch.kind, BatchKind::kRuns);
  ASSERT_EQ(batch.runs.size(), 2U);
  EXPECT_EQ(batch.runs[0].rows, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(batch.runs[1].rows, (std::vector<uint32_t>{1, 3}));
}

TEST(LlamaCppBatch, WindowsInABatchAreSeen) {
  Fake fake;
  const auto tokens = Fake::run(0, 0, 0, 6);
  fake.write(tokens);
  EXPECT_EQ(fake.read(tokens, 4).kind, BatchKind::kSliding);
  EXPECT_EQ(fake.read(tokens, 6).kind, BatchKind::kRuns);
}

TEST(LlamaCppBatch, WhatIsNotCausalIsOther) {
  Fake fake;
  std::vector<uint16_t> mask(2 * kCells, 0xFC00);
  const std::vector<uint32_t> cells{0, 1};
  mask[0] = mask[1] = mask[kCells] = mask[kCells + 1] = 0;  // the first row sees the second
  EXPECT_EQ(read_batch(mask.data(), kCells, kCells, cells).kind, BatchKind::kOther);
  mask[1] = 0xFC00;
  EXPECT_EQ(read_batch(mask.data(), kCells, kCells, cells).kind, BatchKind::kRuns);
  mask[kCells] = 0xB800;  // -0.5: a bias
  EXPECT_EQ(read_batch(mask.data(), kCells, kCells, cells).kind, BatchKind::kOther);
  mask[kCells] = 0;
  mask[kCells + 1] = 0xFC00;  // a row that does not see itself
  EXPECT_EQ(read_batch(mask.data(), kCells, kCells, cells).kind, BatchKind::kOther);
}

TEST(LlamaCppBatch, ABatchGoesOnWithWhatItsMaskShows) {
  constexpr uint32_t kMany = 4096;
  constexpr uint32_t kRows = 2048;  // enough for several threads
  std::vector<uint16_t> past = blind_row(kMany);
  for (uint32_t j = 0; j < 1000; ++j) past[j] = 0;
  std::vector<uint32_t> cells(kRows);
  std::vector<uint16_t> mask;
  std::vector<uint16_t> row = past;
  for (uint32_t i = 0; i < kRows; ++i) {
    cells[i] = 1500 + i;
    row[cells[i]] = 0;
    mask.insert(mask.end(), row.begin(), row.end());
  }
  EXPECT_TRUE(goes_on(mask.data(), kMany, kMany, cells, past));
  for (const size_t at : {size_t{5}, size_t{1000} * kMany + 999, mask.size() - 1}) {
    mask[at] ^= 0xFC00U;
    EXPECT_FALSE(goes_on(mask.data(), kMany, kMany, cells, past)) << at;
    mask[at] ^= 0xFC00U;
  }
}

// What a failed batch has begun cannot go on; what others hold can.
TEST(LlamaCppSequences, AFailedBatchTakesItsOwnAlong) {
  Fake fake(false);
  fake.add(Fake::run(0, 0, 0, 4));
  fake.add(Fake::run(1, 0, 4, 3));
  ASSERT_EQ(fake.sequences.all().size(), 2U);
  fake.add(Fake::run(1, 3, 7, 1));  // the failed one
  fake.sequences.drop_current();
  ASSERT_EQ(fake.sequences.all().size(), 1U);
  const auto parts = fake.add(Fake::run(0, 4, 8, 1));
  ASSERT_EQ(parts.size(), 1U);
  EXPECT_EQ(parts[0].past, 4U);
  EXPECT_THROW(fake.add(Fake::run(1, 4, 9, 1)), std::runtime_error);
}

TEST(LlamaCppSequences, TheQuickWayIsForOneSequenceThatNothingHasTouched) {
  Fake fake;
  const Sequence* first = fake.add(Fake::run(0, 0, 0, 4))[0].sequence;
  auto part = fake.go_on(Fake::run(0, 4, 4, 2));
  ASSERT_TRUE(part);
  EXPECT_EQ(part->sequence, first);
  EXPECT_EQ(part->past, 4U);
  EXPECT_EQ(part->rows, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(first->tokens.size(), 6U);
  ASSERT_TRUE(fake.go_on(Fake::run(0, 6, 9, 1)));
  fake.remove(0, 5, 100);
  EXPECT_FALSE(fake.go_on(Fake::run(0, 5, 6, 1)));  // it sees less than the sequence has
  EXPECT_EQ(first->tokens.size(), 7U);
}

TEST(LlamaCppSequences, TheQuickWayIsForSeveralSequencesThatGoOnTogether) {
  Fake fake;
  (void)fake.add(Fake::run(0, 0, 0, 4));
  (void)fake.add(Fake::run(1, 0, 4, 3));
  // The first has not seen the batch of the other.
  EXPECT_FALSE(fake.go_on_with_all({{1, 3, 7}, {0, 4, 8}}));
  const auto placed = fake.add({{1, 3, 7}, {0, 4, 8}});
  ASSERT_EQ(placed.size(), 2U);
  const auto parts = fake.go_on_with_all({{0, 5, 9}, {0, 6, 10}, {1, 4, 11}});
  ASSERT_TRUE(parts);
  ASSERT_EQ(parts->size(), 2U);
  EXPECT_EQ((*parts)[0].sequence, placed[1].sequence);
  EXPECT_EQ((*parts)[0].past, 5U);
  EXPECT_EQ((*parts)[0].rows, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ((*parts)[1].sequence, placed[0].sequence);
  EXPECT_EQ((*parts)[1].past, 4U);
  EXPECT_EQ((*parts)[1].rows, (std::vector<uint32_t>{2}));
  EXPECT_EQ(placed[1].sequence->tokens.back().cell, 10U);
  EXPECT_TRUE(fake.go_on_with_all({{1, 5, 12}, {0, 7, 13}}));
  // Where one does not go on nothing is changed.
  fake.remove(1, 5, 100);
  const size_t before = placed[1].sequence->tokens.size();
  EXPECT_FALSE(fake.go_on_with_all({{0, 8, 14}, {1, 5, 15}}));
  EXPECT_EQ(placed[1].sequence->tokens.size(), before);
}

struct NoRewriter final : Rewriter {
  void rewrite(Session& /*session*/, const Rewriting& /*change*/) override {}
  void turn(uint32_t /*layer*/, const Rows& /*keys*/, std::span<const int32_t> /*by*/) override {}
};

// The cache may have gone to sessions since the last batch that did not take the quick way.
TEST(LlamaCppSequences, ASequenceWhoseFirstTokenWasWrittenOverGoesWhereNoneCanBeTakenOut) {
  for (const bool rewrites : {false, true}) {
    Fake fake;
    (void)fake.add(Fake::run(0, 0, 0, 4));
    (void)fake.add(Fake::run(1, 0, 4, 3));
    fake.remove(0, 0, 1);
    const std::vector<Fake::New> next{{1, 3, 0}};
    fake.write(next);
    (void)fake.read(next);
    NoRewriter rewriter;
    const Placed placed =
        place_batch(std::vector<int64_t>{0}, 1, {fake.last_mask.data(), kCells, 0, kCells},
                    fake.cells, fake.sequences, fake.source, rewrites ? &rewriter : nullptr,
                    [] { ADD_FAILURE() << "not by the quick way"; });
    ASSERT_EQ(placed.parts.size(), 1U);
    EXPECT_EQ(fake.sequences.all().size(), rewrites ? 2U : 1U);
  }
}

TEST(LlamaCppSequences, TheQuickWayIsNotForACopyBesideItsSequence) {
  Fake fake;
  (void)fake.add(Fake::run(0, 0, 0, 4));
  for (uint32_t cell = 0; cell < 4; ++cell) fake.owners[cell] = {0, 1};
  EXPECT_FALSE(fake.go_on_with_all({{0, 4, 4}, {1, 4, 5}}));
}

TEST(LlamaCppSequences, TheQuickWayIsNotTakenWhenACellWasWrittenOver) {
  Fake fake;
  (void)fake.add(Fake::run(0, 0, 0, 4));
  fake.cells.write(0, 2);  // the mask is the same as if nothing had happened
  EXPECT_FALSE(fake.go_on(Fake::run(0, 4, 4, 1)));
}

TEST(LlamaCppSequences, TokensGoOnWithTheirSession) {
  Fake fake;
  const Sequence* first = fake.add(Fake::run(0, 0, 0, 4))[0].sequence;
  const auto parts = fake.add(Fake::run(0, 4, 4, 1));
  EXPECT_EQ(parts[0].sequence, first);
  EXPECT_EQ(parts[0].past, 4U);
  EXPECT_EQ(fake.source.made, 1);
}

TEST(LlamaCppSequences, ARemovedEndThatIsWrittenOverIsCutOff) {
  Fake fake;
  const Sequence* first = fake.add(Fake::run(0, 0, 0, 6))[0].sequence;
  fake.remove(0, 3, 100);
  const auto parts = fake.add(Fake::run(0, 3, 3, 2));
  EXPECT_EQ(parts[0].sequence, first);
  EXPECT_EQ(parts[0].past, 3U);
  EXPECT_EQ(first->session->tokens(0), 5U);
  EXPECT_EQ(fake.sequences.all().size(), 1U);
}

TEST(LlamaCppSequences, ACopyIsAForkWhenItGoesItsOwnWay) {
  Fake fake;
  const Sequence* first = fake.add(Fake::run(0, 0, 0, 4))[0].sequence;
  for (int j = 0; j < 4; ++j) fake.owners[j].push_back(1);
  const auto parts = fake.add({{0, 4, 4}, {1, 4, 5}});
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].sequence, first);
  EXPECT_NE(parts[1].sequence, first);
  EXPECT_EQ(parts[1].past, 4U);
  EXPECT_EQ(fake.source.made, 1);
}

TEST(LlamaCppSequences, TokensThatLeftTheMiddleAreRefilledBehindWhatIsCommon) {
  Fake fake;
  (void)fake.add(Fake::run(0, 0, 0, 8));
  fake.remove(0, 2, 4);
  const auto parts = fake.add(Fake::run(0, 8, 8, 1));
  EXPECT_EQ(parts[0].past, 6U);
  ASSERT_EQ(parts[0].sequence->tokens.size(), 7U);
  EXPECT_EQ(parts[0].sequence->tokens[2].cell, 4U);
  EXPECT_EQ(parts[0].sequence->tokens[6].cell, 8U);
  EXPECT_TRUE(parts[0].sequence->unbuilt);
}

// What the batch under way brings a session is in its list already: another that has it is to be read.
TEST(LlamaCppSequences, TokensAreFoundInSessionsThatHaveThem) {
  Fake fake;
  const Sequence* first = fake.add(Fake::run(0, 0, 0, 8))[0].sequence;
  for (int j = 0; j < 8; ++j) fake.owners[j].push_back(1);
  fake.remove(1, 2, 4);
  const auto tokens = Fake::run(1, 8, 8, 1);
  fake.write(tokens);
  fake.sequences.begin_batch(false);
  const Batch batch = fake.read(tokens);
  const auto parts = fake.sequences.place(0, batch, fake.new_cells, fake.source);
  ASSERT_TRUE(parts);
  Sequence* const copy = (*parts)[0].sequence;
  ASSERT_NE(copy, first);
  ASSERT_EQ(copy->tokens.size(), 7U);
  for (uint32_t cell = 4; cell < 8; ++cell) {
    EXPECT_EQ(fake.sequences.find(0, cell).sequence, first) << cell;
    EXPECT_EQ(fake.sequences.find(0, cell).number, cell);
  }
  EXPECT_EQ(fake.sequences.find(0, 8).sequence, nullptr);
  static_cast<Counted&>(*copy->session).held = 7;
  fake.sequences.begin_batch(false);
  EXPECT_EQ(fake.sequences.find(0, 8).sequence, copy);
  EXPECT_EQ(fake.sequences.find(0, 8).number, 6U);
}

TEST(LlamaCppSequences, WithoutRefillThatIsAnError) {
  Fake fake(false);
  (void)fake.add(Fake::run(0, 0, 0, 8));
  fake.remove(0, 2, 4);
  EXPECT_THROW((void)fake.add(Fake::run(0, 8, 8, 1)), std::runtime_error);
}

// Each step behind a window leaves one token out.
TEST(LlamaCppSequences, AnEndWithoutItsBeginningIsAWindowTheSecondTime) {
  Fake fake;
  (void)fake.add(Fake::run(0, 0, 0, 8));
  fake.remove(0, 0, 1);
  EXPECT_EQ(fake.add(Fake::run(0, 8, 8, 1))[0].past, 7U);
  const auto tokens = Fake::run(0, 9, 9, 1);
  fake.write(tokens);
  fake.sequences.begin_batch(false);
  const Batch batch = fake.read(tokens, 8);
  EXPECT_FALSE(fake.sequences.place(0, batch, fake.new_cells, fake.source));
}

TEST(LlamaCppSequences, ABeginningThatWasRemovedIsNoWindow) {
  for (const int gone : {1, 3}) {
    Fake fake;
    (void)fake.add(Fake::run(0, 0, 0, 8));
    fake.remove(0, 0, gone);
    for (int i = 0; i < 4; ++i) {
      const auto parts = fake.add(Fake::run(0, 8 + i, 8U + static_cast<uint32_t>(i), 1));
      EXPECT_EQ(parts[0].past, static_cast<uint32_t>(8 - gone + i));
    }
    EXPECT_EQ(fake.source.made, 2);
  }
}

TEST(LlamaCppCells, CopiesAreTheSameTokensUntilOneOfThemIsChanged) {
  Cells cells(2, 4);
  cells.write(0, 2);
  cells.write(0, 1);
  cells.copy_stream(0, 1);
  EXPECT_EQ(cells.stamp(0, 1), cells.stamp(1, 1));
  const Token before{1, cells.stamp(0, 1)};
  cells.renew();
  EXPECT_FALSE(cells.holds(0, before));
  EXPECT_NE(cells.stamp(0, 1), cells.stamp(1, 1));
  EXPECT_LT(cells.stamp(0, 2), cells.stamp(0, 1));
  EXPECT_EQ(cells.stamp(0, 0), 0U);
}

TEST(LlamaCppCells, TokensUpToANumberKeepTheirsWhenOthersAreRenewed) {
  Cells cells(1, 4);
  cells.write(0, 3);
  const Token kept{3, cells.stamp(0, 3)};
  cells.write(0, 0);
  cells.write(0, 1);
  const Token first{0, cells.stamp(0, 0)}, second{1, cells.stamp(0, 1)};
  const uint64_t before = cells.last(), changes = cells.changes();
  cells.renew(kept.stamp);
  EXPECT_TRUE(cells.holds(0, kept));
  EXPECT_FALSE(cells.holds(0, first));
  EXPECT_FALSE(cells.holds(0, second));
  EXPECT_GT(cells.stamp(0, 0), before);
  EXPECT_LT(cells.stamp(0, 0), cells.stamp(0, 1));
  EXPECT_EQ(cells.stamp(0, 2), 0U);
  EXPECT_GT(cells.changes(), changes);
}

TEST(LlamaCppSequences, AnotherSequenceInTheSameCellsIsANewSession) {
  Fake fake;
  (void)fake.add(Fake::run(0, 0, 0, 4));
  fake.remove(0, 0, 100);
  const auto parts = fake.add(Fake::run(1, 0, 0, 4));
  EXPECT_EQ(parts[0].past, 0U);
  EXPECT_EQ(fake.source.made, 2);
  EXPECT_EQ(fake.sequences.all().size(), 1U);
}

}  // namespace
}  // namespace keyhole::llama_cpp
