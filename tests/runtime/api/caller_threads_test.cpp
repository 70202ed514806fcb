// Steps on threads of the caller's (keyhole_engine_config::run): the same bits as on the library's workers, and no
// thread beside them. One of the callers is called as ggml's operations are, on all of its threads at once.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <thread>
#include <vector>

#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kThreads = 3;

/// An operation that is called on kThreads threads at once, each with its number: the first makes a call of the
/// library, the others help while it lasts. As docs/embedding.md has it.
class Operation {
 public:
  void compute(const std::function<void()>& call) {
    over_.store(false);
    std::vector<std::thread> threads;
    for (uint32_t ith = 1; ith < kThreads; ++ith) {
      threads.emplace_back([this, ith, from = round_.load()] { help(ith, from); });
    }
    call();
    over_.store(true);
    for (std::thread& thread : threads) thread.join();
  }
  static void run(void* user, keyhole_task_fn task, void* context, uint32_t count) {
    auto& self = *static_cast<Operation*>(user);
    self.task_ = task;
    self.context_ = context;
    self.count_ = count;
    self.left_.store(kThreads - 1);
    ++self.rounds;
    self.round_.fetch_add(1, std::memory_order_release);
    task(context, 0);
    while (self.left_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }
  uint32_t rounds = 0;

 private:
  void help(uint32_t ith, uint32_t seen) {
    while (!over_.load()) {
      if (round_.load(std::memory_order_acquire) == seen) {
        std::this_thread::yield();
        continue;
      }
      ++seen;
      if (ith < count_) task_(context_, ith);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }
  keyhole_task_fn task_ = nullptr;
  void* context_ = nullptr;
  uint32_t count_ = 0;
  std::atomic<uint32_t> round_{0}, left_{0};
  std::atomic<bool> over_{false};
};

void one_after_the_other(void* /*user*/, keyhole_task_fn task, void* context, uint32_t count) {
  for (uint32_t i = count; i > 0; --i) task(context, i - 1);
}

size_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

/// All answers of a prompt, a build, steps, several tokens at once and a fork.
std::vector<float> answers(keyhole_engine* engine, const char* index) {
  keyhole_engine_config ec;
  keyhole_engine_config_init(&ec);
  EXPECT_OK(keyhole_engine_get_config(engine, &ec));
  const Shape shape(ec);
  keyhole_session_config c = small_session();
  c.index = index;
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  const SessionPtr session = make_session(engine, c);
  Numbers numbers(11);
  constexpr uint32_t kPrompt = 700, kSteps = 12, kAtOnce = 5;
  for (uint32_t layer = 0; layer < ec.layers; ++layer) {
    const auto k = numbers.many(shape.kv(kPrompt)), v = numbers.many(shape.kv(kPrompt));
    const auto tk = tensor(k, {kPrompt, shape.hkv, shape.d});
    const auto tv = tensor(v, {kPrompt, shape.hkv, shape.d});
    EXPECT_OK(keyhole_session_append(session.get(), layer, &tk, &tv, nullptr));
  }
  EXPECT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  std::vector<float> all;
  const SessionPtr fork = fork_of(session.get());
  for (keyhole_session* s : {session.get(), fork.get()}) {
    for (uint32_t step = 0; step < kSteps; ++step) {
      for (uint32_t layer = 0; layer < ec.layers; ++layer) {
        const bool many = step % 4 == 3;
        const uint32_t n = many ? kAtOnce : 1;
        const auto q = numbers.many(shape.q(n)), k = numbers.many(shape.kv(n)),
                   v = numbers.many(shape.kv(n));
        std::vector<float> o(shape.o(n)), lse(static_cast<size_t>(shape.hq) * n);
        const auto tensors = [&](const std::vector<float>& x, int64_t heads) {
          return many ? tensor(x, {n, heads, shape.d}) : tensor(x, {heads, shape.d});
        };
        const auto tq = tensors(q, shape.hq), tk = tensors(k, shape.hkv),
                   tv = tensors(v, shape.hkv), to = tensors(o, shape.hq);
        EXPECT_OK(many ? keyhole_session_extend(s, layer, &tq, &tk, &tv, nullptr, &to, lse.data())
                       : keyhole_session_attend(s, layer, &tq, &tk, &tv, &to, lse.data()));
        all.insert(all.end(), o.begin(), o.end());
        all.insert(all.end(), lse.begin(), lse.end());
      }
    }
  }
  return all;
}

TEST(CallerThreads, GiveTheSameBitsAndAreTheOnlyOnes) {
  for (const char* index : {"codes:k=4,v=4,lists=16", "ivf:C=16,probe=4", "exact"}) {
    SCOPED_TRACE(index);
    const std::vector<float> expected = [&] {
      const EnginePtr engine = make_engine(small_engine(kThreads));
      return answers(engine.get(), index);
    }();
    keyhole_engine_config c = small_engine(kThreads);
    c.run = one_after_the_other;
    const size_t before = threads_of_process();
    const EnginePtr engine = make_engine(c);
    EXPECT_EQ(answers(engine.get(), index), expected);
    EXPECT_EQ(threads_of_process(), before);

    Operation operation;
    c.run = Operation::run;
    c.run_user = &operation;
    const EnginePtr together = make_engine(c);
    std::vector<float> seen;
    operation.compute([&] { seen = answers(together.get(), index); });
    EXPECT_EQ(seen, expected);
    EXPECT_GT(operation.rounds, 24U) << "as many as steps and layers, and more";
  }
}

TEST(CallerThreads, AreToldAndNotPinned) {
  keyhole_engine_config c = small_engine(kThreads);
  c.run = one_after_the_other;
  c.run_user = &c;
  const EnginePtr engine = make_engine(c);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  EXPECT_EQ(seen.run, c.run);
  EXPECT_EQ(seen.run_user, &c);
  EXPECT_EQ(seen.threads, kThreads);
  c.pin_threads = 1;
  keyhole_engine* refused = nullptr;
  EXPECT_EQ(keyhole_engine_create(&c, &refused), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("pin_threads is 1");
}

/// What a task throws is the call's error, and later steps go on.
TEST(CallerThreads, BringErrorsBack) {
  keyhole_engine_config c = small_engine(kThreads);
  Operation operation;
  c.run = Operation::run;
  c.run_user = &operation;
  const EnginePtr engine = make_engine(c);
  const Shape shape(c);
  const SessionPtr session = make_session(engine.get(), small_session());
  constexpr uint32_t kPrompt = 3000;  // enough that K is checked in several tasks
  Numbers numbers(12);
  auto k = numbers.many(shape.kv(kPrompt));
  const auto v = numbers.many(shape.kv(kPrompt));
  k.back() = INFINITY;
  const auto tk = tensor(k, {kPrompt, shape.hkv, shape.d});
  const auto tv = tensor(v, {kPrompt, shape.hkv, shape.d});
  operation.compute([&] {
    EXPECT_EQ(keyhole_session_append(session.get(), 0, &tk, &tv, nullptr), KEYHOLE_NOT_FINITE);
    k.back() = 1.0F;
    EXPECT_OK(keyhole_session_append(session.get(), 0, &tk, &tv, nullptr));
  });
}

}  // namespace
}  // namespace keyhole::test
