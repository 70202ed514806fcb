// Scores, worked out by hand.
#include "tools/tasks/ruler/score.h"

#include <gtest/gtest.h>

namespace keyhole::tools::ruler {
namespace {

TEST(RulerScore, CleansPredictions) {
  EXPECT_EQ(cleaned("  \n a\tb\x01 c\r\n"), "a\nb\n c");
  EXPECT_EQ(cleaned("\x01 a \x02"), "a");
  EXPECT_EQ(cleaned(" \n "), "");
}

TEST(RulerScore, SharesOfReferences) {
  const std::vector<std::string> four = {"1111111", "2222222", "3333333", "4444444"};
  EXPECT_EQ(score(Scoring::all, "1111111, 2222222 and 3333333.", four), 0.75);
  EXPECT_EQ(score(Scoring::all, "11111112222222 3333333 4444444", four),
            1.0);  // contained, that is all
  EXPECT_EQ(score(Scoring::all, "", four), 0.0);
  EXPECT_EQ(score(Scoring::all, "the ABCDE, fghij", {"abcde", "FGHIJ"}), 1.0);
  EXPECT_EQ(score(Scoring::part, "It was Denver Broncos", {"denver broncos", "Broncos of Denver"}),
            1.0);
  EXPECT_EQ(score(Scoring::part, "It was Denver", {"denver broncos", "broncos"}), 0.0);
  // U+00C9 and U+00E9 are one letter in two cases; what is not UTF-8 is no letter.
  EXPECT_EQ(score(Scoring::part, "caf\xC3\x89", {"Caf\xC3\xA9"}), 1.0);
  EXPECT_EQ(score(Scoring::all, "\xFF\xC3 x", {"X"}), 1.0);
}

TEST(RulerScore, FirstNumbersAndWords) {
  EXPECT_EQ(score(Scoring::first_number, "It is 12345. Or 54321", {"12345"}), 1.0);
  EXPECT_EQ(score(Scoring::first_number, "54321 or 12345", {"12345"}), 0.0);
  EXPECT_EQ(score(Scoring::first_number, "123456", {"12345"}), 0.0);
  EXPECT_EQ(score(Scoring::first_number, "none", {"12345"}), 0.0);
  EXPECT_EQ(score(Scoring::word, "{\"value\":\"ab-cd\"}", {"ab-cd"}), 1.0);
  EXPECT_EQ(score(Scoring::word, "ab-cde", {"ab-cd"}), 0.0);
  EXPECT_EQ(score(Scoring::word, "is: AB-CD", {"ab-cd"}), 0.0);
}

}  // namespace
}  // namespace keyhole::tools::ruler
