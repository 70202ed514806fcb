// What audits over the bound lead to: a budget that doubles, a target that comes nearer, exact attention.
#include <algorithm>
#include <mutex>

#include "tests/runtime/audit/audit_of.h"

namespace keyhole::test {
namespace {

struct Log {
  std::mutex mutex;
  std::vector<std::string> warnings;
  static void write(void* user, int32_t level, const char* text) {
    if (level != KEYHOLE_LOG_WARNING) return;
    auto* log = static_cast<Log*>(user);
    const std::lock_guard lock(log->mutex);
    log->warnings.emplace_back(text);
  }
};

/// One KV head with one query head, an index that reads k keys and is far from enough.
class Actions : public ::testing::Test {
 protected:
  void make(keyhole_audit_action action, keyhole_mode mode = KEYHOLE_MODE_INDEXED) {
    ec_ = small_engine(2);
    ec_.layers = 1;
    ec_.q_heads = ec_.kv_heads = 1;
    ec_.log = Log::write;
    ec_.log_user = &log_;
    engine_ = make_engine(ec_);
    auto sc = small_session();
    sc.budget.top_k = 3;
    sc.append_block = 100000;
    sc.mode = mode;
    sc.audit_share = 1.0;
    sc.audit_action = action;
    sc.audit_bound = 1e-4F;
    sc.budget.mass_target = mass_target_;
    session_ = make_session(engine_.get(), sc);
    numbers_ = Numbers(5);
    Model model(ec_);
    prefill_both(session_.get(), model, Shape(ec_), 0, 900, numbers_);
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  }
  /// Keys that the next step attends to of the offloaded ones.
  uint64_t next() {
    const auto before = statistics(session_.get()).keys_attended;
    auto q = numbers_.many(Shape(ec_).q(1));
    for (float& x : q) x *= 0.0625F;
    (void)attend_only(session_.get(), Shape(ec_), 0, q);
    return statistics(session_.get()).keys_attended - before;
  }

  /// With a target, the distinct keys that are read grow with it.
  float mass_target_ = 0.0F;
  Log log_;
  keyhole_engine_config ec_{};
  EnginePtr engine_;
  SessionPtr session_;
  Numbers numbers_{5};
};

TEST_F(Actions, WidenDoubles16StepsAfterTheAudit) {
  make(KEYHOLE_AUDIT_WIDEN);
  for (uint64_t step = 0; step < 100; ++step) {
    const uint64_t factor = uint64_t{1} << std::min<uint64_t>(step / 16, 4);
    ASSERT_EQ(3 * factor, next()) << "step " << step;
  }
  EXPECT_EQ(4U, audit_of(session_.get()).actions);
  EXPECT_EQ(audit_of(session_.get()).audits, audit_of(session_.get()).over_bound);
  ASSERT_EQ(3U, log_.warnings.size());  // the 1st, 2nd and 4th
  EXPECT_NE(std::string::npos, log_.warnings[0].find("2 times its budget"));
  EXPECT_NE(std::string::npos, log_.warnings[2].find("16 times its budget"));
  // Another budget begins anew; the same does not.
  ASSERT_OK(keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_INDEXED, 3));
  EXPECT_EQ(48U, next());
  ASSERT_OK(keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_INDEXED, 5));
  for (int step = 0; step < 16; ++step) ASSERT_EQ(5U, next());
  EXPECT_EQ(10U, next());
}

TEST_F(Actions, WidenBringsATargetNearer) {
  mass_target_ = 0.2F;
  make(KEYHOLE_AUDIT_WIDEN);
  double means[3] = {};  // a fourth would be all keys
  for (int step = 0; step < 48; ++step) means[step / 16] += static_cast<double>(next()) / 16.0;
  for (int i = 1; i < 3; ++i) EXPECT_GT(means[i], means[i - 1] + 3.0) << i;
}

TEST_F(Actions, ExactAttendsEverythingFromThenOn) {
  make(KEYHOLE_AUDIT_EXACT);
  const auto t = layer_tokens(session_.get(), 0);
  for (int step = 0; step < 60; ++step) {
    ASSERT_EQ(step < 16 ? 3U : t.indexed + t.pending, next()) << "step " << step;
  }
  const auto a = audit_of(session_.get());
  EXPECT_EQ(1U, a.actions);
  EXPECT_EQ(16U, a.over_bound);
  ASSERT_EQ(1U, log_.warnings.size());
  EXPECT_NE(std::string::npos, log_.warnings[0].find("exactly"));
  ASSERT_OK(keyhole_session_set_index(session_.get(), "flat"));
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_EQ(3U, next());
}

TEST_F(Actions, WithoutASearchThereAreNone) {
  for (const keyhole_mode mode : {KEYHOLE_MODE_RESIDENT, KEYHOLE_MODE_EXACT}) {
    for (const keyhole_audit_action action : {KEYHOLE_AUDIT_WIDEN, KEYHOLE_AUDIT_EXACT}) {
      make(action, mode);
      const uint64_t first = next();
      for (int step = 0; step < 40; ++step) ASSERT_EQ(first, next());
      const auto a = audit_of(session_.get());
      EXPECT_EQ(0U, a.actions);
      EXPECT_EQ(41U, a.audits);
      if (mode == KEYHOLE_MODE_RESIDENT) {
        EXPECT_EQ(41U, a.over_bound);
        EXPECT_EQ(0.0, a.recall);
      } else {
        EXPECT_EQ(0U, a.over_bound);
        EXPECT_EQ(1.0, a.recall);
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::test
