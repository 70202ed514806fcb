// The table of settings: every field of the public structs is checked, completed, saved, loaded,
// copied and read from budgets files by it. The tests walk the table, so a field that is added to
// it is tested.
#include "runtime/files/settings.h"

#include <fstream>
#include <set>

#include "keyhole/save.h"
#include "runtime/files/budgets.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

const Setting& row(const char* name) {
  for (const Setting& s : kSessionSettings) {
    if (std::string(name) == s.name) return s;
  }
  throw std::logic_error(name);
}

/// A value that is allowed and is neither the initial one nor what AUTO stands for.
template <class Number>
void set_unusual(const Setting& s, Number& x) {
  const auto usual = [&](double v) { return v == s.initial || v == s.automatic || v == 0; };
  if (s.kind == SettingKind::word) {
    x = static_cast<Number>(s.words.size() - 1);
  } else if (std::is_floating_point_v<Number>) {
    x = static_cast<Number>(0.375);
  } else {
    double value = s.range.low + 77;
    while (usual(value)) value += 1;
    x = static_cast<Number>(value);
  }
  ASSERT_FALSE(usual(static_cast<double>(x))) << s.name << ": choose another value";
}

/// Every field of the budget; of a kind that a session can have together.
keyhole_budget unusual_budget() {
  keyhole_budget b;
  keyhole_budget_init(&b);
  for (const Setting& s : kBudgetSettings) {
    visit_number(s, &b, [&](auto& x) { set_unusual(s, x); });
  }
  b.tail = KEYHOLE_TAIL_SECOND;  // codes take no target
  b.max_keys = b.min_keys + 5;
  return b;
}

class Settings : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = small_session();
    for (const Setting& s : kSessionSettings) {
      visit_number(s, &config_, [&](auto& x) { set_unusual(s, x); });
    }
    config_.max_tokens = 5000;
    config_.flush_block = 768;  // kv_host int8 takes whole blocks of 256
    config_.host_memory_limit = size_t{1} << 30;
    config_.offload_placement = KEYHOLE_PLACE_HOST;  // PLACE_DEVICE needs one
    config_.device_memory_limit = 0x123456789;
    config_.budget = unusual_budget();
    config_.index = "ivf:C=8,probe=2";
    config_.dense_layers = kDense;
    config_.dense_layer_count = 1;
    std::ofstream(budgets_) << R"({"keyhole_budgets": 1, "model": {"layers": 2, "q_heads": 4,
      "kv_heads": 2, "head_dim": 64}, "tail_partition": 81,
      "heads": [{"layer": 0, "kv_head": 1, "top_k": 3}]})";
    config_.budgets = budgets_.c_str();
  }

  /// Text and lists by what they hold, numbers by their bits.
  static void expect_equal(const keyhole_session_config& a, const keyhole_session_config& b) {
    for (const Setting& s : kSessionSettings) {
      SCOPED_TRACE(s.name);
      if (s.kind == SettingKind::text) {
        const char* x = field<const char*>(s, &a);
        const char* y = field<const char*>(s, &b);
        ASSERT_TRUE(x != nullptr && y != nullptr);
        EXPECT_STREQ(x, y);
      } else if (s.kind == SettingKind::layers) {
        EXPECT_EQ(std::vector(a.dense_layers, a.dense_layers + a.dense_layer_count),
                  std::vector(b.dense_layers, b.dense_layers + b.dense_layer_count));
      } else if (s.kind == SettingKind::budget) {
        expect_equal(a.budget, b.budget);
      } else {
        EXPECT_TRUE(same_number(s, &a, &b));
      }
    }
  }
  static void expect_equal(const keyhole_budget& a, const keyhole_budget& b) {
    for (const Setting& s : kBudgetSettings) {
      EXPECT_TRUE(same_number(s, &a, &b)) << s.name;
    }
  }
  static keyhole_session_config get(const keyhole_session* session) {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    EXPECT_OK(keyhole_session_get_config(session, &c));
    return c;
  }

  static constexpr uint32_t kDense[] = {1};
  TemporaryFolder folder_;
  std::string budgets_ = folder_ / "budgets.json";
  std::string saved_ = folder_ / "session.bin";
  keyhole_session_config config_;
  EnginePtr engine_ = make_engine(small_engine());
};

TEST_F(Settings, EveryFieldIsReadBack) {
  const SessionPtr session = make_session(engine_.get(), config_);
  expect_equal(get(session.get()), config_);
}

TEST_F(Settings, EveryFieldSurvivesSaveLoadAndFork) {
  const SessionPtr session = make_session(engine_.get(), config_);
  ASSERT_OK(keyhole_session_save(session.get(), saved_.c_str()));
  const SessionPtr forked = fork_of(session.get());
  std::ofstream(budgets_) << "not read again";
  const SessionPtr loaded = load_of(engine_.get(), saved_);
  for (const keyhole_session* copy : {forked.get(), loaded.get()}) {
    expect_equal(get(copy), config_);
    for (uint32_t head = 0; head < 2; ++head) {
      keyhole_budget b;
      keyhole_budget_init(&b);
      ASSERT_OK(keyhole_session_get_budget(copy, 0, head, &b));
      keyhole_budget expected = config_.budget;
      if (head == 1) expected.top_k = 3;  // as the budgets file said
      expect_equal(b, expected);
    }
  }
}

TEST_F(Settings, BudgetsFilesNameEveryFieldOfABudget) {
  BudgetsFile file;
  file.layers = 2;
  file.q_heads = 4;
  file.kv_heads = 2;
  file.head_dim = 64;
  const keyhole_budget budget = unusual_budget();
  BudgetsFile::Entry& entry = file.heads.emplace_back();
  for (const Setting& s : kBudgetSettings) {
    copy_field(s, &budget, &entry.budget.name(s));
  }
  std::ofstream(budgets_) << budgets_text(file);
  keyhole_session_config c = small_session();
  c.budgets = budgets_.c_str();
  const SessionPtr session = make_session(engine_.get(), c);
  keyhole_budget seen;
  keyhole_budget_init(&seen);
  ASSERT_OK(keyhole_session_get_budget(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &seen));
  expect_equal(seen, budget);
}

TEST_F(Settings, ValuesBesideTheRangeAreRefusedWithTheRange) {
  const auto refused = [&](const keyhole_session_config& c, const Setting& s) {
    keyhole_session* session = nullptr;
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine_.get(), &c, &session))
        << s.name;
    const std::string text = keyhole_last_error();
    EXPECT_EQ(text.find(std::string(s.name) + " is "), 0U) << text;
    EXPECT_NE(text.find(", allowed: "), std::string::npos) << text;
  };
  int tried = 0;
  const auto try_all = [&](const Setting& s, auto&& of) {
    const auto with = [&](double value) {
      keyhole_session_config c = small_session();
      visit_number(s, of(c), [&](auto& x) { x = static_cast<std::decay_t<decltype(x)>>(value); });
      refused(c, s);
      ++tried;
    };
    switch (s.kind) {
      case SettingKind::word: with(-1), with(static_cast<double>(s.words.size())); break;
      case SettingKind::count:
        if (s.range.high < 4294967295.0) with(s.range.high + 1);
        if (s.range.low > (s.zero == Zero::number ? 0 : 1)) with(s.range.low - 1);
        break;
      case SettingKind::real:
      case SettingKind::share:
        with(-0.125), with(NAN), with(INFINITY);
        if (s.range.open) with(1);
        if (s.range.high == 1) with(1.5);
        break;
      default: break;
    }
  };
  for (const Setting& s : kSessionSettings) {
    try_all(s, [](keyhole_session_config& c) { return &c; });
  }
  for (const Setting& s : kBudgetSettings) {
    try_all(s, [](keyhole_session_config& c) { return &c.budget; });
  }
  EXPECT_GT(tried, 40);
}

TEST_F(Settings, AutoIsCompletedAndReadBack) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  const keyhole_session_config seen = get(make_session(engine_.get(), c).get());
  EXPECT_EQ(seen.max_tokens, 131072U);
  EXPECT_EQ(seen.sink, 128U);
  EXPECT_EQ(seen.window, 512U);
  EXPECT_EQ(seen.flush_block, 64U);
  EXPECT_EQ(seen.append_block, 1024U);
  EXPECT_EQ(seen.tail_partition, 16U);
  EXPECT_EQ(seen.training_queries, 4096U);
  EXPECT_EQ(seen.budget.top_k, 16U) << "of an index with codes";
  EXPECT_EQ(seen.budget.min_weight, 1e-4F);
  EXPECT_EQ(seen.audit_bound, 0.1F);
  EXPECT_EQ(seen.budget.struct_size, sizeof(keyhole_budget));
}

TEST_F(Settings, ABudgetInsideAConfigIsOfThisVersion) {
  keyhole_session* session = nullptr;
  keyhole_session_config c = small_session();
  c.budget.struct_size = 0;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine_.get(), &c, &session));
  expect_error_text("budget.struct_size");
  c = small_session();
  c.budget.reserved[23] = 1;
  EXPECT_EQ(KEYHOLE_VERSION_MISMATCH, keyhole_session_create(engine_.get(), &c, &session));
  expect_error_text("reserved");
}

TEST_F(Settings, WordsAreDistinctAndRoundTrip) {
  for (const std::span<const Setting> table : {kBudgetSettings, kSessionSettings}) {
    std::set<std::string> names;
    for (const Setting& s : table) {
      EXPECT_TRUE(names.insert(s.name).second) << s.name;
      EXPECT_EQ(s.kind == SettingKind::word, !s.words.empty()) << s.name;
      for (int32_t i = 0; i < static_cast<int32_t>(s.words.size()); ++i) {
        EXPECT_EQ(number_of_word(s, word_of_number(s, i)), i) << s.name;
      }
      EXPECT_FALSE(number_of_word(s, "nothing like it")) << s.name;
    }
  }
  EXPECT_EQ(row("offload_placement").words[KEYHOLE_PLACE_DEVICE].constant,
            std::string("KEYHOLE_PLACE_DEVICE"));
}

}  // namespace
}  // namespace keyhole::test
