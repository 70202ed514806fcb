// The same bits for any number of threads; sessions at once; wrong use noticed.
#include <atomic>
#include <numeric>
#include <thread>

#include "keyhole/save.h"
#include "tests/runtime/states_calls.h"

namespace keyhole::test {
namespace {

std::vector<Answer> run(uint32_t threads, const char* index) {
  const auto ec = small_engine(threads);
  auto sc = small_session();
  sc.index = index;
  sc.budget.top_k = 10;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(77);
  Model model(ec);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l)
    prefill_both(session.get(), model, shape, l, unless_sanitized(2500, 900), numbers);
  EXPECT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  for (uint32_t l = 0; l < ec.layers; ++l)
    prefill_both(session.get(), model, shape, l, 400, numbers);
  std::vector<Answer> answers;
  for (const keyhole_mode mode : {KEYHOLE_MODE_INDEXED, KEYHOLE_MODE_EXACT}) {
    EXPECT_OK(keyhole_session_set_mode(session.get(), mode, 0));
    for (int i = 0; i < 5; ++i) {
      const auto layer = static_cast<uint32_t>(i % 2);
      const auto q = numbers.many(shape.q(1));
      answers.push_back(attend_only(session.get(), shape, layer, q));
      answers.push_back(attend_offloaded(session.get(), shape, layer, q));
      std::vector<uint32_t> ids(unless_sanitized(4400, 1800));  // half of them of each KV head
      const auto half = static_cast<uint32_t>(ids.size() / 2);
      std::iota(ids.begin(), ids.begin() + half, 0);
      std::iota(ids.begin() + half, ids.end(), 50);
      answers.push_back(attend_tokens(session.get(), shape, layer, q, ids, {half, half}, true));
    }
  }
  return answers;
}

TEST(Threads, TheBitsDoNotDependOnTheirNumber) {
  for (const char* index :
       {"flat", "ivf:C=16,probe=3", "hnsw:M=8,ef=32", "roargraph:M=8,ef=8", "sparq:r=8", "codes"}) {
    const auto one = run(1, index);
    for (const uint32_t threads : unless_sanitized(std::vector<uint32_t>{5, 2}, 2)) {
      const auto many = run(threads, index);
      for (size_t i = 0; i < one.size(); ++i) {
        EXPECT_EQ(one[i].o, many[i].o) << index << ", " << threads << " threads, answer " << i;
        EXPECT_EQ(one[i].lse, many[i].lse);
      }
    }
  }
}

// One KV head and rows enough: the search is done in parts.
constexpr uint32_t kRowsForParts = unless_sanitized(14000, 9000);  // 9000: two parts

TEST(Threads, PartsOfOneHeadGiveTheSameBits) {
  constexpr keyhole_attend_mode kModes[] = {KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_SCORED,
                                            KEYHOLE_ATTEND_WEIGHT};
  // One index answers in all modes; answers [mode][query].
  const auto run_one_head = [&](uint32_t threads, const char* index) {
    auto ec = small_engine(threads);
    ec.layers = 1;
    ec.kv_heads = 1;
    auto sc = small_session();
    sc.max_tokens = 16384;
    sc.index = index;
    sc.budget.top_k = 12;
    const EnginePtr engine = make_engine(ec);
    const SessionPtr session = make_session(engine.get(), sc);
    Numbers numbers(78);
    Model model(ec);
    const Shape shape(ec);
    prefill_both(session.get(), model, shape, 0, kRowsForParts, numbers);
    EXPECT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    prefill_both(session.get(), model, shape, 0, 30, numbers);
    std::vector<std::vector<Answer>> answers;
    for (const keyhole_attend_mode attend : kModes) {
      keyhole_budget budget = sc.budget;
      budget.attend = attend;
      EXPECT_OK(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &budget));
      EXPECT_OK(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_INDEXED, 0));
      auto& of_mode = answers.emplace_back();
      for (int i = 0; i < 6; ++i) {
        of_mode.push_back(attend_only(session.get(), shape, 0, numbers.many(shape.q(1))));
      }
      // All of the keys, or the best of more than there are: exact attention.
      if (std::string(index) == "flat" && attend != KEYHOLE_ATTEND_WEIGHT) {
        EXPECT_OK(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_INDEXED, 16384));
        expect_exact(session.get(), model, shape, 0, numbers);
      }
    }
    return answers;
  };
  for (const char* index : unless_sanitized(
           std::vector<const char*>{"flat", "flat:codec=int8", "ivf:C=40,probe=9",
                                    "hnsw:M=2,ef=8,efc=4",
                                    "roargraph:M=4,ef=16,Nq=5,beam=4,queries=50", "sparq:r=8"},
           2)) {
    const auto one = run_one_head(1, index);
    const auto many = run_one_head(5, index);
    for (size_t m = 0; m < one.size(); ++m) {
      for (size_t i = 0; i < one[m].size(); ++i) {
        EXPECT_EQ(one[m][i].o, many[m][i].o)
            << index << ", attend " << kModes[m] << ", answer " << i;
        EXPECT_EQ(one[m][i].lse, many[m][i].lse);
      }
    }
  }
}

TEST(Threads, SessionsOfOneEngineRunAtOnce) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      const SessionPtr session = make_session(engine.get(), small_session());
      Numbers numbers(seed);
      Model model(ec);
      const Shape shape(ec);
      for (uint32_t l = 0; l < ec.layers; ++l)
        prefill_both(session.get(), model, shape, l, 200, numbers);
      EXPECT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
      for (int i = 0; i < 20; ++i) expect_exact(session.get(), model, shape, 0, numbers);
    });
  }
  for (auto& t : threads) t.join();
}

// What they share, neither may change for another one, whichever thread uses it.
TEST(Threads, ASessionAndItsCopiesRunAtOnce) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  for (const char* index :
       unless_sanitized(std::vector<const char*>{"ivf:C=8,probe=16777216,segment=64",
                                                 "hnsw:M=6,ef=100000,efc=20", "sparq:r=256",
                                                 "roargraph:M=8,ef=100000,Nq=10,beam=12"},
                        2)) {
    SCOPED_TRACE(index);
    auto sc = small_session();
    sc.index = index;
    sc.append_block = 16;
    sc.audit_share = 0.5;
    SessionPtr session = make_session(engine.get(), sc);
    Numbers numbers(5);
    Model model(ec);
    const Shape shape(ec);
    for (uint32_t l = 0; l < ec.layers; ++l)
      prefill_both(session.get(), model, shape, l, 300, numbers);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    std::vector<SessionPtr> family;
    for (int i = 0; i < 2; ++i) {
      family.push_back(fork_of(i == 0 ? session.get() : family[0].get()));
    }
    family.push_back(std::move(session));
    std::vector<std::thread> threads;
    for (SessionPtr& member : family) {
      threads.emplace_back(
          [&, mine = std::move(member), own = model, seed = threads.size()]() mutable {
            Numbers random(seed);
            for (uint32_t i = 0; i < unless_sanitized(12, 6); ++i) {
              for (uint32_t l = 0; l < ec.layers; ++l) {
                prefill_both(mine.get(), own, shape, l, 1 + random.below(40), random);
                expect_exact(mine.get(), own, shape, l, random);
              }
              if (random.below(3) == 0) {
                const uint32_t n = own.tokens(0) / 2 + random.below(own.tokens(0) / 2);
                EXPECT_OK(keyhole_session_truncate(mine.get(), n));
                own.truncate(n);
              }
              if (random.below(3) == 0) {
                EXPECT_OK(keyhole_session_build(mine.get(), nullptr, nullptr));
              }
              keyhole_session* copy = nullptr;
              EXPECT_OK(keyhole_session_fork(mine.get(), &copy));
              if (random.below(2) == 0) expect_exact(mine.get(), own, shape, 0, random);
              mine.reset(copy);
              (void)statistics(mine.get());
              for (uint32_t l = 0; l < ec.layers; ++l)
                expect_exact(mine.get(), own, shape, l, random);
            }
          });
    }
    for (std::thread& t : threads) t.join();
    if (HasFailure()) return;
  }
}

// A call from inside the progress callback is a second call into a session that is in use.
TEST(Threads, ASecondCallIntoASessionIsRefused) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  auto sc = small_session();
  sc.index = "ivf:C=4,probe=16777216";
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(1);
  Model model(ec);
  const Shape shape(ec);
  prefill_both(session.get(), model, shape, 0, 300, numbers);
  struct Seen {
    keyhole_session* session;
    std::atomic<int> busy{0}, other{0};
  } seen{session.get()};
  ASSERT_OK(keyhole_session_build(
      session.get(),
      [](void* user, double, const char*) -> int32_t {
        auto* s = static_cast<Seen*>(user);
        std::thread([&] {
          ++(keyhole_session_truncate(s->session, 0) == KEYHOLE_BUSY ? s->busy : s->other);
        }).join();
        return 0;
      },
      &seen));
  EXPECT_GT(seen.busy, 0);
  EXPECT_EQ(0, seen.other);
  expect_exact(session.get(), model, shape, 0, numbers);
}

TEST(Threads, ASessionOutlivesItsEngineHandle) {
  const auto ec = small_engine(2);
  EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), small_session());
  engine.reset();
  Numbers numbers(1);
  Model model(ec);
  prefill_both(session.get(), model, Shape(ec), 0, 100, numbers);
  expect_exact(session.get(), model, Shape(ec), 0, numbers);
}

TEST(Threads, ErrorTextsAreKeptPerThread) {
  keyhole_engine* e = nullptr;
  EXPECT_NE(KEYHOLE_OK, keyhole_engine_create(nullptr, &e));
  const std::string mine = keyhole_last_error();
  std::thread([] { EXPECT_STREQ("", keyhole_last_error()); }).join();
  EXPECT_EQ(mine, keyhole_last_error());
}

}  // namespace
}  // namespace keyhole::test
