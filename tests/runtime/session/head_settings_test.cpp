// Settings that change under a session: those that no session may have are refused by every call that would make them,
// so that whatever is accepted can be saved and loaded again.
#include <cstddef>
#include <fstream>
#include <string>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class HeadSettings : public ::testing::Test {
 protected:
  keyhole_session_config config(const char* index) const {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    c.max_tokens = 4096;
    c.index = index;
    return c;
  }
  static keyhole_budget budget_of(const keyhole_session* s, uint32_t kv_head) {
    keyhole_budget b;
    keyhole_budget_init(&b);
    EXPECT_OK(keyhole_session_get_budget(s, 0, kv_head, &b));
    return b;
  }
  /// Saves the session and loads it: it has the same budgets.
  void expect_loads(keyhole_session* s) {
    const std::string path = folder_ / "session";
    ASSERT_OK(keyhole_session_save(s, path.c_str()));
    const SessionPtr loaded = load_of(engine_.get(), path);
    ASSERT_NE(loaded, nullptr);
    for (uint32_t h = 0; h < ec_.kv_heads; ++h) {
      const keyhole_budget a = budget_of(s, h), b = budget_of(loaded.get(), h);
      EXPECT_EQ(a.top_k, b.top_k);
      EXPECT_EQ(a.attend, b.attend);
      EXPECT_EQ(a.tail, b.tail);
    }
  }

  keyhole_engine_config ec_ = small_engine();
  EnginePtr engine_ = make_engine(ec_);
  TemporaryFolder folder_;
};

TEST_F(HeadSettings, AModeDoesNotGiveCodesMoreRowsThanTheyTake) {
  const SessionPtr s = make_session(engine_.get(), config("codes:k=4,v=4"));
  EXPECT_EQ(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 4000), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("layer 0, KV head 0: top_k is 4000");
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  ASSERT_OK(keyhole_session_get_config(s.get(), &c));
  EXPECT_EQ(c.mode, KEYHOLE_MODE_INDEXED);
  EXPECT_EQ(c.budget.top_k, 16U);
  EXPECT_EQ(budget_of(s.get(), 1).top_k, 16U);
  ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 40));
  expect_loads(s.get());
}

TEST_F(HeadSettings, WhatIsAttendedGoesWithTheTail) {
  const SessionPtr coded = make_session(engine_.get(), config("codes:k=4,v=4"));
  EXPECT_EQ(keyhole_session_set_attend(coded.get(), KEYHOLE_ATTEND_SCORED, 0),
            KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("KV head 0: attend is 1 with tail KEYHOLE_TAIL_CODES");
  ASSERT_OK(keyhole_session_set_attend(coded.get(), KEYHOLE_ATTEND_NONE, 0));
  expect_loads(coded.get());

  const SessionPtr bare = make_session(engine_.get(), config("ivf"));
  keyhole_budget with_tail;
  keyhole_budget_init(&with_tail);
  with_tail.tail = KEYHOLE_TAIL_SECOND;
  ASSERT_OK(keyhole_session_set_budget(bare.get(), KEYHOLE_ALL, 0, &with_tail));
  EXPECT_EQ(keyhole_session_set_attend(bare.get(), KEYHOLE_ATTEND_NONE, 0),
            KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("layer 0, KV head 1: attend is KEYHOLE_ATTEND_NONE");
  EXPECT_EQ(budget_of(bare.get(), 0).attend, KEYHOLE_ATTEND_TOPK)
      << "a refused call changes nothing";
  expect_loads(bare.get());
}

TEST_F(HeadSettings, AllHeadsMayHaveCodesBesideAnIndexOfTheSessionThatHasNone) {
  const std::string path = folder_ / "budgets.json";
  std::ofstream(path) << R"({"keyhole_budgets": 1,
    "model": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64},
    "heads": [{"layer": "all", "kv_head": "all", "index": "codes:k=4,v=4"}]})";
  keyhole_session_config c = config("flat");
  c.budgets = path.c_str();
  const SessionPtr s = make_session(engine_.get(), c);
  keyhole_budget b = budget_of(s.get(), 0);
  ASSERT_EQ(b.tail, KEYHOLE_TAIL_CODES);
  b.top_k = 9;
  ASSERT_OK(keyhole_session_set_budget(s.get(), KEYHOLE_ALL, KEYHOLE_ALL, &b));
  EXPECT_EQ(budget_of(s.get(), 1).top_k, 9U);
  expect_loads(s.get());
}

TEST_F(HeadSettings, AutoLeavesNoHeadBesideCodesWithoutATail) {
  const SessionPtr s = make_session(engine_.get(), config("flat"));
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = 2000;
  ASSERT_OK(keyhole_session_set_budget(s.get(), 1, 1, &b));
  EXPECT_EQ(keyhole_session_set_index(s.get(), "auto"), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("layer 1, KV head 1: top_k is 2000");
  expect_error_text("allowed");
  keyhole_session_config now;
  keyhole_session_config_init(&now);
  ASSERT_OK(keyhole_session_get_config(s.get(), &now));
  EXPECT_STREQ(now.index, "flat");
  // A tail of its own is one.
  b.tail = KEYHOLE_TAIL_SECOND;
  ASSERT_OK(keyhole_session_set_budget(s.get(), 1, 1, &b));
  ASSERT_OK(keyhole_session_set_index(s.get(), "auto"));
  EXPECT_EQ(budget_of(s.get(), 1).tail, KEYHOLE_TAIL_CODES);
  expect_loads(s.get());
}

}  // namespace
}  // namespace keyhole::test
