// What is indexed, against the rule in token counts alone: after any order of appends, steps,
// builds, truncations and copies.
#include "runtime/indexing/index_keeper.h"

#include <gtest/gtest.h>

#include <sstream>

#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

using test::Numbers;

constexpr uint32_t kLayers = 3, kHeads = 2, kDim = 64;

/// One layer's indexed rows, by the rule of the public header.
struct Rule {
  uint32_t layer = 0, append_block = 0;
  uint32_t rows = 0, indexed = 0;
  bool has_index = false;
  uint32_t block = 0;        // its end, 0: none
  uint32_t block_begun = 0;  // rows when it was begun
  bool block_is_first = false;

  [[nodiscard]] bool is_cut(uint32_t row) const {
    return (row + layer * append_block / kLayers) % append_block == 0;
  }
  [[nodiscard]] bool cut_between(uint32_t a, uint32_t b) const {
    for (uint32_t r = std::min(a, b) + 1; r <= std::max(a, b); ++r) {
      if (is_cut(r)) return true;
    }
    return false;
  }
  [[nodiscard]] uint32_t first_rows() const {
    uint32_t cut = 1;
    while (!is_cut(cut)) ++cut;
    return 2 * cut < append_block ? cut + append_block / 2 : cut;
  }
  /// What a step finds when it begins.
  void step() {
    if (block != 0) {
      if (!cut_between(block_begun, rows)) return;
      indexed = block;
      has_index = true;
      block = 0;
    }
    if (has_index ? !cut_between(indexed, rows) : rows < first_rows()) return;
    block = std::min(rows, indexed + 8 * append_block);
    block_begun = rows;
    block_is_first = !has_index;
  }
  void build() {
    block = 0;
    indexed = rows;
    has_index = has_index || rows != 0;
  }
  void cancel_first() {
    if (block_is_first) block = 0;
  }
  void truncate(uint32_t to, bool sample_shrinks) {
    if (block > to) block = 0;
    if (sample_shrinks) cancel_first();
    rows = to;
    if (indexed > rows) indexed = rows;
    if (rows == 0) has_index = false;
  }
};

class IndexKeeperTest : public ::testing::TestWithParam<const char*> {
 protected:
  /// A sequence and what is indexed of it. Not movable: the parts know each other.
  struct Kept {
    Kept(const Engine& engine, const SessionParams& params)
        : sequence(engine, params),
          keeper(engine, params, sequence, [](uint64_t, const char*) {}) {}
    Sequence sequence;
    IndexKeeper keeper;
  };

  void SetUp() override {
    auto ec = test::small_engine(2);
    ec.layers = kLayers;
    ec.kv_heads = kHeads;
    ec.q_heads = 2 * kHeads;
    engine_ = std::make_unique<Engine>(ec);
  }
  SessionParams params(uint32_t append_block) const {
    auto sc = test::small_session();
    sc.max_tokens = 20000;
    sc.index = GetParam();
    sc.append_block = append_block;
    SessionParams p = check_session(sc, engine_->model());
    for (uint32_t i = 0; i < kLayers * kHeads; ++i) p.heads.push_back({p.index, p.budget});
    p.heads[1].budget.tail = KEYHOLE_TAIL_CENTROID;  // head 1 of layer 0 has partitions
    p.heads[1].budget.min_keys = 16;
    return p;
  }
  static TensorView rows(const std::vector<float>& values, uint32_t n, uint32_t heads) {
    return dense_tensor(reinterpret_cast<const std::byte*>(values.data()), n, heads, kDim,
                        DType::f32);
  }
  static void append(Sequence& sequence, uint32_t layer, uint32_t n, Numbers& numbers) {
    const auto k = numbers.many(size_t{n} * kHeads * kDim);
    const auto v = numbers.many(k.size());
    sequence.append(layer, rows(k, n, kHeads), rows(v, n, kHeads));
  }
  /// The last position that each head has sampled, and how many it has.
  static std::vector<size_t> newest_samples(const Kept& kept, uint32_t layer) {
    std::vector<size_t> newest;
    for (uint32_t h = 0; h < kHeads; ++h) {
      const auto& positions = kept.keeper.head(layer, h).queries.positions();
      newest.push_back(positions.size());
      newest.push_back(positions.empty() ? 0 : positions.back());
    }
    return newest;
  }
  /// One balance a head, from its first index until its rows all go, in copies too.
  static void expect_same_balance(const Kept& kept, std::vector<std::vector<float>>& known) {
    for (uint32_t l = 0; l < kLayers; ++l) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        const HeadIndex& hd = kept.keeper.head(l, h);
        std::vector<float>& scale = known[l * kHeads + h];
        if (kept.sequence.rows(l) == 0) scale.clear();
        ASSERT_TRUE(hd.balance.has_value() || hd.index == nullptr);
        if (scale.empty() && hd.balance) scale = hd.balance->key_scale;
        ASSERT_EQ(scale, hd.balance ? hd.balance->key_scale : std::vector<float>{});
      }
    }
  }
  static void expect_rule(const Kept& kept, const std::vector<Rule>& rules) {
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < kLayers; ++l) {
      ASSERT_EQ(rules[l].indexed, kept.keeper.indexed(l)) << "layer " << l;
      for (uint32_t h = 0; h < kHeads; ++h) {
        const HeadIndex& hd = kept.keeper.head(l, h);
        ASSERT_EQ(rules[l].indexed, hd.indexed()) << "layer " << l << ", head " << h;
        bytes += hd.bytes();
      }
    }
    ASSERT_EQ(bytes, kept.keeper.index_bytes());
    if (rules[0].indexed != 0) {
      ASSERT_NE(nullptr, kept.keeper.head(0, 1).full_tail());
      ASSERT_EQ(nullptr, kept.keeper.head(0, 0).full_tail());
    }
  }

  std::unique_ptr<Engine> engine_;
};

TEST_P(IndexKeeperTest, IndexesWhatTheRuleSays) {
  for (uint64_t seed = 1; seed <= test::unless_sanitized(4, 2); ++seed) {
    Numbers numbers(seed);
    SessionParams p = params(1 + numbers.below(40));
    p.append_mode = seed % 2 == 0 ? KEYHOLE_APPEND_IN_STEP : KEYHOLE_APPEND_BACKGROUND;
    auto kept = std::make_unique<Kept>(*engine_, p);
    std::vector<Rule> rules(kLayers);
    std::vector<std::vector<float>> balances(size_t{kLayers} * kHeads);
    for (uint32_t l = 0; l < kLayers; ++l) {
      rules[l].layer = l;
      rules[l].append_block = p.append_block;
    }
    for (int i = 0; i < 80; ++i) {
      const uint32_t operation = numbers.below(14);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", operation " + std::to_string(i) + ": " +
                   std::to_string(operation));
      for (uint32_t l = 0; l < kLayers; ++l) {
        Sequence& sequence = kept->sequence;
        if (operation < 7) {
          for (uint32_t s = numbers.below(30); s != 0; --s) {
            const bool due = kept->keeper.append_is_due(l);
            const Rule before = rules[l];
            rules[l].step();
            const bool takes_in = before.block != 0 && rules[l].indexed != before.indexed;
            ASSERT_EQ(takes_in, kept->keeper.advance_append(l));
            ASSERT_TRUE(due || (before.block == rules[l].block && !takes_in));
            append(sequence, l, 1, numbers);
            rules[l].rows = sequence.rows(l);
            ASSERT_EQ(rules[l].indexed, kept->keeper.indexed(l)) << "layer " << l;
          }
        } else if (operation == 7) {
          const uint32_t n = 1 + numbers.below(800);
          const auto q = numbers.many(size_t{n} * 2 * kHeads * kDim);
          const auto before = newest_samples(*kept, l);
          kept->keeper.sample_queries(l, rows(q, n, 2 * kHeads), {}, sequence.tokens(l));
          append(sequence, l, n, numbers);
          if (newest_samples(*kept, l) != before) rules[l].cancel_first();
          rules[l].rows = sequence.rows(l);
        } else if (operation == 8 || operation == 9) {
          const uint32_t held = sequence.tokens(l);
          const uint32_t back = operation == 8 ? held : std::min(held, 3 * p.append_block + 30);
          const uint32_t n = held - numbers.below(back + 1);
          const uint32_t remain = sequence.split(l, n).rows;
          const auto before = newest_samples(*kept, l);
          kept->keeper.truncate(l, remain, n);
          sequence.truncate(l, n);
          rules[l].truncate(remain, newest_samples(*kept, l) != before);
        } else if (operation == 10) {
          rules[l].build();
        }
        if (HasFatalFailure()) return;
        expect_same_balance(*kept, balances);
        if (HasFatalFailure()) return;
      }
      if (operation == 10) {
        bool told = false;
        kept->keeper.build({}, [&](bool) { told = true; });
        EXPECT_TRUE(told);
      } else if (operation == 11) {
        kept->keeper.set_index(GetParam());
        for (Rule& r : rules) {
          r.block = r.indexed = 0;
          r.has_index = false;
        }
      } else if (operation == 12) {
        auto copy = std::make_unique<Kept>(*engine_, p);
        copy->sequence.copy_from(kept->sequence);
        copy->keeper.copy_from(kept->keeper);
        kept = std::move(copy);
      } else if (operation == 13) {
        std::stringstream file;
        ChecksumWriter out(file);
        kept->sequence.save(out);
        kept->keeper.save(out);
        out.finish();
        auto copy = std::make_unique<Kept>(*engine_, p);
        const std::string bytes = file.str();
        const MemorySource source(bytes);
        ChecksumReader in(source);
        copy->sequence.load(in);
        copy->keeper.load(in);
        in.finish();
        copy->keeper.begin_loaded();
        kept = std::move(copy);
      }
      expect_rule(*kept, rules);
      expect_same_balance(*kept, balances);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(IndexKeeperTest, ABalanceThatIsFixedEarlyIsThatOfTheIndex) {
  SessionParams p = params(32);
  Kept kept(*engine_, p);
  Numbers numbers(3);
  const auto q = numbers.many(size_t{600} * 2 * kHeads * kDim);
  kept.keeper.sample_queries(0, rows(q, 600, 2 * kHeads), {}, 0);
  append(kept.sequence, 0, 600, numbers);
  HeadIndexes heads(*engine_, p);
  heads.at(0, 0).queries = kept.keeper.head(0, 0).queries;
  const KvView kv = kept.sequence.view(0, 0);
  const index::Balance early =
      heads.fix_balance(0, 0, {kv.keys.slice(0, 256), kv.values.slice(0, 256)});
  EXPECT_EQ(early.key_scale, heads.fix_balance(0, 0, kv).key_scale) << "only the first counts";
  EXPECT_EQ(early.key_scale, index::learn_balance(engine_->kernels(),
                                                  {kv.keys.slice(0, 256), kv.values.slice(0, 256)},
                                                  heads.at(0, 0).queries.view().rows)
                                 .key_scale);
  EXPECT_EQ(early.key_scale,
            heads.build(0, 0, kv, heads.at(0, 0).balance, false, {}).balance.key_scale);
  EXPECT_NE(early.key_scale, heads.build(0, 0, kv, std::nullopt, false, {}).balance.key_scale);
}

TEST_P(IndexKeeperTest, TokensThatAreDroppedNowAndThenDoNotStopAFirstIndex) {
  // A decoder that guesses tokens ahead drops some of them every few steps.
  SessionParams p = params(32);
  Kept kept(*engine_, p);
  Numbers numbers(2);
  const auto q = numbers.many(size_t{100} * 2 * kHeads * kDim);
  kept.keeper.sample_queries(0, rows(q, 100, 2 * kHeads), {}, 0);
  append(kept.sequence, 0, 100, numbers);
  for (int i = 0; i < 120; ++i) {
    (void)kept.keeper.advance_append(0);
    append(kept.sequence, 0, 3, numbers);
    const uint32_t n = kept.sequence.tokens(0) - 2;
    kept.keeper.truncate(0, kept.sequence.split(0, n).rows, n);
    kept.sequence.truncate(0, n);
  }
  EXPECT_GT(kept.keeper.indexed(0), 100U);
}

TEST_P(IndexKeeperTest, AChangeOfBudgetThatWantsPartitionsReachesAFirstIndexUnderWay) {
  SessionParams p = params(32);
  Kept kept(*engine_, p);
  Numbers numbers(1);
  append(kept.sequence, 0, 200, numbers);
  EXPECT_FALSE(kept.keeper.advance_append(0));  // begins
  Budget budget = p.budget;
  budget.tail = KEYHOLE_TAIL_CENTROID;
  EXPECT_TRUE(kept.keeper.set_budget(0, budget));
  EXPECT_FALSE(kept.keeper.set_budget(0, budget)) << "it is the same";
  for (int i = 0; i < 80; ++i) {
    (void)kept.keeper.advance_append(0);
    append(kept.sequence, 0, 1, numbers);
  }
  EXPECT_GT(kept.keeper.indexed(0), 100U);
  EXPECT_NE(nullptr, kept.keeper.head(0, 0).full_tail());
}

TEST_P(IndexKeeperTest, RefusesBlocksThatNoSessionHas) {
  SessionParams p = params(32);
  for (const std::vector<uint32_t>& block :
       {std::vector<uint32_t>{7, 1, 0}, {0, 1, 1, 0}, {0, 0, 3, 0, 1, 2}, {0, 0, 0xFFFFFFFF}}) {
    std::stringstream file;
    ChecksumWriter out(file);
    Kept(*engine_, p)
        .keeper.save(out);  // of an empty session: the last layer's block is its last 16 bytes
    std::string bytes = file.str();
    bytes.resize(bytes.size() - 4 * sizeof(uint32_t));
    for (const uint32_t v : block) bytes.append(reinterpret_cast<const char*>(&v), sizeof v);
    bytes.append(sizeof(uint32_t), '\0');  // no first index has failed
    const MemorySource source(bytes);
    ChecksumReader in(source);
    Kept kept(*engine_, p);
    EXPECT_THROW(kept.keeper.load(in), Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, IndexKeeperTest,
                         ::testing::Values("flat", "ivf:C=8,probe=3,segment=64,iters=2",
                                           "hnsw:M=4,ef=16,efc=12"),
                         [](const auto& p) {
                           return std::string(p.param).substr(0, std::string(p.param).find(':'));
                         });

}  // namespace
}  // namespace keyhole::runtime
