// Figures of a session while a step is under way: they are those of the last moment when no step
// was. ThreadSanitizer makes this a test of what they read.
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

TEST(Statistics, BetweenBeginAndEndAreThoseFromBefore) {
  const auto ec = small_engine(4);
  const EnginePtr engine = make_engine(ec);
  auto sc = small_session();
  sc.index = "ivf:C=8,probe=8,segment=64";
  sc.budget.attend = KEYHOLE_ATTEND_SCORED;  // workers log scores, which takes memory
  sc.audit_share = 1.0;                      // and write records
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(21);
  Model model(ec);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l)
    prefill_both(session.get(), model, shape, l, 900, numbers);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  for (int i = 0; i < 40; ++i) {
    const uint32_t layer = static_cast<uint32_t>(i) % ec.layers;
    const auto q = numbers.many(shape.q(1));
    std::vector<float> o(shape.q(1));
    const auto tq = tensor(q, {shape.hq, shape.d});
    const auto out = tensor(o, {shape.hq, shape.d});
    const auto before = statistics(session.get());
    ASSERT_OK(keyhole_session_attend_begin(session.get(), layer, &tq, nullptr, nullptr));
    for (int look = 0; look < 20; ++look) {
      const auto meanwhile = statistics(session.get());
      ASSERT_EQ(before.host_bytes, meanwhile.host_bytes) << "step " << i;
      ASSERT_EQ(before.index_bytes, meanwhile.index_bytes);
      ASSERT_EQ(before.attends, meanwhile.attends);
    }
    ASSERT_OK(keyhole_session_attend_end(session.get(), &out, nullptr));
    ASSERT_EQ(before.attends + 1, statistics(session.get()).attends);
  }
}

// Over a session and its copies, what they share is counted once.
TEST(Statistics, MemoryThatCopiesShareIsCountedByTheFirstThatHasIt) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  for (const char* index : {"flat:codec=int8", "ivf:C=8,probe=8", "hnsw:M=6,ef=30,efc=20",
                            "roargraph:M=8,ef=30,Nq=10,beam=12", "sparq:r=16", "codes:k=2,v=2"}) {
    SCOPED_TRACE(index);
    auto sc = small_session();
    sc.index = index;
    const bool coded = std::string(index).find("codes") == 0;
    sc.budget.top_k = 50;
    sc.budget.tail = coded ? KEYHOLE_TAIL_CODES : KEYHOLE_TAIL_CENTROID;
    SessionPtr session = make_session(engine.get(), sc);
    Numbers numbers(3);
    Model model(ec);
    const Shape shape(ec);
    for (uint32_t l = 0; l < ec.layers; ++l)
      prefill_both(session.get(), model, shape, l, 1200, numbers);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    const auto alone = statistics(session.get());
    EXPECT_EQ(alone.shared_bytes, 0U);
    std::vector<SessionPtr> copies;
    for (int i = 0; i < 3; ++i) {
      copies.push_back(fork_of(i == 2 ? copies[1].get() : session.get()));
      const auto s = statistics(copies.back().get());
      EXPECT_EQ(s.index_bytes, alone.index_bytes);
      // All indexes, and K and V but for the ends of pages.
      EXPECT_GT(s.shared_bytes, alone.index_bytes);
      EXPECT_LE(s.shared_bytes, s.host_bytes);
      EXPECT_EQ(statistics(session.get()).shared_bytes, 0U);
    }
    const uint64_t shared = statistics(copies[0].get()).shared_bytes;
    session.reset();  // the oldest copy counts it from now on
    EXPECT_EQ(statistics(copies[0].get()).shared_bytes, 0U);
    EXPECT_EQ(statistics(copies[1].get()).shared_bytes, shared);
    // A copy that changes its indexes then has them for itself; of K and V it still shares what it has not cut.
    ASSERT_OK(keyhole_session_truncate(copies[1].get(), 500));
    const uint64_t k_and_v = shared - alone.index_bytes;
    EXPECT_LT(statistics(copies[1].get()).shared_bytes, k_and_v);
    EXPECT_EQ(statistics(copies[2].get()).shared_bytes, shared);
    copies[0].reset();
    EXPECT_LT(statistics(copies[2].get()).shared_bytes, k_and_v) << "it counts its indexes";
    ASSERT_OK(keyhole_session_truncate(copies[1].get(), 0));
    EXPECT_EQ(statistics(copies[1].get()).shared_bytes, 0U);
    EXPECT_EQ(statistics(copies[2].get()).shared_bytes, 0U);
  }
}

}  // namespace
}  // namespace keyhole::test
