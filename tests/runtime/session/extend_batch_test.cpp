// Batches: every session answers as it would alone, one that fails leaves the others as they are, and sequences join
// and leave between calls.
#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/session/members.h"

namespace keyhole::test {
namespace {

/// Sessions of one engine, and ragged new tokens of one layer.
class Batches {
 public:
  explicit Batches(uint32_t sessions, uint32_t threads = 3, uint64_t seed = 1)
      : ec_(small_engine(threads)), shape_(ec_), numbers_(seed), engine_(make_engine(ec_)) {
    for (uint32_t i = 0; i < sessions; ++i) join();
  }

  void join() {
    constexpr const char* kSpecs[] = {"flat", "hnsw:M=6,ef=100000,efc=20",
                                      "ivf:C=4,probe=16777216"};
    keyhole_session_config sc = small_session();
    sc.index = kSpecs[members_.size() % 3];
    members_.push_back({make_session(engine_.get(), sc), Model(ec_)});
    Member& m = members_.back();
    const uint32_t n = numbers_.below(200);
    if (n == 0) return;
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      prefill_both(m.session.get(), m.model, shape_, l, n, numbers_);
    }
    EXPECT_OK(keyhole_session_build(m.session.get(), nullptr, nullptr));
  }

  [[nodiscard]] Batch batch(const std::vector<uint32_t>& counts, uint32_t layer = 0) {
    return {shape_, layer, counts, numbers_};
  }
  [[nodiscard]] std::vector<keyhole_session*> sessions() const {
    std::vector<keyhole_session*> all;
    for (const Member& m : members_) all.push_back(m.session.get());
    return all;
  }
  /// The answers of a member that succeeded, whose model follows.
  void expect_truth(const Batch& b, size_t i) {
    Member& m = members_[i];
    b.expect_truth(m, i);
    EXPECT_EQ(layer_tokens(m.session.get(), b.layer).total, m.model.tokens(b.layer));
  }

  [[nodiscard]] std::vector<Member>& members() { return members_; }
  [[nodiscard]] Numbers& numbers() { return numbers_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] uint32_t layers() const { return ec_.layers; }

 private:
  keyhole_engine_config ec_;
  Shape shape_;
  Numbers numbers_;
  EnginePtr engine_;
  std::vector<Member> members_;
};

TEST(Batch, AnswersEverySequenceWhileTheyJoinAndLeave) {
  Batches all(3);
  for (uint32_t round = 0; round < unless_sanitized(12, 5); ++round) {
    if (round % 3 == 1) all.join();
    if (round % 4 == 3) all.members().erase(all.members().begin() + all.numbers().below(3));
    std::vector<uint32_t> counts;
    for (size_t i = 0; i < all.members().size(); ++i) {
      counts.push_back(all.numbers().below(4) == 0 ? all.numbers().below(90)
                                                   : all.numbers().below(4));
    }
    for (uint32_t l = 0; l < all.layers(); ++l) {
      Batch b = all.batch(counts, l);
      ASSERT_OK(b.run(all.sessions()));
      for (size_t i = 0; i < counts.size(); ++i) {
        EXPECT_EQ(b.statuses[i], KEYHOLE_OK);
        all.expect_truth(b, i);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More sessions than steps that are under way at once, and than the pool has slots for.
TEST(Batch, TakesManySessions) {
  Batches all(unless_sanitized(100, 36));
  Batch b = all.batch(std::vector<uint32_t>(all.members().size(), 3));
  ASSERT_OK(b.run(all.sessions()));
  for (size_t i = 0; i < all.members().size(); ++i) all.expect_truth(b, i);
}

TEST(Batch, GoesOnWhereOneFails) {
  Batches all(5);
  const std::vector<uint32_t> counts{2, 3, 1, 4, 70};
  for (const size_t broken : {0U, 2U, 4U}) {
    for (const bool in_q : {true, false}) {
      SCOPED_TRACE("session " + std::to_string(broken));
      Batch b = all.batch(counts);
      const uint32_t end = b.start[broken + 1];
      (in_q ? b.tokens.q[all.shape().q(end) - 1] : b.tokens.v[all.shape().kv(end) - 1]) = NAN;
      EXPECT_EQ(b.run(all.sessions()), KEYHOLE_NOT_FINITE);
      expect_error_text(in_q ? "tensor q" : "tensor v");
      for (size_t i = 0; i < counts.size(); ++i) {
        EXPECT_EQ(b.statuses[i], i == broken ? KEYHOLE_NOT_FINITE : KEYHOLE_OK);
        if (i != broken) all.expect_truth(b, i);
      }
      const Member& m = all.members()[broken];
      EXPECT_EQ(layer_tokens(m.session.get(), 0).total, m.model.tokens(0));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Batch, LeavesABusySessionAlone) {
  Batches all(3);
  keyhole_session* const busy = all.members()[1].session.get();
  const auto q = all.numbers().many(all.shape().q(1));
  const auto tq = tensor(q, {all.shape().hq, all.shape().d});
  ASSERT_OK(keyhole_session_attend_begin(busy, 0, &tq, nullptr, nullptr));
  Batch b = all.batch({2, 2, 2});
  EXPECT_EQ(b.run(all.sessions()), KEYHOLE_BUSY);
  EXPECT_EQ(b.statuses, (std::vector<keyhole_status>{KEYHOLE_OK, KEYHOLE_BUSY, KEYHOLE_OK}));
  all.expect_truth(b, 0);
  all.expect_truth(b, 2);
  ASSERT_OK(keyhole_session_attend_end(busy, &tq, nullptr));
  EXPECT_EQ(layer_tokens(busy, 0).total, all.members()[1].model.tokens(0));
  // The same session twice: the second time it is in use.
  keyhole_session* const twice = all.members()[0].session.get();
  b = all.batch({1, 1});
  EXPECT_EQ(b.run({twice, twice}), KEYHOLE_BUSY);
  EXPECT_EQ(b.statuses, (std::vector<keyhole_status>{KEYHOLE_OK, KEYHOLE_BUSY}));
}

TEST(Batch, RefusesWrongArgumentsAsAWhole) {
  Batches all(3), other(1, 1, 2);
  Batch b = all.batch({1, 2, 3});
  const auto refused = [&](const std::vector<keyhole_session*>& sessions, uint32_t layer) {
    b.layer = layer;
    EXPECT_EQ(b.run(sessions), KEYHOLE_INVALID_ARGUMENT);
    for (const keyhole_status s : b.statuses) EXPECT_EQ(s, KEYHOLE_INVALID_ARGUMENT);
    for (const Member& m : all.members()) {
      EXPECT_EQ(layer_tokens(m.session.get(), 0).total, m.model.tokens(0));
    }
  };
  const std::vector<keyhole_session*> sessions = all.sessions();
  refused(sessions, 2);
  refused({sessions[0], nullptr, sessions[2]}, 0);
  refused({sessions[0], sessions[1], other.members()[0].session.get()}, 0);
  b.start = {0, 3, 2, 6};
  refused(sessions, 0);
  b.start = {1, 2, 3, 6};
  refused(sessions, 0);
  b = all.batch({0, 0, 0});
  EXPECT_OK(b.run(sessions));
  EXPECT_EQ(b.statuses, std::vector<keyhole_status>(3, KEYHOLE_OK));
}

// Two threads with batches of sessions of one engine, which both want one session now and then.
TEST(Batch, RunsBesideOthersOnTheSameEngine) {
  Batches b(7, 3);
  const std::vector<keyhole_session*> sessions = b.sessions();
  std::atomic<uint32_t> refused{0};
  std::vector<std::atomic<uint32_t>> appended(7);
  const auto run = [&](size_t first) {
    // Three of its own, which join and leave, and one that is everybody's.
    Numbers numbers(first + 20);
    for (uint32_t round = 0; round < unless_sanitized(40, 10); ++round) {
      std::vector<size_t> mine;
      for (size_t i = 0; i < 3; ++i) {
        if (numbers.below(3) != 0) mine.push_back(first + i);
      }
      mine.push_back(6);
      std::vector<keyhole_session*> batch;
      std::vector<uint32_t> start{0};
      for (const size_t i : mine) {
        batch.push_back(sessions[i]);
        start.push_back(start.back() + 1 + numbers.below(5));
      }
      NewTokens t = new_tokens(b.shape(), start.back(), numbers);
      std::vector<keyhole_status> statuses(batch.size());
      const keyhole_status status =
          extend_batch(batch, b.shape(), 0, t, start.data(), statuses.data());
      EXPECT_EQ(status, statuses.back());
      for (size_t i = 0; i < mine.size(); ++i) {
        if (statuses[i] == KEYHOLE_OK) appended[mine[i]] += start[i + 1] - start[i];
        if (mine[i] != 6) {
          EXPECT_EQ(statuses[i], KEYHOLE_OK);
        }
      }
      if (status == KEYHOLE_BUSY) ++refused;
    }
  };
  std::thread a(run, 0), c(run, 3);
  a.join();
  c.join();
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(layer_tokens(sessions[i], 0).total, b.members()[i].model.tokens(0) + appended[i]);
  }
}

}  // namespace
}  // namespace keyhole::test
