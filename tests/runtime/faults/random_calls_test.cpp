// Random calls of the whole C API on the host device.
#include "tests/runtime/faults/random_calls.h"

namespace keyhole::test {
namespace {

TEST(RandomCalls, EveryAnswerIsTheTruth) {
  for_random_seeds(unless_sanitized(60, 8), [](uint64_t seed) {
    RandomCalls calls(seed);
    const EnginePtr engine = make_engine(calls.engine_config());
    calls.run(engine.get());
    return calls.heads_checked();
  });
}

}  // namespace
}  // namespace keyhole::test
