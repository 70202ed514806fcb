// Goals of a tail: reading ends, and ends where it should.
#include <set>

#include "tests/index/tail_step.h"

namespace keyhole::index::test {
namespace {

class TailGoals : public ::testing::Test {
 protected:
  /// Reads on until next_rows() has nothing more; checks what it promises on the way.
  void read_on(Step& step, TailEstimate& estimate, const ReadGoal& goal) {
    step.begin(estimate);
    std::set<uint32_t> known(step.read.begin(), step.read.end());
    for (size_t round = 0;; ++round) {
      ASSERT_LE(round, step.tree.count()) << "no end";
      norms(step);
      const size_t already = step.read_now().size();
      const auto more = estimate.next_rows(goal, already, norms_.data());
      if (more.empty()) break;
      ASSERT_LE(already + more.size(), goal.max_rows);
      for (const uint32_t row : more) {
        ASSERT_LT(row, step.tree.count());
        ASSERT_TRUE(known.insert(row).second) << "row " << row << " is read already";
      }
      for (const uint32_t row : more) {
        for (const uint32_t other : step.tree.rows_of(step.tree.fine_of(row))) {
          ASSERT_TRUE(known.count(other) != 0) << "part of a partition";
        }
      }
      step.later.insert(step.later.end(), more.begin(), more.end());
      step.see();
      estimate.take_in(step.seen.data());
    }
  }
  void norms(const Step& step) {
    norms_.clear();
    for (uint32_t h = 0; h < step.group; ++h) {
      norms_.push_back(static_cast<float>(norm(step.attend(h, step.read_now()).o)));
    }
  }
  /// No unread partition fits below max_rows any more.
  static bool is_full(const Step& step, const ReadGoal& goal) {
    size_t largest = 0;
    for (size_t f = 0; f < step.tree.fine().count(); ++f) {
      largest = std::max(largest, step.tree.rows_of(f).size());
    }
    const size_t read = step.read.size() + step.later.size();
    return read == step.tree.count() || read + largest > goal.max_rows;
  }

  std::vector<float> norms_;
};

TEST_F(TailGoals, AreMetOrEverythingAllowedIsRead) {
  int met = 0;
  int full = 0;
  for (uint32_t seed = 0; seed < cases(60); ++seed) {
    std::mt19937 random(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const uint32_t dim = head_dims()[random() % 4];
    const DType dtype = key_dtypes()[random() % 3];
    const size_t n = 1 + random() % 4000;
    KvRows kv(n, dim, dtype);
    kv.add(attention_keys(n, dim, random), gaussian(n, dim, random));
    TailTree tree(context(), dim, dtype, {4 + static_cast<uint32_t>(random() % 30)});
    tree.build(kv.view(), {});
    const uint32_t group = 1 + random() % 6;
    Step step{kv, tree, group, {}};
    step.queries = attention_queries(group, dim, kv.keys, random);
    step.logits.scale = scale_for(step, 0.5 + 0.1 * static_cast<double>(random() % 30));
    step.logits.softcap = random() % 4 == 0 ? 5.0F : 0.0F;
    step.resident.assign(group, random() % 3 == 0 ? -INFINITY : 0.0);
    if (random() % 2 == 0) add_resident(step, 2.0);
    for (size_t i = 0; i < n / 50; ++i) step.read.push_back(static_cast<uint32_t>(i * 50));
    ReadGoal goal;
    const float masses[] = {0.0F, 0.5F, 0.95F, 1.0F};
    const float errors[] = {0.0F, 0.3F, 0.05F, 1e-6F};
    goal.mass = masses[random() % 4];
    goal.error = errors[random() % 4];
    goal.min_rows = random() % 3 == 0 ? static_cast<uint32_t>(random() % (n + 1)) : 0;
    goal.max_rows =
        random() % 3 == 0 ? static_cast<uint32_t>(random() % (n + 1)) : static_cast<uint32_t>(n);
    goal.max_rows = std::max(goal.max_rows, goal.min_rows);
    TailEstimate estimate;
    read_on(step, estimate, goal);
    if (HasFatalFailure()) return;
    const size_t read = step.read_now().size();
    const bool is_met = estimate.met(goal, read, norms_.data());
    EXPECT_TRUE(is_met || is_full(step, goal)) << "gave up at " << read << " of " << n;
    met += static_cast<int>(is_met);
    full += static_cast<int>(!is_met);
    if (read < goal.min_rows) {
      EXPECT_TRUE(is_full(step, goal));
    }
    if (is_met && goal.mass > 0.0F) {
      for (uint32_t h = 0; h < group; ++h) EXPECT_LE(estimate.missing(h), 1.0F - goal.mass + 1e-5F);
    }
    if (is_met && goal.error > 0.0F) {
      for (uint32_t h = 0; h < group; ++h) {
        EXPECT_LE(estimate.error(h, norms_[h]), goal.error * (1.0F + 1e-5F));
      }
    }
    // What is left still adds up.
    static_cast<void>(Tail(estimate, step));
  }
  EXPECT_GT(met, 5);
  EXPECT_GT(full, 1);
}

// With a goal of mass, the rows read hold it in truth, or nearly: with 19 of 20 keys' worth read exactly, weights are
// hardly estimates any more.
TEST_F(TailGoals, MassIsReadInTruth) {
  int tries = 0;
  double worst = 1.0;
  for (uint32_t seed = 0; seed < cases(16); ++seed) {
    std::mt19937 random(1000 + seed);
    KvRows kv(4000, 64, DType::f16);
    kv.add(attention_keys(4000, 64, random), gaussian(4000, 64, random));
    TailTree tree(context(), 64, DType::f16, {});
    tree.build(kv.view(), {});
    Step step{kv, tree, 2, {}};
    step.queries = attention_queries(2, 64, kv.keys, random);
    step.logits.scale = scale_for(step, 2.0);
    step.resident.assign(2, -INFINITY);
    for (uint32_t row = 0; row < 4000; row += 100) step.read.push_back(row);
    TailEstimate estimate;
    read_on(step, estimate, {.mass = 0.95F, .max_rows = 4000});
    if (HasFatalFailure()) return;
    for (uint32_t h = 0; h < 2; ++h) {
      const double truth =
          std::exp(step.attend(h, step.read_now()).lse - step.attend(h, step.all_rows()).lse);
      worst = std::min(worst, truth);
      ++tries;
    }
  }
  EXPECT_GT(tries, 0);
  EXPECT_GT(worst, 0.9);
}

TEST_F(TailGoals, RowsThatAGoalAsksForAreRead) {
  std::mt19937 random(208);
  KvRows kv(2000, 64, DType::f16);
  kv.add(attention_keys(2000, 64, random), gaussian(2000, 64, random));
  TailTree tree(context(), 64, DType::f16, {});
  tree.build(kv.view(), {});
  for (const uint32_t wanted : {0U, 1U, 40U, 500U, 1999U, 2000U}) {
    Step step{kv, tree, 2, {0.05F, 0.0F}};
    step.queries = attention_queries(2, 64, kv.keys, random);
    step.resident.assign(2, 30.0);  // nothing here matters
    step.read = {5, 6, 7};
    TailEstimate estimate;
    read_on(step, estimate, {.min_rows = wanted, .max_rows = 2000});
    EXPECT_GE(step.read_now().size(), wanted);
    if (wanted <= 3) {
      EXPECT_TRUE(step.later.empty()) << wanted;
    }
    EXPECT_LE(step.read_now().size(), std::max<size_t>(wanted + 200, 3));
  }
}

}  // namespace
}  // namespace keyhole::index::test
