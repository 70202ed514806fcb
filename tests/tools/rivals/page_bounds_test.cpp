// pages: bounds are bounds, and the pages of the largest are taken.
#include <tuple>

#include "tools/rivals/page_bounds.h"

#include <gtest/gtest.h>

#include "tests/sanitized.h"
#include "tests/tools/rivals/rival_case.h"

namespace keyhole::tools {
namespace {

TEST(PageBounds, NoKeyScoresAboveItsPagesBound) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (uint32_t i = 0; i < test::cases(40); ++i) {
    const size_t rows = 1 + random() % 200;
    const size_t dim = 1 + random() % 70;
    const size_t size = 1 + random() % 20;
    const RivalCase on(random, rows, dim, 1);
    PageBounds bounds(ElementType::f16, on.keys.data(), rows, dim, size);
    ASSERT_EQ(bounds.pages(), (rows + size - 1) / size);
    std::vector<float> upper(bounds.pages());
    bounds.of(on.query(0), upper.data());
    for (size_t page = 0; page < bounds.pages(); ++page) {
      double bound = 0;  // by the definition
      double length = 0;
      for (size_t c = 0; c < dim; ++c) {
        double largest = -INFINITY;
        for (size_t row = page * size; row < std::min(rows, (page + 1) * size); ++row) {
          largest = std::max(largest, double{on.query(0)[c]} * on.keys[row * dim + c]);
        }
        bound += largest;
        length += std::abs(largest);
      }
      EXPECT_NEAR(upper[page], bound, 1e-5 * (1 + length));
      for (size_t row = page * size; row < std::min(rows, (page + 1) * size); ++row) {
        EXPECT_GE(upper[page] + 1e-5 * (1 + length), on.product(0, row));
      }
    }
    // A page of one key is bound by its score.
    PageBounds single(ElementType::f16, on.keys.data(), rows, dim, 1);
    std::vector<float> scores(rows);
    single.of(on.query(0), scores.data());
    for (size_t row = 0; row < rows; ++row) EXPECT_NEAR(scores[row], on.product(0, row), 1e-3);
  }
}

TEST(PageBounds, TheBestPagesFillTheBudget) {
  std::mt19937 random(7);
  const RivalCase on(random, 103, 16, 2);
  // Pages of one key are ranked by scores: the budget holds the best keys.
  auto rival = build_rival(on, "pages:size=1,budget=12");
  RivalAnswer answer;
  answer.reset(2);
  rival->search(on.query(0), 2, 0, answer);
  for (size_t j = 0; j < 2; ++j) {
    const std::vector<uint32_t>& rows = answer.heads[j].rows;
    EXPECT_EQ(std::set<uint32_t>(rows.begin(), rows.end()), on.best(j, 12));
  }
  EXPECT_EQ(answer.bytes_read, 103U * 16 * 2 * 2);
  EXPECT_EQ(rival->bytes(), answer.bytes_read);

  // Whole pages, not more than the budget holds, but one.
  rival = build_rival(on, "pages:size=10,budget=39");
  for (const auto& [budget, least, most] : {std::tuple{39, 23, 30}, std::tuple{3, 3, 10},
                                            std::tuple{102, 93, 103}, std::tuple{103, 103, 103}}) {
    rival->set_spec(
        RivalSpec::parse("pages:size=10,budget=" + std::to_string(budget), rival_types()));
    answer.reset(2);
    rival->search(on.query(0), 2, 0, answer);
    const auto rows = static_cast<int>(answer.heads[0].rows.size());
    EXPECT_GE(rows, least) << budget;
    EXPECT_LE(rows, most) << budget;
  }
}

}  // namespace
}  // namespace keyhole::tools
