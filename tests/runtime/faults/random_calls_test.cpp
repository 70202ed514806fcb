// Random calls of the whole C API on the host device.
#include "tests/runtime/faults/random_calls.h"

namespace keyhole::test {
namespace {

template <class Calls>
void make_calls(uint64_t seeds) {
  for_random_seeds(seeds, [](uint64_t seed) {
    Calls calls(seed);
    const EnginePtr engine = make_engine(calls.engine_config());
    calls.run(engine.get());
    return calls.heads_checked();
  });
}

TEST(RandomCalls, EveryAnswerIsTheTruth) { make_calls<RandomCalls>(unless_sanitized(60, 8)); }

// Specs and budgets allow as little effort as possible: lists may be empty after a truncation, a graph's beam holds
// one key, no key may have the weight that is asked for. Answers are then not exact, but where there are tokens, some
// of them are attended.
class CallsOfLittleEffort : public RandomCalls {
 public:
  explicit CallsOfLittleEffort(uint64_t seed) : RandomCalls(seed) {
    sc_.index = pick_spec();
    sc_.budget = pick_budget();
  }

 protected:
  const char* pick_spec() override {
    constexpr const char* kSpecs[] = {"ivf:C=8,probe=1",     "ivf:C=30,probe=1,codec=int8",
                                      "hnsw:M=4,ef=1,efc=8", "roargraph:M=4,ef=1,beam=8,Nq=10",
                                      "sparq:r=4",           "flat",
                                      "flat:codec=int8"};
    return kSpecs[random_.below(std::size(kSpecs))];
  }
  keyhole_budget pick_budget() override {
    constexpr keyhole_attend_mode kModes[] = {KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_SCORED,
                                              KEYHOLE_ATTEND_WEIGHT, KEYHOLE_ATTEND_WEIGHT};
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.top_k = 1;
    b.attend = kModes[random_.below(std::size(kModes))];
    b.min_weight = 0.9F;
    return b;
  }
  void compare(const Answer& a, const std::vector<double>& o,
               const std::vector<double>& lse) const override {
    for (size_t h = 0; h < lse.size(); ++h) {
      if (lse[h] == -INFINITY) continue;  // of no token
      ASSERT_TRUE(std::isfinite(a.lse[h])) << "head " << h << " attends nothing";
      ASSERT_LE(a.lse[h], lse[h] + 1e-4) << "head " << h << " attends a token twice";
    }
    for (size_t i = 0; i < o.size(); ++i) ASSERT_LE(std::abs(a.o[i]), 4.0F + 1e-4F) << i;
  }
};

TEST(RandomCalls, SomeTokenIsAlwaysAttended) {
  make_calls<CallsOfLittleEffort>(unless_sanitized(200, 8));
}

}  // namespace
}  // namespace keyhole::test
