// The copy task: every passage stands in the prose, its cue once, and passages do not overlap.
#include "tools/tasks/copy_task.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

const std::string& copy_haystack() {
  static const std::string text = [] {
    std::string prose;
    for (int i = 0; i < 2000; ++i) prose += "Sentence " + std::to_string(i) + " of a long story. ";
    return prose;
  }();
  return text;
}

CopyTaskOptions copy_options(size_t bytes, size_t passages, uint64_t seed) {
  return {.context_bytes = bytes, .passages = passages, .seed = seed, .haystack = copy_haystack()};
}

TEST(CopyTask, EveryPassageHasItsOwnPlace) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const size_t bytes = 400 + 997 * seed;
    const size_t passages = 1 + seed % max_copy_passages(bytes);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << bytes << " bytes");
    const CopyTask task = make_copy_task(copy_options(bytes, passages, seed));
    EXPECT_EQ(task.context.size(), bytes);
    EXPECT_NE(copy_haystack().find(task.context), std::string::npos);
    ASSERT_EQ(task.passages.size(), passages);
    std::vector<size_t> places;
    for (const CopyPassage& passage : task.passages) {
      EXPECT_EQ(passage.text.size(), 160U);
      EXPECT_EQ(task.context.find(passage.text), passage.place);
      const std::string cue = passage.text.substr(0, 24);
      EXPECT_EQ(task.context.find(cue), passage.place);
      EXPECT_EQ(task.context.find(cue, passage.place + 1), std::string::npos);
      places.push_back(passage.place);
    }
    std::sort(places.begin(), places.end());
    for (size_t i = 1; i < places.size(); ++i) EXPECT_GE(places[i], places[i - 1] + 160);
    EXPECT_LE(places.back() + 160, bytes);
  }
}

TEST(CopyTask, PassagesLieEverywhere) {
  std::vector<int> quarter(4, 0);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const CopyTask task = make_copy_task(copy_options(20000, 20, seed));
    for (const CopyPassage& passage : task.passages) {
      ++quarter[passage.place * 4 / task.context.size()];
    }
  }
  for (const int count : quarter) EXPECT_NEAR(count, 250, 80);
}

TEST(CopyTask, IsTheSameForTheSameSeedOnly) {
  const auto places = [](uint64_t seed) {
    const CopyTask task = make_copy_task(copy_options(8000, 9, seed));
    std::vector<size_t> out{copy_haystack().find(task.context)};
    for (const CopyPassage& passage : task.passages) out.push_back(passage.place);
    return out;
  };
  EXPECT_EQ(places(1), places(1));
  EXPECT_NE(places(1), places(2));
  // Of the definition (SplitMix64, unbiased), computed by another program.
  EXPECT_EQ(places(1),
            (std::vector<size_t>{47209, 5782, 3699, 1615, 6313, 7075, 4450, 284, 512, 3535}));
}

TEST(CopyTask, RefusesWhatCannotBe) {
  EXPECT_THROW((void)make_copy_task(copy_options(319, 1, 0)), UsageError);
  EXPECT_THROW((void)make_copy_task(copy_options(3200, 11, 0)), UsageError);
  EXPECT_THROW((void)make_copy_task(copy_options(3200, 0, 0)), UsageError);
  CopyTaskOptions options = copy_options(4000, 4, 0);
  options.haystack = options.haystack.substr(0, 3999);
  EXPECT_THROW((void)make_copy_task(options), UsageError);
  const std::string same(5000, 'x');
  options.haystack = same;
  EXPECT_THROW((void)make_copy_task(options), UsageError);
}

}  // namespace
}  // namespace keyhole::tools
