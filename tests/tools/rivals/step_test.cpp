// A rival's step against attention in double precision.
#include <stdexcept>

#include "tools/rivals/step.h"

#include <gtest/gtest.h>

#include "tests/sanitized.h"
#include "tests/tools/rivals/rival_case.h"

namespace keyhole::tools {
namespace {

void expect_state(const RivalCase& on, const RivalStep& step, size_t query_row, size_t head,
                  const RivalCase::Sums& sums) {
  EXPECT_NEAR(step.lse[head], std::log(sums.weights), 1e-4);
  for (size_t c = 0; c < on.shape.dim; ++c) {
    EXPECT_NEAR(step.o[head * on.shape.dim + c], sums.values[c] / sums.weights, 2e-4)
        << "query " << query_row << ", component " << c;
  }
}

TEST(RivalStep, WithABudgetForAllKeysAttentionIsExact) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const char* const rivals[] = {"pages:size=7,budget=100000",
                                "blocks:size=9,representatives=2,budget=100000",
                                "random:budget=100000"};
  for (const size_t group : {1, 4}) {
    for (const float softcap : {0.0F, 2.0F}) {
      RivalCase on(random, 100 + random() % 60, 32, group);
      on.rule.softcap = softcap;
      for (const char* text : rivals) {
        SCOPED_TRACE(text);
        const auto rival = build_rival(on, text);
        ASSERT_NE(rival, nullptr);
        RivalStep step(*rival, on.stored, on.shape, on.rule, 1);
        for (size_t i = 0; i < 3; ++i) {
          step.run(on.query(i * group));
          EXPECT_EQ(step.distinct.size(), on.shape.rows);
          EXPECT_EQ(step.keys_scored, on.shape.rows * group);
          EXPECT_GE(step.bytes_read, on.shape.rows * on.shape.dim * 4);
          for (size_t j = 0; j < group; ++j) {
            expect_state(on, step, i * group + j, j, on.sums(i * group + j));
          }
        }
      }
    }
  }
}

// What a step attends, and the state over it, without any particular rival.
class Scripted : public Rival {
 public:
  std::vector<RivalRows> heads;
  bool own_rows = false;

  void build(const RivalData& /*data*/) override {}
  void set_spec(const RivalSpec& /*spec*/) override {}
  void search(const float* /*queries*/, size_t /*group*/, size_t /*k*/,
              RivalAnswer& answer) override {
    answer.heads = heads;
    answer.own_rows = own_rows;
    answer.bytes_read = 1000;
  }
  [[nodiscard]] uint64_t bytes() const override { return 0; }
};

TEST(RivalStep, HeadsAttendTheUnionUnlessRowsAreTheirOwn) {
  std::mt19937 random(5);
  const RivalCase on(random, 50, 16, 2);
  Scripted rival;
  rival.heads = {{{3, 8, 40}, {}}, {{8, 11}, {}}};
  RivalStep step(rival, on.stored, on.shape, on.rule, 3);
  step.run(on.query(0));
  EXPECT_EQ(std::set<uint32_t>(step.distinct.begin(), step.distinct.end()),
            (std::set<uint32_t>{3, 8, 11, 40}));
  EXPECT_EQ(step.distinct.size(), 4U);
  EXPECT_EQ(step.keys_scored, 8U);
  EXPECT_EQ(step.bytes_read, 1000U + 4 * 2 * 16 * 2);
  for (size_t j = 0; j < 2; ++j) {
    expect_state(on, step, j, j, on.sums(j, {3, 8, 11, 40}));
    EXPECT_EQ(step.attended_by(j).size(), 4U);
  }

  // Weighted: w = 2 counts a row twice, as a row of its own.
  rival.own_rows = true;
  const auto log2 = static_cast<float>(std::log(2.0));
  rival.heads = {{{3, 8, 40}, {0, log2, 0}}, {{}, {}}};
  step.run(on.query(0));
  EXPECT_EQ(step.distinct.size(), 3U);
  EXPECT_EQ(step.keys_scored, 3U);
  EXPECT_EQ(step.attended_by(0).size(), 3U);
  EXPECT_EQ(step.attended_by(1).size(), 0U);
  expect_state(on, step, 0, 0, on.sums(0, {3, 8, 8, 40}));
  EXPECT_EQ(step.lse[1], -INFINITY);
  for (size_t c = 0; c < 16; ++c) EXPECT_EQ(step.o[16 + c], 0.0F);
}

TEST(RivalStep, RowsThatAreNotThereAreRefused) {
  std::mt19937 random(5);
  const RivalCase on(random, 20, 16, 1);
  Scripted rival;
  rival.heads = {{{20}, {}}};
  RivalStep step(rival, on.stored, on.shape, on.rule, 3);
  EXPECT_THROW(step.run(on.query(0)), std::runtime_error);
}

TEST(StoredMatrix, HoldsWhatEachTypeCan) {
  const std::vector<float> numbers = {1.0F, -0.1F, 3.14159265F, 1000.7F, 0.0F, 5.0F};
  const double units[] = {0, 0x1p-11, 0x1p-8};
  const ElementType types[] = {ElementType::f32, ElementType::f16, ElementType::bf16};
  for (size_t t = 0; t < 3; ++t) {
    const StoredMatrix matrix(types[t], numbers.data(), 2, 3);
    EXPECT_EQ(matrix.rows(), 2U);
    EXPECT_EQ(matrix.row_bytes(), t == 0 ? 12U : 6U);
    EXPECT_EQ(matrix.bytes(), 2 * matrix.row_bytes());
    float row[3];
    double dot = 0;
    for (size_t r = 0; r < 2; ++r) {
      matrix.read(r, row);
      for (size_t c = 0; c < 3; ++c) {
        EXPECT_NEAR(row[c], numbers[r * 3 + c], units[t] * std::abs(numbers[r * 3 + c]));
        if (r == 1) dot += double{row[c]} * (c + 1.0);
      }
    }
    const float x[] = {1, 2, 3};
    float product = 0;
    matrix.products(x, 1, 2, &product);
    EXPECT_NEAR(product, dot, 1e-3);
  }
  EXPECT_THROW(StoredMatrix(ElementType::i32, numbers.data(), 2, 3), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
