// Sessions that keyhole_session_build was not called for, or only while nothing was offloaded: steps index
// their tokens, and nothing that happens meanwhile makes a difference.
#include <algorithm>
#include <filesystem>

#include <unistd.h>

#include "keyhole/save.h"
#include "tests/runtime/chorus.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kBlock = 32;
constexpr uint32_t kFlush = 8;

keyhole_session_config config(const char* index,
                              keyhole_append_mode mode = KEYHOLE_APPEND_BACKGROUND) {
  auto sc = small_session();
  sc.index = index;
  sc.append_block = kBlock;
  sc.flush_block = kFlush;
  sc.append_mode = mode;
  return sc;
}

/// An engine whose warnings are kept.
struct Warnings {
  explicit Warnings(keyhole_engine_config& ec) {
    ec.log = [](void* user, int32_t level, const char* text) {
      if (level == KEYHOLE_LOG_WARNING)
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
    };
    ec.log_user = &texts;
  }
  [[nodiscard]] long with(const std::string& part) const {
    return std::count_if(texts.begin(), texts.end(),
                         [&](const std::string& t) { return t.find(part) != std::string::npos; });
  }
  std::vector<std::string> texts;
};

/// Efforts that cover all keys: with k above their number the answers are exact, whatever is
/// indexed.
class FirstIndex : public ::testing::TestWithParam<const char*> {};

TEST_P(FirstIndex, ComesByItselfAfterABuildOfNothing) {
  for (const keyhole_append_mode mode : {KEYHOLE_APPEND_BACKGROUND, KEYHOLE_APPEND_IN_STEP}) {
    const auto ec = small_engine(2);
    const EnginePtr engine = make_engine(ec);
    Chorus one(ec, 3);
    one.add(engine.get(), config(GetParam(), mode));
    one.expect_exact_answers(true);
    one.prefill(20);  // sink and window
    one.build();
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto t = layer_tokens(one[0], l);
      ASSERT_EQ(0U, t.indexed + t.pending);
    }
    std::vector<uint32_t> indexed(ec.layers);
    constexpr uint32_t kSteps = unless_sanitized(400, 200);
    for (uint32_t i = 0; i < kSteps && !::testing::Test::HasFatalFailure(); ++i) {
      one.step();
      for (uint32_t l = 0; l < ec.layers; ++l) {
        const auto t = layer_tokens(one[0], l);
        ASSERT_LE(t.pending, 2 * kBlock + kFlush) << "step " << i << ", layer " << l;
        ASSERT_GE(t.indexed, indexed[l]);
        indexed[l] = t.indexed;
      }
    }
    for (uint32_t l = 0; l < ec.layers; ++l) EXPECT_GE(indexed[l], kSteps - 2 * kBlock - kFlush);
    EXPECT_GE(statistics(one[0]).append_blocks,
              ec.layers * ((kSteps - 2 * kBlock - kFlush) / kBlock) - 1);
  }
}

TEST(FirstIndexFrom, WaitsForAsManyTokensAsItsSpecSays) {
  auto ec = small_engine(2);
  const Warnings warnings(ec);
  const EnginePtr engine = make_engine(ec);
  constexpr uint32_t kFrom = 150;
  Chorus one(ec, 5);
  one.add(engine.get(), config("codes:k=4,v=4,from=150"));
  one.expect_exact_answers(true);
  one.prefill(120);
  one.build();
  const uint32_t offloaded = layer_tokens(one[0], 0).pending;
  ASSERT_GT(offloaded, kBlock);
  EXPECT_EQ(layer_tokens(one[0], 0).indexed, 0U) << "a build of few tokens";
  for (int i = 0; i < 300 && !HasFatalFailure(); ++i) {
    one.step();
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto t = layer_tokens(one[0], l);
      if (t.indexed + t.pending < kFrom) {
        ASSERT_EQ(t.indexed, 0U);
      } else {
        ASSERT_LE(t.pending, kFrom + 2 * kBlock + kFlush);
      }
      if (t.indexed != 0) {
        ASSERT_LE(t.pending, 2 * kBlock + kFlush);
      }
    }
  }
  for (uint32_t l = 0; l < ec.layers; ++l) EXPECT_GE(layer_tokens(one[0], l).indexed, kFrom);
  EXPECT_EQ(warnings.with("keyhole_session_build was not called"), 0);

  // A prompt of as many is indexed by its build.
  Chorus longer(ec, 5);
  longer.add(engine.get(), config("codes:k=4,v=4,from=150"));
  longer.prefill(120 + kFrom);
  longer.build();
  EXPECT_EQ(layer_tokens(longer[0], 0).pending, 0U);
}

TEST_P(FirstIndex, ComesByItselfWithoutAnyBuild) {
  auto ec = small_engine(2);
  ec.layers = 5;  // first cuts at 32, 26, 20, 13 and 7 rows
  const EnginePtr engine = make_engine(ec);
  Chorus one(ec, 4);
  one.add(engine.get(), config(GetParam()));
  one.expect_exact_answers(true);
  bool turns = false;
  for (int i = 0; i < 200 && !HasFatalFailure(); ++i) {
    one.step();
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto t = layer_tokens(one[0], l);
      ASSERT_LE(t.pending, 2 * kBlock + kFlush) << "step " << i << ", layer " << l;
      if (t.indexed != 0) {
        ASSERT_GE(t.indexed, kBlock / 2) << "too few rows to learn from";
      }
      turns = turns || (t.indexed == 0) != (layer_tokens(one[0], 0).indexed == 0);
    }
  }
  EXPECT_TRUE(turns) << "layers take turns";
  for (uint32_t l = 0; l < ec.layers; ++l) EXPECT_GT(layer_tokens(one[0], l).indexed, 80U);
}

TEST_P(FirstIndex, OfALongPromptIsTakenInPieceByPiece) {
  auto ec = small_engine(2);
  const Warnings warnings(ec);
  const EnginePtr engine = make_engine(ec);
  Chorus one(ec, 5);
  one.add(engine.get(), config(GetParam()));
  one.expect_exact_answers(true);
  one.prefill(unless_sanitized(1500, 800));
  std::vector<uint32_t> indexed(ec.layers), taken(ec.layers);
  for (uint32_t i = 0; i < unless_sanitized(300, 200) && !HasFatalFailure(); ++i) {
    one.step();
    for (uint32_t l = 0; l < ec.layers; ++l) {
      const auto t = layer_tokens(one[0], l);
      ASSERT_LE(t.indexed - indexed[l], 8 * kBlock) << "step " << i << ", layer " << l;
      taken[l] += t.indexed != indexed[l] ? 1 : 0;
      indexed[l] = t.indexed;
    }
  }
  for (uint32_t l = 0; l < ec.layers; ++l) {
    EXPECT_LE(layer_tokens(one[0], l).pending, 2 * kBlock + kFlush);
    EXPECT_GE(taken[l], unless_sanitized(6, 4));
  }
  EXPECT_EQ(1, warnings.with("keyhole_session_build was not called"));
}

// Whoever does the work, and whatever happens while it is done, the same tokens are indexed by the
// same steps.
TEST_P(FirstIndex, DependsOnTheCallsAlone) {
  const std::string path =
      ::testing::TempDir() + "keyhole_first_" + std::to_string(::getpid()) + ".bin";
  for (uint64_t seed = 1; seed <= cases(3); ++seed) {
    const auto ec = small_engine(3);
    const EnginePtr engine = make_engine(ec);
    const EnginePtr alone = make_engine(small_engine(1));
    Chorus chorus(ec, seed);
    chorus.add(engine.get(), config(GetParam()));
    chorus.add(alone.get(), config(GetParam()));
    chorus.add(engine.get(), config(GetParam(), KEYHOLE_APPEND_IN_STEP));
    chorus.expect_exact_answers(true);
    for (int i = 0; i < 30; ++i) {
      const uint32_t operation = chorus.numbers().below(10);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", operation " + std::to_string(i) + ": " +
                   std::to_string(operation));
      const uint32_t steps = chorus.numbers().below(25);
      for (uint32_t s = 0; s < steps && !HasFatalFailure(); ++s) chorus.step();
      keyhole_session* copy = nullptr;
      if (operation == 0) {
        chorus.prefill(chorus.numbers().below(300));  // with queries that a first build would read
      } else if (operation == 1) {
        chorus.set_index(GetParam());
      } else if (operation == 2) {
        // Back to few rows or none, so that there is a first index again.
        chorus.truncate(chorus.numbers().below(std::min(chorus.tokens() + 1, 60U)));
      } else if (operation == 3) {
        chorus.truncate(chorus.tokens() -
                        chorus.numbers().below(std::min(chorus.tokens(), 40U) + 1));
      } else if (operation == 4 && chorus.size() < 5) {
        ASSERT_OK(keyhole_session_fork(chorus[0], &copy));
        chorus.adopt(copy);
      } else if (operation == 5 && chorus.size() < 5) {
        ASSERT_OK(keyhole_session_save(chorus[0], path.c_str()));
        ASSERT_OK(keyhole_session_load(engine.get(), path.c_str(), nullptr, &copy));
        chorus.adopt(copy);
      } else if (operation == 6) {
        keyhole_budget budget;
        keyhole_budget_init(&budget);
        budget.top_k = 4096;
        budget.tail = chorus.numbers().below(2) == 0 ? KEYHOLE_TAIL_NONE : KEYHOLE_TAIL_CENTROID;
        chorus.set_budget(chorus.numbers().below(2), chorus.numbers().below(2), budget);
      } else if (operation == 7) {
        chorus.build();
        chorus.set_index(GetParam());
      }
      if (HasFatalFailure()) return;
    }
    chorus.expect_right_tokens();
  }
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(
    Types, FirstIndex,
    ::testing::ValuesIn(unless_thread_sanitized(
        std::vector<const char*>{"flat", "ivf:C=8,probe=16777216,segment=64",
                                 "hnsw:M=6,ef=100000,efc=20",
                                 "roargraph:M=8,ef=100000,Nq=10,beam=12", "sparq:r=256"},
        2)),
    [](const auto& p) { return std::string(p.param).substr(0, std::string(p.param).find(':')); });

TEST(FirstIndexOf, AHeadWithATailHasItsPartitionsToo) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  auto sc = config("ivf:C=8,probe=2,segment=64");
  sc.budget.tail = KEYHOLE_TAIL_CENTROID;
  sc.budget.top_k = 10;
  Chorus one(ec, 6);
  one.add(engine.get(), sc);
  for (int i = 0; i < 150; ++i) one.step();
  EXPECT_GT(statistics(one[0]).tail_bytes, 0U);
  EXPECT_GT(layer_tokens(one[0], 1).indexed, 0U);
}

TEST(FirstIndexOf, DenseLayersNeverComes) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  auto sc = config("flat");
  const uint32_t dense = 1;
  sc.dense_layers = &dense;
  sc.dense_layer_count = 1;
  Chorus one(ec, 7);
  one.add(engine.get(), sc);
  one.expect_exact_answers(true);
  for (int i = 0; i < 150; ++i) one.step();
  EXPECT_GT(layer_tokens(one[0], 0).indexed, 0U);
  EXPECT_EQ(0U, layer_tokens(one[0], 1).indexed);
}

TEST(FirstIndexOf, ASessionThatSearchesNothingWaitsUntilItDoes) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  auto sc = config("flat");
  sc.mode = KEYHOLE_MODE_EXACT;
  Chorus one(ec, 8);
  one.add(engine.get(), sc);
  one.expect_exact_answers(true);
  for (int i = 0; i < 150; ++i) one.step();
  EXPECT_EQ(0U, layer_tokens(one[0], 0).indexed);
  ASSERT_OK(keyhole_session_set_mode(one[0], KEYHOLE_MODE_INDEXED, 0));
  for (int i = 0; i < 2 * static_cast<int>(kBlock); ++i) one.step();
  EXPECT_GT(layer_tokens(one[0], 0).indexed, 100U);
}

TEST(FirstIndexOf, ALongPromptGivesWayToABuild) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  Chorus one(ec, 9);
  one.add(engine.get(), config("hnsw:M=6,ef=100000,efc=20"));
  one.expect_exact_answers(true);
  one.prefill(1500);
  for (int i = 0; i < 3; ++i) one.step();  // a first index is under way
  EXPECT_EQ(0U, layer_tokens(one[0], 0).indexed);
  one.build();
  EXPECT_EQ(0U, layer_tokens(one[0], 0).pending);
  for (int i = 0; i < 100; ++i) one.step();
  EXPECT_GT(layer_tokens(one[0], 0).indexed, 1500U);
}

TEST(FirstIndexOf, ASessionWithoutTheMemoryIsNotBuilt) {
  auto ec = small_engine(2);
  const Warnings warnings(ec);
  const EnginePtr engine = make_engine(ec);
  auto sc = config("hnsw:M=64,ef=4096");
  Chorus one(ec, 10);
  sc.training_queries = 0;
  one.add(engine.get(), sc);
  one.prefill(500);
  const uint64_t held = statistics(one[0]).host_bytes;
  one.remove_last();
  sc.host_memory_limit = held + 100000;  // the tokens of 100 steps, and no index
  Chorus poor(ec, 10);
  poor.add(engine.get(), sc);
  poor.expect_exact_answers(true);
  poor.prefill(500);
  for (int i = 0; i < 80; ++i) poor.step();
  EXPECT_EQ(0U, layer_tokens(poor[0], 0).indexed);
  EXPECT_GE(warnings.with("host_memory_limit"), 1);
  EXPECT_LE(warnings.with("host_memory_limit"), 4) << "the 1st, 2nd, 4th, 8th time";
}

TEST(FirstIndexOf, AGraphWithoutQueriesIsSaidToBePoorOnce) {
  auto ec = small_engine(2);
  const Warnings warnings(ec);
  const EnginePtr engine = make_engine(ec);
  Chorus one(ec, 11);
  one.add(engine.get(), config("roargraph:M=4"));
  for (int i = 0; i < 200; ++i) one.step();
  EXPECT_EQ(1, warnings.with("no training query"));
}

}  // namespace
}  // namespace keyhole::test
