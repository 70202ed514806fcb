// Every function of an index by itself, with the n-th allocation, mapping of memory or thread start failing, for every
// n until none fails: it says OUT_OF_MEMORY, the index answers as before, and the same call succeeds afterwards.
#include "keyhole/index.h"

#include <functional>

#include "tests/runtime/faults/planted_faults.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kKeys = 500, kGroup = 2, kTop = 10;
constexpr int64_t kDim = 64;

struct IndexDeleter {
  void operator()(keyhole_index* i) const { keyhole_index_destroy(i); }
};
using IndexPtr = std::unique_ptr<keyhole_index, IndexDeleter>;

class IndexFault : public ::testing::TestWithParam<const char*> {
 protected:
  struct Found {
    std::vector<uint32_t> ids = std::vector<uint32_t>(kGroup * kTop);
    std::vector<float> o = std::vector<float>(kGroup * kDim), lse = std::vector<float>(kGroup);
    bool operator==(const Found&) const = default;
  };

  keyhole_status build(keyhole_index* index) {
    const auto k = tensor(keys_, {kKeys, kDim}), v = tensor(values_, {kKeys, kDim});
    return keyhole_index_build(index, &k, &v, nullptr, nullptr, 0, nullptr, nullptr);
  }
  static keyhole_status build_tail(keyhole_index* index) {
    return keyhole_index_build_tail(index, 16, nullptr, nullptr);
  }
  keyhole_status find(keyhole_index* index, keyhole_tail_mode tail, Found& found) {
    const auto q = tensor(queries_, {kGroup, kDim});
    keyhole_search_options options;
    keyhole_search_options_init(&options);
    options.budget.top_k = kTop;
    if (const auto s = keyhole_index_search(index, &q, &options, found.ids.data(), scores_.data(),
                                            counts_.data(), nullptr)) {
      return s;
    }
    options.budget.tail = tail;
    return keyhole_index_attend(index, &q, &options, found.o.data(), found.lse.data(), nullptr,
                                nullptr, nullptr);
  }
  IndexPtr create() {
    keyhole_index* index = nullptr;
    const auto status =
        under_fault([&] { return keyhole_index_create(engine_.get(), GetParam(), 0, 0, &index); });
    EXPECT_EQ(index != nullptr, status == KEYHOLE_OK);
    EXPECT_TRUE(status == KEYHOLE_OK || status == KEYHOLE_OUT_OF_MEMORY) << keyhole_last_error();
    return IndexPtr(index);
  }
  /// Calls `call` with each fault before; `check` follows a call that has failed.
  void try_all(const std::function<keyhole_status()>& call, const std::function<void()>& check) {
    std::vector<Fault> kinds{Fault::allocation};
    if (!kSanitized) kinds = {Fault::allocation, Fault::mapping, Fault::thread};
    for (const Fault kind : kinds) {
      for (int64_t n = 0;; n += 1 + n / 20) {
        SCOPED_TRACE("fault " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(n) +
                     " calls before");
        Planted::plant(kind, n);
        const keyhole_status status = under_fault(call);
        const bool has_struck = Planted::lift();
        if (status == KEYHOLE_OK && !has_struck) break;
        if (status == KEYHOLE_OK) continue;
        ASSERT_EQ(status, KEYHOLE_OUT_OF_MEMORY) << keyhole_last_error();
        check();
        if (HasFatalFailure()) return;
      }
    }
  }

  std::vector<float> scores_ = std::vector<float>(kGroup * kTop);
  std::vector<uint32_t> counts_ = std::vector<uint32_t>(kGroup);
  EnginePtr engine_ = make_engine(small_engine());
  Numbers numbers_{77};
  const std::vector<float> keys_ = numbers_.many(kKeys * kDim),
                           values_ = numbers_.many(kKeys * kDim),
                           queries_ = numbers_.many(kGroup * kDim);
};

TEST_P(IndexFault, EveryCall) {
  Planted::plant(Fault::allocation, 0);
  EXPECT_EQ(create(), nullptr);
  (void)Planted::lift();
  const IndexPtr index = create();
  keyhole_index_info info;
  keyhole_index_info_init(&info);
  try_all([&] { return build(index.get()); },
          [&] {
            ASSERT_OK(keyhole_index_get_info(index.get(), &info));
            EXPECT_EQ(info.keys, 0U);
          });
  ASSERT_OK(build(index.get()));
  Found truth, seen;
  ASSERT_OK(find(index.get(), KEYHOLE_TAIL_NONE, truth));
  const auto same = [&] {
    ASSERT_OK(find(index.get(), KEYHOLE_TAIL_NONE, seen));
    EXPECT_EQ(seen, truth);
  };
  // A build that fails leaves nothing, see the header.
  try_all([&] { return build(index.get()); },
          [&] {
            ASSERT_OK(keyhole_index_get_info(index.get(), &info));
            EXPECT_EQ(info.keys, 0U);
            ASSERT_OK(build(index.get()));
            same();
          });
  same();
  try_all([&] { return build_tail(index.get()); }, same);
  ASSERT_OK(build_tail(index.get()));
  Found tail;
  ASSERT_OK(find(index.get(), KEYHOLE_TAIL_SECOND, tail));
  // A fresh index takes its memory for searches in the first of them.
  try_all([&] { return find(index.get(), KEYHOLE_TAIL_SECOND, seen); },
          [&] {
            ASSERT_OK(find(index.get(), KEYHOLE_TAIL_SECOND, seen));
            EXPECT_EQ(seen, tail);
          });
  try_all([&] { return keyhole_index_set_spec(index.get(), GetParam()); }, same);
  same();
}

INSTANTIATE_TEST_SUITE_P(Types, IndexFault,
                         ::testing::Values("flat", "flat:codec=int8", "ivf:C=8,probe=4",
                                           "hnsw:M=6,ef=40,efc=20",
                                           "roargraph:M=8,ef=40,Nq=10,beam=12", "sparq:r=8"),
                         [](const auto& p) {
                           const std::string text = p.param;
                           return text.substr(0, text.find(':')) + std::to_string(p.index);
                         });

}  // namespace
}  // namespace keyhole::test
