// Scores of records and of things in order, worked out by hand.
#include "tools/tasks/ruler/list_score.h"

#include <gtest/gtest.h>

#include "tools/tasks/ruler/score.h"

namespace keyhole::tools::ruler {
namespace {

const std::vector<std::string> kTwoRecords = {R"({"a": 12, "b": 3})", R"({"a": 15, "b": 3})"};

double records(const std::string& answer) {
  const double score = score_records(answer, kTwoRecords);
  EXPECT_EQ(ruler::score(Scoring::records, answer, kTwoRecords), score);
  return score;
}

TEST(ListScore, RecordsAreExactOrWrong) {
  EXPECT_EQ(records(R"({"a": 12, "b": 3}, {"a": 15, "b": 3}])"), 1.0);
  // In any order, fields too; spaces, line ends and quotation marks mean nothing.
  EXPECT_EQ(records("{\"b\":\"3\",\n \"a\":15}\n{\"a\": \"12\", \"b\": 3} and no more."), 1.0);
  // One of two, and nothing wrong: 2 * 1 / (2 + 1).
  EXPECT_DOUBLE_EQ(records(R"({"a": 12, "b": 3})"), 2.0 / 3.0);
  // A wrong digit, a field too much or too little: 2 * 1 / (2 + 2).
  EXPECT_DOUBLE_EQ(records(R"({"a": 12, "b": 3}, {"a": 16, "b": 3}])"), 0.5);
  EXPECT_DOUBLE_EQ(records(R"({"a": 12, "b": 3}, {"a": 15, "b": 3, "c": 1}])"), 0.5);
  EXPECT_DOUBLE_EQ(records(R"({"a": 12, "b": 3}, {"a": 15}])"), 0.5);
  // What is too much counts: 2 * 2 / (2 + 4). What is repeated counts once.
  EXPECT_DOUBLE_EQ(
      records(
          R"({"a": 12, "b": 3}, {"a": 15, "b": 3}, {"a": 1, "b": 3}, {"a": 2, "b": 3}, {"a": 1, "b": 3})"),
      4.0 / 6.0);
  // Cut off, no JSON, nothing.
  EXPECT_DOUBLE_EQ(records(R"({"a": 12, "b": 3}, {"a": 15, "b")"), 2.0 / 3.0);
  EXPECT_EQ(records(R"({a: 12, b: 3})"), 0.0);
  EXPECT_EQ(records("} {"), 0.0);
  EXPECT_EQ(records(""), 0.0);
  EXPECT_EQ(records("{\"a\": \"\xFF\", \"b\": 3}"), 0.0);
  // The outer braces of a list in an object do not hide the records in it.
  EXPECT_EQ(records(R"({"sales": [{"a": 12, "b": 3}, {"a": 15, "b": 3}]})"), 1.0);
}

TEST(ListScore, OrderCounts) {
  const std::vector<std::string> four = {"a-b", "c-d", "e-f", "g-h"};
  const auto ordered = [&](const std::string& answer) {
    const double score = score_ordered(answer, four);
    EXPECT_EQ(ruler::score(Scoring::ordered, answer, four), score);
    return score;
  };
  EXPECT_EQ(ordered("a-b, c-d, e-f and g-h."), 1.0);
  EXPECT_EQ(ordered("The A-B; then the C-D, the e-f, the g-h"), 1.0);
  EXPECT_EQ(ordered("1. a-b\n2. c-d\n3. e-f"), 0.75);
  EXPECT_EQ(ordered("c-d, a-b, e-f, g-h"), 0.75);  // two have changed places
  EXPECT_EQ(ordered("g-h, e-f, c-d, a-b"), 0.25);
  EXPECT_EQ(ordered("a-b, x-y, c-d, e-f, g-h"), 0.8);       // one too much
  EXPECT_EQ(ordered("a-b, c-d, e-f, g-h, a-b, c-d"), 1.0);  // the first mention counts
  EXPECT_EQ(ordered("a-b- -c-d x--"), 0.0);  // neither a thing: no letters behind or before
  EXPECT_EQ(ordered("a, b"), 0.0);
  EXPECT_EQ(ordered(""), 0.0);
}

TEST(ListScore, FirstWords) {
  EXPECT_EQ(score(Scoring::first_word, "amber.\nviolin: old", {"amber"}), 1.0);
  EXPECT_EQ(score(Scoring::first_word, "\"amber\"", {"amber"}), 1.0);
  EXPECT_EQ(score(Scoring::first_word, "old amber", {"amber"}), 0.0);
  EXPECT_EQ(score(Scoring::first_word, "ambers", {"amber"}), 0.0);
  EXPECT_EQ(score(Scoring::first_word, "", {"amber"}), 0.0);
}

}  // namespace
}  // namespace keyhole::tools::ruler
