// A process that forks: a child has its parent's objects without their threads.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "keyhole/index.h"
#include "keyhole/parallel.h"
#include "keyhole/prefill.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/parallel/thread_ranks.h"

namespace keyhole::test {
namespace {

/// How a child ends that does this: its exit code, 128 + the signal, or -1 for one that is still there after a minute.
int end_of_child(const std::function<int()>& action) {
  const pid_t child = fork();
  if (child == 0) _exit(action());
  int status = 0;
  for (int wait = 0; wait < 6000; ++wait) {
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

bool is_refused(keyhole_status status) {
  return status == KEYHOLE_UNSUPPORTED && std::strstr(keyhole_last_error(), "forked") != nullptr;
}

/// A session with an index, a thread that brings blocks into it, and workers.
struct Busy {
  keyhole_engine_config config = small_engine(2);
  EnginePtr engine = make_engine(config);
  Shape shape{config};
  Numbers numbers{31};
  Model model{config};
  SessionPtr session;

  Busy() {
    keyhole_session_config c = small_session();
    c.index = "ivf:C=8";
    c.append_mode = KEYHOLE_APPEND_BACKGROUND;
    session = make_session(engine.get(), c);
    for (uint32_t l = 0; l < config.layers; ++l) {
      prefill_both(session.get(), model, shape, l, 200, numbers);
    }
    EXPECT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    for (uint32_t l = 0; l < config.layers; ++l) {
      prefill_both(session.get(), model, shape, l, 100, numbers);
    }
  }
};

TEST(ChildProcess, CallsWithObjectsOfTheParentAreRefusedAndDestroyingThemReturns) {
  Busy parent;
  keyhole_index* index = nullptr;
  ASSERT_OK(keyhole_index_create(parent.engine.get(), "flat", 0, 0, &index));
  keyhole_prompt* prompt = nullptr;
  ASSERT_OK(keyhole_prompt_create(parent.engine.get(), "dense", &prompt));
  ThreadRanks ranks(1);
  const keyhole_transport transport = ranks.transport(0);
  keyhole_communicator* communicator = nullptr;
  ASSERT_OK(keyhole_communicator_create(&transport, nullptr, &communicator));
  const int end = end_of_child([&] {
    keyhole_engine* const engine = parent.engine.get();
    keyhole_session* const session = parent.session.get();
    keyhole_session* other = nullptr;
    keyhole_engine* with = nullptr;
    keyhole_engine_config config = small_engine();
    keyhole_index_info info;
    keyhole_index_info_init(&info);
    uint64_t attended = 0, seen = 0;
    float value = 1;
    int step = 0;
    for (const bool refused : {is_refused(keyhole_engine_get_config(engine, &config)),
                               is_refused(keyhole_session_create(engine, nullptr, &other)),
                               is_refused(keyhole_session_load(engine, "file", nullptr, &other)),
                               is_refused(keyhole_session_fork(session, &other)),
                               is_refused(keyhole_session_truncate(session, 10)),
                               is_refused(keyhole_session_save(session, "file")),
                               is_refused(keyhole_session_build(session, nullptr, nullptr)),
                               is_refused(keyhole_session_synchronize(session)),
                               is_refused(keyhole_index_get_info(index, &info)),
                               is_refused(keyhole_prompt_get_blocks(prompt, &attended, &seen)),
                               is_refused(keyhole_communicator_sum(communicator, &value, 1)), [&] {
                                 config = small_engine();
                                 config.communicator = communicator;
                                 return is_refused(keyhole_engine_create(&config, &with));
                               }()}) {
      ++step;
      if (!refused) return step;
    }
    keyhole_index_destroy(index);
    keyhole_prompt_destroy(prompt);
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
    keyhole_communicator_destroy(communicator);
    return 0;
  });
  EXPECT_EQ(end, 0)
      << "the call of that number was not refused; 100 and more: a signal; -1: it hung";
  // The parent goes on.
  expect_exact(parent.session.get(), parent.model, parent.shape, 0, parent.numbers);
  keyhole_index_destroy(index);
  keyhole_prompt_destroy(prompt);
  keyhole_communicator_destroy(communicator);
}

TEST(ChildProcess, WorksWithAnEngineOfItsOwn) {
  const Busy parent;
  const int end = end_of_child([] {
    const Busy own;
    const std::vector<float> q(own.shape.q(1), 0.5F);
    const Answer a = attend_only(own.session.get(), own.shape, 0, q);
    return ::testing::Test::HasFailure() || a.o.empty() ? 1 : 0;
  });
  EXPECT_EQ(end, 0);
}

}  // namespace
}  // namespace keyhole::test
