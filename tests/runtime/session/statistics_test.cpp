// Figures of a session while a step is under way: they are those of the last moment when no step
// was. ThreadSanitizer makes this a test of what they read.
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
  ASSERT_OK(keyhole_build(session.get(), nullptr, nullptr));
  for (int i = 0; i < 40; ++i) {
    const uint32_t layer = static_cast<uint32_t>(i) % ec.layers;
    const auto q = numbers.many(shape.q(1));
    std::vector<float> o(shape.q(1));
    const auto tq = tensor(q, {shape.hq, shape.d});
    const auto out = tensor(o, {shape.hq, shape.d});
    const auto before = statistics(session.get());
    ASSERT_OK(keyhole_attend_begin(session.get(), layer, &tq, nullptr, nullptr));
    for (int look = 0; look < 20; ++look) {
      const auto meanwhile = statistics(session.get());
      ASSERT_EQ(before.host_bytes, meanwhile.host_bytes) << "step " << i;
      ASSERT_EQ(before.index_bytes, meanwhile.index_bytes);
      ASSERT_EQ(before.attends, meanwhile.attends);
    }
    ASSERT_OK(keyhole_attend_end(session.get(), &out, nullptr));
    ASSERT_EQ(before.attends + 1, statistics(session.get()).attends);
  }
}

}  // namespace
}  // namespace keyhole::test
