// Parts of a decoded text, worked out by hand.
#include "tools/commands/eval/kld_bins.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "runtime/files/json.h"

namespace keyhole::tools {
namespace {

TEST(KldBins, CoverAllTokensOnceInOrder) {
  KldTokens tokens;
  for (int i = 1; i <= 10; ++i) {
    tokens.nats.push_back(i);
    tokens.same_best.push_back(i % 5 != 0);  // tokens 5 and 10 are others
  }
  const std::vector<KldBin> bins = kld_bins(tokens, std::vector<size_t>{3, 6, 10});
  ASSERT_EQ(bins.size(), 3U);
  EXPECT_EQ(bins[0].begin, 0U);
  EXPECT_EQ(bins[0].end, 3U);
  EXPECT_EQ(bins[1].begin, 3U);
  EXPECT_EQ(bins[1].end, 6U);
  EXPECT_EQ(bins[2].end, 10U);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(bin_end(10, 3, i), bins[i].end);
  EXPECT_EQ(bins[0].nats.mean, 2.0);
  EXPECT_EQ(bins[1].nats.mean, 5.0);
  EXPECT_EQ(bins[2].nats.mean, 8.5);
  EXPECT_EQ(bins[2].nats.largest, 10.0);
  EXPECT_EQ(bins[0].same_share, 1.0);
  EXPECT_DOUBLE_EQ(bins[1].same_share, 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(bins[2].same_share, 0.75);
  EXPECT_TRUE(std::isnan(bins[0].output_error));
  EXPECT_EQ(kld_bins(tokens, std::vector<size_t>{10}).front().nats.mean, 5.5);
  std::vector<size_t> ends(10);
  std::iota(ends.begin(), ends.end(), 1);
  const auto each = kld_bins(tokens, ends);
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(each[i].nats.mean, static_cast<double>(i + 1));
}

TEST(KldBins, OutputErrorsAreThoseOfThePart) {
  KldTokens tokens;
  tokens.nats = {1, 1, 1};
  tokens.same_best = {true, true, true};
  // Sums 0.4, 0.4, 1.6 of 4, 4, 10 audits: the second part had none.
  tokens.audited = {{4, 0.1}, {4, 0.1}, {10, 0.16}};
  const std::vector<KldBin> bins = kld_bins(tokens, std::vector<size_t>{1, 2, 3});
  EXPECT_NEAR(bins[0].output_error, 0.1, 1e-12);
  EXPECT_TRUE(std::isnan(bins[1].output_error));
  EXPECT_NEAR(bins[2].output_error, 0.2, 1e-12);

  const nlohmann::ordered_json written = kld_bins_json(bins);
  EXPECT_EQ(written[0]["begin"], 0);
  EXPECT_EQ(written[2]["end"], 3);
  EXPECT_EQ(written[0]["kld"]["p99_9"], 1.0);
  EXPECT_FALSE(written[1].contains("output_error"));
  KldBinTable table(true);
  table.add("ivf", bins);
  for (const char* part : {"0 to 1", "2 to 3", "0.2\n", "100 %", "output error"}) {
    EXPECT_NE(table.text().find(part), std::string::npos) << part << "\n" << table.text();
  }
  KldBinTable plain(false);
  plain.add("ivf", bins);
  EXPECT_EQ(plain.text().find("output error"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
