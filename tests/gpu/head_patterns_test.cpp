// Patterns of a prompt's attention: dense where they take everything, chunks beside the whole, and heads that have
// patterns of their own beside all heads by each of these.
#include <string>
#include <vector>

#include "gpu/cuda/prefill/prompt_lists.h"
#include "tests/gpu/prompt_layer.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

using Case = PromptCase;

constexpr PromptChoice kChoices[] = {PromptChoice::sampled, PromptChoice::pooled,
                                     PromptChoice::vertical_slash};

class HeadPatternsTest : public PromptLayerTest {
 protected:
  static constexpr uint32_t kTokens = 1500, kQueries = 700;

  /// The outputs of one head alone.
  std::vector<float> of_head(const std::vector<float>& out, uint32_t head) const {
    const uint32_t dim = GetParam().dim;
    std::vector<float> x;
    for (uint32_t t = 0; t < kQueries; ++t) {
      const auto at = out.begin() + static_cast<ptrdiff_t>((size_t{t} * heads() + head) * dim);
      x.insert(x.end(), at, at + dim);
    }
    return x;
  }
};

TEST_P(HeadPatternsTest, AreDenseWhereTheyTakeEverything) {
  const Case& c = GetParam();
  fill(kQueries, kTokens);
  const auto prompt = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
  const std::vector<float> dense = attend(*prompt, PromptPattern{}, kQueries);
  for (const PromptChoice choice : kChoices) {
    SCOPED_TRACE("choice " + std::to_string(static_cast<int>(choice)));
    PromptPattern all = pattern_of(choice);
    const PromptBlocks before = prompt->blocks();
    const std::vector<float> some = attend(*prompt, all, kQueries);
    EXPECT_LT(error(some, dense), 1.0);
    EXPECT_GT(error(some, dense), 1e-4) << "everything was attended";
    const PromptBlocks after = prompt->blocks();
    EXPECT_LT(after.attended - before.attended, after.seen - before.seen);
    all.mass = 1.0F;
    all.blocks = kTokens / 64 + 1;
    all.columns = kTokens;
    // With a mass, the lightest bin may be left out.
    EXPECT_LT(error(attend(*prompt, all, kQueries), dense), all.stride != 0 ? 1e-2 : 1e-3);
    all.mass = 0.0F;
    all.columns = all.slashes = all.blocks = 0;
    all.dense_rows = kTokens;
    EXPECT_EQ(attend(*prompt, all, kQueries), dense);
    // What no query gives a weight of 2^-60 of its largest is less than fp32 keeps.
    all = pattern_of(choice);
    all.skip = 60.0F;
    EXPECT_LT(error(attend(*prompt, all, kQueries), some), 1e-5);
  }
  PromptPattern skips;
  skips.skip = 60.0F;
  EXPECT_LT(error(attend(*prompt, skips, kQueries), dense), 1e-5);
}

TEST_P(HeadPatternsTest, ChunksOfWholeTilesChooseAlike) {
  const Case& c = GetParam();
  fill(kQueries, kTokens);
  const auto prompt = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
  // A block that a chunk does not have to its end has another mean, where it is near: others' shares change a little.
  const PromptPattern means = pattern_of(PromptChoice::pooled);
  EXPECT_LT(error(attend(*prompt, means, 256), attend(*prompt, means, kQueries)), 0.3);
  // Each chunk has lines of its own: those that it has by itself.
  constexpr uint32_t kChunk = 100;
  static_assert(kQueries % kChunk == 0);
  const PromptPattern lines = pattern_of(PromptChoice::vertical_slash);
  const PromptBlocks before = prompt->blocks();
  const std::vector<float> chunks = attend(*prompt, lines, kChunk);
  const PromptBlocks after = prompt->blocks();
  const DeviceBuffer out(q_.size() * sizeof(float));
  uint64_t attended = 0;
  for (uint32_t first = 0; first < kQueries; first += kChunk) {
    const auto fresh = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
    fresh->attend(stretch(first, kChunk, out.as<float>()), lines, nullptr);
    attended += fresh->blocks().attended;  // waits
  }
  EXPECT_EQ(chunks, download(out.as<float>(), q_.size()));
  EXPECT_EQ(after.attended - before.attended, attended);
  EXPECT_GT(error(chunks, attend(*prompt, lines, kQueries)), 1e-4) << "lines of all queries";
}

TEST_P(HeadPatternsTest, SlicesAttendAsTheWholeDoes) {
  const Case& c = GetParam();
  // Whole tiles, behind whole blocks.
  constexpr uint32_t kOfTiles = 5 * kListQueries;
  fill(kOfTiles, 13 * kListRows + kOfTiles);
  const PromptShape shape{heads(), c.kv_heads, c.dim};
  const auto whole = make_cuda_prompt(0, shape);
  // One tile at a time, and two; weights of lines head by head.
  const auto single = make_cuda_prompt(0, shape, {1, 1}),
             pairs = make_cuda_prompt(0, shape, {1, 2});
  std::vector<std::vector<PromptPattern>> cases;
  for (const PromptChoice choice : kChoices) cases.push_back({pattern_of(choice)});
  cases.emplace_back();
  for (uint32_t h = 0; h < heads(); ++h)
    cases.back().push_back(h % 5 == 4 ? PromptPattern{} : pattern_of(kChoices[h % 5]));
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::vector<float> out = attend(*whole, cases[i], kOfTiles);
    EXPECT_EQ(attend(*single, cases[i], kOfTiles), out) << "case " << i;
    EXPECT_EQ(attend(*pairs, cases[i], kOfTiles), out) << "case " << i;
  }
  EXPECT_EQ(single->blocks().attended, whole->blocks().attended);
  EXPECT_EQ(pairs->blocks().seen, whole->blocks().seen);
}

TEST_P(HeadPatternsTest, EachHeadAttendsByItsOwn) {
  const Case& c = GetParam();
  fill(kQueries, kTokens);
  const auto prompt = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
  std::vector<PromptPattern> kinds = {PromptPattern{}};
  for (const PromptChoice choice : kChoices) kinds.push_back(pattern_of(choice));
  kinds.push_back(pattern_of(PromptChoice::vertical_slash));
  kinds.back().columns = 30;
  kinds.back().slashes = 1;
  kinds.back().queries = 20;
  kinds.push_back(pattern_of(PromptChoice::pooled));
  kinds.back().blocks = 3;
  kinds.back().skip = 5.0F;
  std::vector<std::vector<float>> alone;
  for (const PromptPattern& kind : kinds) alone.push_back(attend(*prompt, kind, kQueries));
  // Every head by every pattern in turn, beside others.
  for (size_t shift = 0; shift < kinds.size(); ++shift) {
    std::vector<PromptPattern> patterns;
    patterns.reserve(heads());
    for (uint32_t h = 0; h < heads(); ++h) patterns.push_back(kinds[(h + shift) % kinds.size()]);
    const std::vector<float> out = attend(*prompt, patterns, kQueries);
    for (uint32_t h = 0; h < heads(); ++h) {
      const size_t kind = (h + shift) % kinds.size();
      ASSERT_LT(error(of_head(out, h), of_head(alone[kind], h)), 1e-5)
          << "head " << h << " by pattern " << kind << ", shift " << shift;
    }
  }
  // There are as many patterns as heads, all of them the same.
  const std::vector<PromptPattern> same(heads(), kinds[2]);
  EXPECT_EQ(attend(*prompt, same, kQueries), alone[2]);
}

TEST_P(HeadPatternsTest, RefusesWhatItCannotDo) {
  const Case& c = GetParam();
  fill(10, 20);
  const auto prompt = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
  const auto says = [&](const std::vector<PromptPattern>& patterns) -> std::string {
    try {
      (void)attend(*prompt, patterns, 10);
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      return e.what();
    }
    return "";
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(says({}), "0 patterns"));
  EXPECT_TRUE(has(says(std::vector<PromptPattern>(heads() + 1)), "allowed: 1, or one for each"));
  PromptPattern p = pattern_of(PromptChoice::vertical_slash);
  p.queries = 65;
  EXPECT_TRUE(has(says({p}), "of 65 queries, allowed"));
  p = {};
  p.skip = -1.0F;
  EXPECT_TRUE(has(says({p}), "skip -1"));
  p.skip = NAN;
  EXPECT_TRUE(has(says({p}), "skip"));
}

INSTANTIATE_TEST_SUITE_P(Shapes, HeadPatternsTest,
                         testing::Values(Case{64, 2, 4, DType::f16}, Case{128, 2, 2, DType::bf16},
                                         Case{128, 1, 7, DType::f16, 15.0F},
                                         Case{256, 1, 3, DType::bf16}),
                         name_of);

}  // namespace
}  // namespace keyhole::gpu
