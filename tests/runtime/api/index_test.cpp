// An index by itself through the C API: other search parameters without a build, and what attend() needs of a tail.
#include "keyhole/index.h"

#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kKeys = 400, kGroup = 2, kTop = 20;
constexpr int64_t kDim = 64;

class IndexTest : public ::testing::Test {
 protected:
  struct IndexDeleter {
    void operator()(keyhole_index* index) const { keyhole_index_destroy(index); }
  };
  using IndexPtr = std::unique_ptr<keyhole_index, IndexDeleter>;

  struct Found {
    std::vector<uint32_t> ids = std::vector<uint32_t>(kGroup * kTop);
    uint64_t keys_scored = 0;
    bool operator==(const Found&) const = default;
  };

  IndexPtr create(const char* spec) {
    keyhole_index* index = nullptr;
    EXPECT_OK(keyhole_index_create(engine_.get(), spec, 0, 0, &index));
    return IndexPtr(index);
  }
  void build(keyhole_index* index) {
    const auto k = tensor(keys_, {kKeys, kDim}), v = tensor(values_, {kKeys, kDim});
    ASSERT_OK(keyhole_index_build(index, &k, &v, nullptr, nullptr, 0, nullptr, nullptr));
  }
  IndexPtr built(const char* spec) {
    IndexPtr index = create(spec);
    build(index.get());
    return index;
  }
  Found find(keyhole_index* index) {
    const auto q = tensor(queries_, {kGroup, kDim});
    keyhole_search_options options;
    keyhole_search_options_init(&options);
    options.budget.top_k = kTop;
    keyhole_search_cost cost;
    keyhole_search_cost_init(&cost);
    Found found;
    std::vector<uint32_t> counts(kGroup);
    EXPECT_OK(
        keyhole_index_search(index, &q, &options, found.ids.data(), nullptr, counts.data(), &cost));
    found.keys_scored = cost.keys_scored;
    return found;
  }
  keyhole_status attend(keyhole_index* index, const keyhole_search_options& options) {
    const auto q = tensor(queries_, {kGroup, kDim});
    return keyhole_index_attend(index, &q, &options, o_.data(), lse_.data(), nullptr, nullptr,
                                nullptr);
  }
  static std::string params(keyhole_index* index) {
    keyhole_index_info info;
    keyhole_index_info_init(&info);
    EXPECT_OK(keyhole_index_get_info(index, &info));
    return info.params;
  }

  EnginePtr engine_ = make_engine(small_engine());
  Numbers numbers_{83};
  const std::vector<float> keys_ = numbers_.many(kKeys * kDim),
                           values_ = numbers_.many(kKeys * kDim),
                           queries_ = numbers_.many(kGroup * kDim);
  std::vector<float> o_ = std::vector<float>(kGroup * kDim), lse_ = std::vector<float>(kGroup);
};

TEST_F(IndexTest, ABuiltOneSearchesByOtherParameters) {
  const IndexPtr flat = built("flat"), index = built("ivf:C=8,probe=1");
  const Found all = find(flat.get()), one = find(index.get());
  EXPECT_NE(one.ids, all.ids) << "of 8 lists one is searched";
  ASSERT_OK(keyhole_index_set_spec(index.get(), "ivf:C=8,probe=8"));
  const Found eight = find(index.get());
  EXPECT_EQ(eight.ids, all.ids);
  EXPECT_GT(eight.keys_scored, one.keys_scored);
  EXPECT_NE(params(index.get()).find("probe=8"), std::string::npos) << params(index.get());
  ASSERT_OK(keyhole_index_set_spec(index.get(), "ivf:C=8,probe=1"));
  EXPECT_EQ(find(index.get()), one);
}

TEST_F(IndexTest, WhatABuildHasFixedIsRefusedAndNothingChanges) {
  const IndexPtr index = built("ivf:C=8,probe=1");
  const Found before = find(index.get());
  const std::string spec = params(index.get());
  const char* refused[][2] = {{"ivf:C=9,probe=8", "C=9"},
                              {"flat", "flat"},
                              {"ivf:C=8,probe=x", "probe=x"},
                              {"nothing", "nothing"}};
  for (const auto& [other, part] : refused) {
    EXPECT_EQ(keyhole_index_set_spec(index.get(), other), KEYHOLE_INVALID_ARGUMENT) << other;
    expect_error_text(part);
    EXPECT_EQ(find(index.get()), before) << other;
    EXPECT_EQ(params(index.get()), spec) << other;
  }
  EXPECT_EQ(keyhole_index_set_spec(index.get(), nullptr), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("spec is NULL");
  EXPECT_EQ(keyhole_index_set_spec(nullptr, "flat"), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("index is NULL");
  // What a build makes of it later is what it was made with, too.
  build(index.get());
  EXPECT_EQ(find(index.get()), before);
}

TEST_F(IndexTest, BeforeABuildItTakesAnySpec) {
  const IndexPtr index = create("flat"), other = built("ivf:C=9,probe=2");
  EXPECT_EQ(keyhole_index_set_spec(index.get(), "nothing"), KEYHOLE_INVALID_ARGUMENT);
  for (const char* spec : {"hnsw:M=6", "ivf:C=9,probe=2"}) {
    ASSERT_OK(keyhole_index_set_spec(index.get(), spec));
    EXPECT_EQ(params(index.get()), spec);
  }
  build(index.get());
  EXPECT_EQ(find(index.get()), find(other.get()));
  EXPECT_EQ(params(index.get()), params(other.get()));
}

TEST_F(IndexTest, ATailOrATargetNeedsPartitionsAndBothStatesOfTheRest) {
  const IndexPtr index = built("flat");
  keyhole_search_options tail;
  keyhole_search_options_init(&tail);
  tail.budget.top_k = kTop;
  keyhole_search_options target = tail;
  tail.budget.tail = KEYHOLE_TAIL_SECOND;
  target.budget.mass_target = 0.5F;
  for (const keyhole_search_options& options : {tail, target}) {
    EXPECT_EQ(attend(index.get(), options), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("keyhole_index_build_tail");
  }
  ASSERT_OK(keyhole_index_build_tail(index.get(), KEYHOLE_AUTO, nullptr, nullptr));
  const std::vector<float> other_o(kGroup * kDim), other_lse(kGroup);
  for (keyhole_search_options options : {tail, target}) {
    EXPECT_OK(attend(index.get(), options));
    options.other_o = other_o.data();
    EXPECT_EQ(attend(index.get(), options), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("of other_o and other_lse one is NULL");
    options.other_lse = other_lse.data();
    EXPECT_OK(attend(index.get(), options));
    options.other_o = nullptr;
    EXPECT_EQ(attend(index.get(), options), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("of other_o and other_lse one is NULL");
  }
}

}  // namespace
}  // namespace keyhole::test
