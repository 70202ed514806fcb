// Sessions that are made when they hold something, and what they count by themselves.
#include "tools/engines/llama.cpp/cuda/lazy_session.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {
namespace {

/// A session of which nobody asks how many tokens it has.
class Silent final : public Session {
 public:
  explicit Silent(int& truncations) : truncations_(truncations) {}
  [[nodiscard]] uint32_t tokens(uint32_t /*layer*/) const override {
    ADD_FAILURE() << "the session was asked";
    return 0;
  }
  void attend(uint32_t, const Rows&, const Rows&, const Rows&, const Rows&) override {}
  void append(uint32_t, const Rows&, const Rows&) override {}
  void truncate(uint32_t /*tokens*/) override { ++truncations_; }
  void read(uint32_t, uint32_t, const Rows&, const Rows&) override {}
  void build() override {}
  [[nodiscard]] std::unique_ptr<Session> fork() override {
    return std::make_unique<Silent>(truncations_);
  }
  [[nodiscard]] std::string describe() const override { return "silent"; }

 private:
  int& truncations_;
};

Rows rows(int64_t tokens) {
  Rows r;
  r.tokens = tokens;
  return r;
}

struct Made {
  int sessions = 0;
  int truncations = 0;
  LazySession::Make make() {
    return [this] {
      ++sessions;
      return std::make_unique<Silent>(truncations);
    };
  }
};

TEST(LlamaCppLazySession, IsMadeWithItsFirstTokens) {
  Made made;
  LazySession session(made.make());
  session.truncate(0);
  session.build();
  EXPECT_EQ(session.describe(), "");
  EXPECT_FALSE(session.fork()->announce(1));
  EXPECT_EQ(made.sessions, 0);
  session.append(1, rows(5), rows(5));
  EXPECT_EQ(made.sessions, 1);
  EXPECT_EQ(session.tokens(0), 0U);
  EXPECT_EQ(session.tokens(1), 5U);
  EXPECT_EQ(session.describe(), "silent");
}

TEST(LlamaCppLazySession, CountsItsTokensInEachLayer) {
  Made made;
  LazySession session(made.make());
  for (const uint32_t layer : {0U, 1U}) session.append(layer, rows(10), rows(10));
  session.attend(0, rows(3), rows(3), rows(3), rows(3));
  const auto fork = session.fork();
  session.truncate(11);
  EXPECT_EQ(session.tokens(0), 11U);
  EXPECT_EQ(session.tokens(1), 10U);
  EXPECT_EQ(fork->tokens(0), 13U);
  EXPECT_EQ(made.sessions, 1);
  EXPECT_EQ(made.truncations, 1);
}

TEST(LlamaCppLazySession, ACapturedStepCountsWithEachLaunch) {
  Made made;
  LazySession session(made.make());
  for (const uint32_t layer : {0U, 1U}) session.append(layer, rows(10), rows(10));
  for (const uint32_t layer : {0U, 1U}) {
    session.capture(layer, rows(1), rows(1), rows(1), rows(1));
  }
  EXPECT_EQ(session.tokens(1), 10U);
  session.launched(1);
  session.launched(1);
  EXPECT_EQ(session.tokens(0), 12U);
  EXPECT_EQ(session.tokens(1), 12U);
}

TEST(LlamaCppLazySession, EachHasANumberOfItsOwn) {
  Made made;
  LazySession session(made.make());
  const auto fork = session.fork();
  EXPECT_NE(session.serial(), static_cast<LazySession&>(*fork).serial());
}

}  // namespace
}  // namespace keyhole::llama_cpp
