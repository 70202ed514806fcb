// Decoding while the indexes grow: in the background and in the step, the same tokens are in the index at the
// same steps, and the answers have the same bits.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include <unistd.h>

#include "keyhole/save.h"
#include "tests/runtime/chorus.h"

namespace keyhole::test {
namespace {

const std::vector<const char*> kIndexes = {"flat", "ivf:C=8,probe=3,segment=64,iters=2",
                                           "hnsw:M=4,ef=16,efc=12",
                                           "roargraph:M=8,ef=10,Nq=10,beam=12", "sparq:r=8"};

class Append : public ::testing::TestWithParam<const char*> {
 protected:
  keyhole_session_config config(keyhole_append_mode mode) const {
    auto sc = small_session();
    sc.index = GetParam();
    sc.budget.top_k = 7;
    sc.append_block = 24;
    sc.append_mode = mode;
    return sc;
  }
};

TEST_P(Append, ABlockIsTakenInWhenTheNextIsComplete) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  for (const keyhole_append_mode mode : {KEYHOLE_APPEND_BACKGROUND, KEYHOLE_APPEND_IN_STEP}) {
    auto sc = config(mode);
    Chorus one(ec, 5);
    one.add(engine.get(), sc);
    one.prefill(200);
    one.build();
    // The rule of the public header, from the token counts alone.
    struct Expected {
      uint32_t indexed = 0;
      uint32_t block = 0;  // its end, 0: none
    };
    std::vector<Expected> expected(ec.layers);
    for (uint32_t l = 0; l < ec.layers; ++l) expected[l].indexed = layer_tokens(one[0], l).indexed;
    uint64_t blocks = 0;
    for (int i = 0; i < 200; ++i) {
      for (uint32_t l = 0; l < ec.layers; ++l) {
        const auto before = layer_tokens(one[0], l);
        const uint32_t rows = before.indexed + before.pending;
        const auto beyond_a_cut = [&](uint32_t from) {
          for (uint32_t r = from + 1; r <= rows; ++r) {
            if ((r + l * sc.append_block / ec.layers) % sc.append_block == 0) return true;
          }
          return false;
        };
        auto& e = expected[l];
        if (e.block != 0 && beyond_a_cut(e.block)) {
          e.indexed = e.block;
          e.block = 0;
          ++blocks;
        }
        if (e.block == 0 && beyond_a_cut(e.indexed)) e.block = rows;
      }
      one.step();
      if (HasFatalFailure()) return;
      for (uint32_t l = 0; l < ec.layers; ++l) {
        const auto after = layer_tokens(one[0], l);
        ASSERT_EQ(expected[l].indexed, after.indexed) << "step " << i << ", layer " << l;
        ASSERT_LE(after.pending, 2 * sc.append_block + sc.flush_block);
      }
    }
    EXPECT_GT(blocks, 10U);
    const auto st = statistics(one[0]);
    EXPECT_EQ(blocks, st.append_blocks);
    EXPECT_LE(st.append_waits, st.append_blocks);
    EXPECT_LE(st.append_wait_seconds, st.append_seconds);
    if (mode == KEYHOLE_APPEND_IN_STEP) {
      EXPECT_EQ(0U, st.append_waits);
      EXPECT_EQ(0.0, st.background_seconds);
    }
    one.expect_right_tokens();
  }
}

// One thread and several, in the background and in the step: sessions that are told the same, in any order
// of calls, answer alike. Under ThreadSanitizer this is the test of everything that appends do at once with
// searches.
TEST_P(Append, WhoDoesTheWorkChangesNoBit) {
  for (uint64_t seed = 1; seed <= cases(3); ++seed) {
    const auto ec = small_engine(3);
    const EnginePtr engine = make_engine(ec);
    const EnginePtr alone = make_engine(small_engine(1));
    Chorus chorus(ec, seed);
    auto sc = config(KEYHOLE_APPEND_BACKGROUND);
    sc.append_block = 4 + chorus.numbers().below(30);
    sc.flush_block = 1 + chorus.numbers().below(12);
    chorus.add(engine.get(), sc);
    chorus.add(alone.get(), sc);
    sc.append_mode = KEYHOLE_APPEND_IN_STEP;
    chorus.add(engine.get(), sc);
    chorus.add(alone.get(), sc);
    chorus.prefill(150 + chorus.numbers().below(200));
    chorus.build();
    for (uint32_t i = 0; i < unless_sanitized(40, 20); ++i) {
      const uint32_t operation = chorus.numbers().below(16);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", operation " + std::to_string(i) + ": " +
                   std::to_string(operation));
      const uint32_t steps = chorus.numbers().below(14);
      for (uint32_t s = 0; s < steps && !HasFatalFailure(); ++s) chorus.step();
      if (operation == 0) {
        chorus.prefill(chorus.numbers().below(90));
      } else if (operation == 1) {
        chorus.build();
      } else if (operation == 2) {
        for (size_t s = 0; s < chorus.size(); ++s)
          ASSERT_OK(keyhole_session_set_index(chorus[s], GetParam()));
        chorus.build();
      } else if (operation < 8) {
        // Rarely far back; mostly into the blocks that are on their way or fill, or just before them.
        const uint32_t back = operation == 3 ? chorus.tokens() : 3 * sc.append_block + 30;
        const uint32_t n = chorus.tokens();
        chorus.truncate(n - std::min(n, chorus.numbers().below(back + 1)));
        if (chorus.tokens() < 60) {
          chorus.prefill(150);
          chorus.build();
        }
      } else if (operation == 8) {
        chorus.expect_right_tokens();
      }
      if (HasFatalFailure()) return;
    }
    chorus.expect_right_tokens();
  }
}

TEST_P(Append, CopiesMadeMeanwhileAnswerAlikeEverAfter) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  Chorus chorus(ec, 11);
  const std::string path =
      ::testing::TempDir() + "keyhole_append_" + std::to_string(::getpid()) + ".bin";
  chorus.add(engine.get(), config(KEYHOLE_APPEND_BACKGROUND));
  chorus.prefill(200);
  chorus.build();
  for (int round = 0; round < 8; ++round) {
    for (int i = 0; i < 17; ++i) chorus.step();
    keyhole_session* copy = nullptr;
    if (round % 2 == 0) {
      ASSERT_OK(keyhole_session_fork(chorus[0], &copy));
    } else {
      ASSERT_OK(keyhole_session_save(chorus[0], path.c_str()));
      ASSERT_OK(keyhole_session_load(engine.get(), path.c_str(), nullptr, &copy));
    }
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    ASSERT_OK(keyhole_session_get_config(copy, &c));
    EXPECT_EQ(KEYHOLE_APPEND_BACKGROUND, c.append_mode);
    chorus.adopt(copy);
    for (int i = 0; i < 60 && !HasFatalFailure(); ++i) chorus.step();
    chorus.remove_last();  // with whatever it has under way
  }
  std::filesystem::remove(path);
}

TEST_P(Append, ASessionMayEndAtAnyMoment) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Chorus one(ec, seed);
    auto sc = config(KEYHOLE_APPEND_BACKGROUND);
    sc.append_block = 8;
    one.add(engine.get(), sc);
    one.prefill(300);
    one.build();
    for (uint32_t i = 0; i < 17 + seed * 3; ++i) one.step();
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Append, ::testing::ValuesIn(unless_thread_sanitized(kIndexes, 2)),
                         [](const auto& p) {
                           return std::string(p.param).substr(0, std::string(p.param).find(':'));
                         });

TEST(AppendMode, OthersAreRefused) {
  const auto ec = small_engine(1);
  const EnginePtr engine = make_engine(ec);
  auto sc = small_session();
  sc.append_mode = 2;
  keyhole_session* s = nullptr;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine.get(), &sc, &s));
  expect_error_text("append_mode is 2");
}

}  // namespace
}  // namespace keyhole::test
