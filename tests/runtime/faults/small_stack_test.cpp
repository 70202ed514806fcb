// A caller's thread whose stack has 128 KiB, as those of engines and of languages with many threads have: every call
// works there.
#include <algorithm>
#include <functional>

#include <pthread.h>
#include <unistd.h>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

/// Runs `work` on a thread of its own.
void on_small_stack(const std::function<void()>& work) {
  constexpr size_t kStack = size_t{128} << 10U;
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  const auto least = static_cast<size_t>(std::max(sysconf(_SC_THREAD_STACK_MIN), 0L));
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, std::max(kStack, least)), 0);
  const auto run = [](void* of) -> void* {
    (*static_cast<const std::function<void()>*>(of))();
    return nullptr;
  };
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, run, const_cast<std::function<void()>*>(&work)),
            0);
  pthread_attr_destroy(&attributes);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
}

class SmallStack : public ::testing::TestWithParam<const char*> {};

TEST_P(SmallStack, IsEnoughForEveryCall) {
  // Sanitizers make frames several times as large.
  KEYHOLE_SKIP_WITH_SANITIZERS();
  const TemporaryFolder folder;
  on_small_stack([&] {
    const auto ec = small_engine();
    const EnginePtr engine = make_engine(ec);
    auto sc = small_session();
    sc.max_tokens = 4000;
    sc.index = GetParam();
    SessionPtr session = make_session(engine.get(), sc);
    const Shape shape(ec);
    Numbers numbers(3);
    const auto rows = [&](uint32_t n, uint32_t heads) {
      return numbers.many(size_t{n} * heads * shape.d);
    };
    const auto of = [&](const std::vector<float>& v, uint32_t n, uint32_t heads) {
      return tensor(v, {n, heads, shape.d});
    };
    const uint32_t prompt = 3000, turn = 64;
    for (const uint32_t n : {prompt, turn}) {
      const auto k = rows(n, shape.hkv), v = rows(n, shape.hkv), q = rows(n, shape.hq);
      auto o = rows(n, shape.hq);
      const auto tk = of(k, n, shape.hkv), tv = of(v, n, shape.hkv), tq = of(q, n, shape.hq);
      const auto to = of(o, n, shape.hq);
      for (uint32_t l = 0; l < ec.layers; ++l) {
        if (n == prompt) {
          ASSERT_OK(keyhole_session_append(session.get(), l, &tk, &tv, &tq));
        } else {
          ASSERT_OK(keyhole_session_extend(session.get(), l, &tq, &tk, &tv, nullptr, &to, nullptr));
        }
      }
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    }
    const auto k = rows(1, shape.hkv), q = rows(1, shape.hq);
    const auto tk = tensor(k, {shape.hkv, shape.d}), tq = tensor(q, {shape.hq, shape.d});
    for (int step = 0; step < 3; ++step) {
      for (uint32_t l = 0; l < ec.layers; ++l) {
        auto o = rows(1, shape.hq);
        const auto to = tensor(o, {shape.hq, shape.d});
        ASSERT_OK(keyhole_session_attend(session.get(), l, &tq, &tk, &tk, &to, nullptr));
      }
    }
    const std::string path = folder / "small.session";
    ASSERT_OK(keyhole_session_save(session.get(), path.c_str()));
    const SessionPtr owner = load_of(engine.get(), path);
    ASSERT_OK(keyhole_session_truncate(owner.get(), prompt / 2));
    session = SessionPtr();
  });
}

INSTANTIATE_TEST_SUITE_P(Types, SmallStack,
                         ::testing::Values("flat", "ivf", "hnsw", "roargraph", "saap", "sparq",
                                           "codes:k=4,v=4", "codes:k=2,v=2,lists=64"));

}  // namespace
}  // namespace keyhole::test
