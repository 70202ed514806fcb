// blocks: representatives are those of the definition, and so are the blocks that they find.
#include "tools/rivals/block_representatives.h"

#include <gtest/gtest.h>

#include "tests/tools/rivals/rival_case.h"

namespace keyhole::tools {
namespace {

// The mean inner product of a key with the training queries at positions in (from, to].
double mean_product(const RivalCase& on, size_t row, size_t from, size_t to) {
  double sum = 0;
  size_t count = 0;
  for (size_t t = 0; t < on.training_positions.size(); ++t) {
    if (on.training_positions[t] <= from || on.training_positions[t] > to) continue;
    for (size_t r = t * on.shape.group; r < (t + 1) * on.shape.group; ++r) {
      for (size_t c = 0; c < on.shape.dim; ++c) {
        sum += double{on.training[r * on.shape.dim + c]} * on.keys[row * on.shape.dim + c];
      }
      ++count;
    }
  }
  return count == 0 ? NAN : sum / static_cast<double>(count);
}

TEST(BlockRepresentatives, ScoresAreMeansOverTheQueriesBehindAKey) {
  std::mt19937 random(std::random_device{}());
  constexpr size_t kFirst = 10;
  constexpr size_t kEnd = 1000000;
  RivalCase on(random, 90, 16, 2, 1, 5);
  on.training_positions = {20, 45, 46, 70, 85};  // none is behind the last rows
  RivalData data = on.data();
  data.first_token = kFirst;
  for (const size_t local : {size_t{12}, size_t{40}, kEnd}) {
    const std::vector<float> scores = representative_scores(data, local);
    ASSERT_EQ(scores.size(), 90U);
    for (size_t row = 0; row < 90; ++row) {
      const size_t token = kFirst + row;
      double expected = mean_product(on, row, token, token + local);
      if (std::isnan(expected)) expected = mean_product(on, row, token, kEnd);
      if (std::isnan(expected)) expected = mean_product(on, row, 0, kEnd);
      EXPECT_NEAR(scores[row], expected, 1e-4) << row << ", local " << local;
    }
  }
  data.training_positions = {};
  const std::vector<float> scores = representative_scores(data, 12);
  for (size_t row = 0; row < 90; ++row) {
    EXPECT_NEAR(scores[row], mean_product(on, row, 0, kEnd), 1e-4);
  }
}

TEST(BlockRepresentatives, BlocksAreTakenByTheirRepresentatives) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr size_t kSize = 10;
  constexpr size_t kKept = 3;
  const RivalCase on(random, 94, 16, 2, 4);
  const auto rival = build_rival(on, "blocks:size=10,representatives=3,budget=25");
  const std::vector<float> scores = representative_scores(on.data(), 4096);
  for (size_t step = 0; step < 4; ++step) {
    std::vector<std::pair<double, size_t>> blocks;
    for (size_t begin = 0; begin < 94; begin += kSize) {
      std::vector<uint32_t> members;
      for (size_t row = begin; row < std::min<size_t>(94, begin + kSize); ++row) {
        members.push_back(static_cast<uint32_t>(row));
      }
      std::sort(members.begin(), members.end(),
                [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
      double relevance = 0;
      for (size_t i = 0; i < kKept; ++i) {
        for (size_t j = 0; j < 2; ++j) relevance += on.product(step * 2 + j, members[i]);
      }
      blocks.emplace_back(-relevance, begin);
    }
    std::sort(blocks.begin(), blocks.end());
    std::set<uint32_t> expected;
    for (size_t b = 0; b < 2; ++b) {  // 25 keys: two blocks
      for (size_t row = blocks[b].second; row < std::min<size_t>(94, blocks[b].second + kSize);
           ++row) {
        expected.insert(static_cast<uint32_t>(row));
      }
    }
    RivalAnswer answer;
    answer.reset(2);
    rival->search(on.query(step * 2), 2, 0, answer);
    for (size_t j = 0; j < 2; ++j) {
      const std::vector<uint32_t>& rows = answer.heads[j].rows;
      EXPECT_EQ(std::set<uint32_t>(rows.begin(), rows.end()), expected);
    }
    // All rows of the blocks taken, and the representatives of the other eight.
    EXPECT_EQ(answer.keys_scored, 2 * (expected.size() + 8 * kKept));
    EXPECT_EQ(rival->bytes(), 30U * 16 * 2);
  }
}

}  // namespace
}  // namespace keyhole::tools
