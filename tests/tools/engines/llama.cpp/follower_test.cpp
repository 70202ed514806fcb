// A thread that brings tokens to sessions behind the caller, which is slower than the caller here.
#include "tools/engines/llama.cpp/cuda/follower.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {
namespace {

/// Sessions of which only the addresses count.
Session* session(size_t number) { return reinterpret_cast<Session*>((number + 1) * 64); }

Following tokens(size_t number, uint32_t count) {
  return {session(number), 0, std::vector<uint32_t>(count, 7)};
}

/// Brings nothing, and notes what it was to bring; waits with the first one until it is let go.
struct Slow {
  std::promise<void> begun, let_go;
  std::vector<std::pair<Session*, size_t>> brought;
  std::string fails_with;
  Follower follower{[this](const Following& f) {
    brought.emplace_back(f.session, f.cells.size());
    if (brought.size() == 1) {
      begun.set_value();
      let_go.get_future().wait();
    }
    if (!fails_with.empty()) throw std::runtime_error(std::exchange(fails_with, ""));
  }};
  /// The first work is under way, and stays so.
  void begin() {
    follower.take({tokens(0, 1)});
    begun.get_future().wait();
  }
};
using Brought = std::vector<std::pair<Session*, size_t>>;

TEST(LlamaCppFollower, ManyBatchesBehindASlowThreadAreOneList) {
  Slow slow;
  slow.begin();
  for (uint32_t count = 2; count <= 1000; ++count) slow.follower.take({tokens(0, count)});
  slow.let_go.set_value();
  slow.follower.finish();
  EXPECT_EQ(slow.brought, (Brought{{session(0), 1}, {session(0), 1000}}));
  slow.follower.finish();
  EXPECT_EQ(slow.brought.size(), 2U);
}

TEST(LlamaCppFollower, EachSessionHasAListInTheOrderInWhichTheyCame) {
  Slow slow;
  slow.begin();
  slow.follower.take({tokens(1, 5), tokens(2, 6)});
  slow.follower.take({tokens(0, 9)});
  slow.follower.take({tokens(2, 8), tokens(1, 7)});
  slow.let_go.set_value();
  slow.follower.finish();
  EXPECT_EQ(slow.brought,
            (Brought{{session(0), 1}, {session(1), 7}, {session(2), 8}, {session(0), 9}}));
}

TEST(LlamaCppFollower, AFailureIsToldOnceAndEndsWhatWaits) {
  Slow slow;
  slow.fails_with = "no memory";
  slow.begin();
  slow.follower.take({tokens(1, 5)});
  slow.let_go.set_value();
  try {
    slow.follower.finish();
    ADD_FAILURE() << "no failure was told";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no memory");
  }
  EXPECT_EQ(slow.brought, (Brought{{session(0), 1}}));
  slow.follower.take({tokens(1, 5)});
  slow.follower.finish();
  EXPECT_EQ(slow.brought, (Brought{{session(0), 1}, {session(1), 5}}));
}

TEST(LlamaCppFollower, AFailureIsToldToWhoBringsMore) {
  Follower follower([&](const Following& /*f*/) { throw std::runtime_error("no memory"); });
  follower.take({tokens(0, 1)});
  // However long the thread takes, one of the next ones is told.
  bool told = false;
  for (uint32_t count = 2; !told; ++count) {
    try {
      follower.take({tokens(0, count)});
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "no memory");
      told = true;
    }
  }
  follower.finish();
}

TEST(LlamaCppFollower, ADroppedFailureIsNotTold) {
  Slow slow;
  slow.fails_with = "no memory";
  slow.begin();
  slow.follower.take({tokens(1, 5)});
  auto dropped = std::async(std::launch::async, [&] { slow.follower.drop(); });
  slow.let_go.set_value();
  dropped.get();
  slow.follower.finish();  // nothing to tell
  EXPECT_EQ(slow.brought, (Brought{{session(0), 1}}));
}

TEST(LlamaCppFollower, EndsWithWorkThatWaits) {
  auto slow = std::make_unique<Slow>();
  slow->begin();
  slow->follower.take({tokens(1, 5)});
  slow->let_go.set_value();
  slow.reset();
}

}  // namespace
}  // namespace keyhole::llama_cpp
