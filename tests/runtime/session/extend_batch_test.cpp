// Batches: every session answers as it would alone, one that fails leaves the others as they are, and sequences join and
// leave between calls.
#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/stream.h"
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

  /// New tokens, as many for each session as `tokens` says.
  void fill(const std::vector<uint32_t>& tokens) {
    start = {0};
    for (const uint32_t n : tokens) start.push_back(start.back() + n);
    k = numbers_.many(shape_.kv(start.back()));
    v = numbers_.many(k.size());
    q = numbers_.many(shape_.q(start.back()));
    o.assign(q.size(), NAN);
    lse.assign(size_t{start.back()} * ec_.q_heads, NAN);
    statuses.assign(tokens.size(), 99);
  }
  [[nodiscard]] keyhole_status run(uint32_t layer) {
    std::vector<keyhole_session*> sessions;
    for (const Member& m : members_) sessions.push_back(m.session.get());
    return run(layer, sessions);
  }
  [[nodiscard]] keyhole_status run(uint32_t layer, const std::vector<keyhole_session*>& sessions) {
    const auto n = static_cast<int64_t>(start.back());
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d}), tv = tensor(v, {n, shape_.hkv, shape_.d}),
               tq = tensor(q, {n, shape_.hq, shape_.d}), out = tensor(o, {n, shape_.hq, shape_.d});
    return keyhole_session_extend_batch(sessions.data(), static_cast<uint32_t>(sessions.size()),
                                        layer, &tq, &tk, &tv, start.data(), &out, lse.data(),
                                        statuses.data());
  }
  /// The answers of a member that succeeded, whose model follows.
  void expect_truth(uint32_t layer, size_t i) {
    Member& m = members_[i];
    const auto part = [](const std::vector<float>& x, size_t begin, size_t end) {
      return std::vector<float>(x.begin() + static_cast<std::ptrdiff_t>(begin),
                                x.begin() + static_cast<std::ptrdiff_t>(end));
    };
    for (uint32_t t = start[i]; t < start[i + 1]; ++t) {
      SCOPED_TRACE("session " + std::to_string(i) + ", token " + std::to_string(t - start[i]));
      m.model.append(layer, part(k, shape_.kv(t), shape_.kv(t + 1)),
                     part(v, shape_.kv(t), shape_.kv(t + 1)));
      std::vector<double> true_lse;
      const auto true_o =
          m.model.attend_all(layer, part(q, shape_.q(t), shape_.q(t + 1)), true_lse);
      expect_near({part(o, shape_.q(t), shape_.q(t + 1)),
                   part(lse, size_t{t} * ec_.q_heads, (size_t{t} + 1) * ec_.q_heads)},
                  true_o, true_lse);
      if (::testing::Test::HasFatalFailure()) return;
    }
    EXPECT_EQ(layer_tokens(m.session.get(), layer).total, m.model.tokens(layer));
  }

  [[nodiscard]] std::vector<Member>& members() { return members_; }
  [[nodiscard]] Numbers& numbers() { return numbers_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] uint32_t layers() const { return ec_.layers; }

  std::vector<uint32_t> start;
  std::vector<float> k, v, q, o, lse;
  std::vector<keyhole_status> statuses;

 private:
  keyhole_engine_config ec_;
  Shape shape_;
  Numbers numbers_;
  EnginePtr engine_;
  std::vector<Member> members_;
};

TEST(Batch, AnswersEverySequenceWhileTheyJoinAndLeave) {
  Batches b(3);
  for (uint32_t round = 0; round < unless_sanitized(12, 5); ++round) {
    if (round % 3 == 1) b.join();
    if (round % 4 == 3) b.members().erase(b.members().begin() + b.numbers().below(3));
    std::vector<uint32_t> tokens;
    for (size_t i = 0; i < b.members().size(); ++i) {
      tokens.push_back(b.numbers().below(4) == 0 ? b.numbers().below(90) : b.numbers().below(4));
    }
    for (uint32_t l = 0; l < b.layers(); ++l) {
      b.fill(tokens);
      ASSERT_OK(b.run(l));
      for (size_t i = 0; i < tokens.size(); ++i) {
        EXPECT_EQ(b.statuses[i], KEYHOLE_OK);
        b.expect_truth(l, i);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More sessions than steps that are under way at once, and than the pool has slots for.
TEST(Batch, TakesManySessions) {
  Batches b(unless_sanitized(100, 36));
  b.fill(std::vector<uint32_t>(b.members().size(), 3));
  ASSERT_OK(b.run(0));
  for (size_t i = 0; i < b.members().size(); ++i) b.expect_truth(0, i);
}

TEST(Batch, GoesOnWhereOneFails) {
  Batches b(5);
  const std::vector<uint32_t> tokens{2, 3, 1, 4, 70};
  for (const size_t broken : {0U, 2U, 4U}) {
    for (const bool in_q : {true, false}) {
      SCOPED_TRACE("session " + std::to_string(broken));
      b.fill(tokens);
      const size_t last =
          in_q ? b.shape().q(b.start[broken + 1]) : b.shape().kv(b.start[broken + 1]);
      (in_q ? b.q : b.v)[last - 1] = NAN;
      EXPECT_EQ(b.run(0), KEYHOLE_NOT_FINITE);
      expect_error_text(in_q ? "tensor q" : "tensor v");
      for (size_t i = 0; i < tokens.size(); ++i) {
        EXPECT_EQ(b.statuses[i], i == broken ? KEYHOLE_NOT_FINITE : KEYHOLE_OK);
        if (i != broken) b.expect_truth(0, i);
      }
      Member& m = b.members()[broken];
      EXPECT_EQ(layer_tokens(m.session.get(), 0).total, m.model.tokens(0));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Batch, LeavesABusySessionAlone) {
  Batches b(3);
  keyhole_session* const busy = b.members()[1].session.get();
  const auto q = b.numbers().many(b.shape().q(1));
  const auto tq = tensor(q, {b.shape().hq, b.shape().d});
  ASSERT_OK(keyhole_session_attend_begin(busy, 0, &tq, nullptr, nullptr));
  b.fill({2, 2, 2});
  EXPECT_EQ(b.run(0), KEYHOLE_BUSY);
  EXPECT_EQ(b.statuses, (std::vector<keyhole_status>{KEYHOLE_OK, KEYHOLE_BUSY, KEYHOLE_OK}));
  b.expect_truth(0, 0);
  b.expect_truth(0, 2);
  ASSERT_OK(keyhole_session_attend_end(busy, &tq, nullptr));
  EXPECT_EQ(layer_tokens(busy, 0).total, b.members()[1].model.tokens(0));
  // The same session twice: the second time it is in use.
  keyhole_session* const twice = b.members()[0].session.get();
  b.fill({1, 1});
  EXPECT_EQ(b.run(0, {twice, twice}), KEYHOLE_BUSY);
  EXPECT_EQ(b.statuses, (std::vector<keyhole_status>{KEYHOLE_OK, KEYHOLE_BUSY}));
}

TEST(Batch, RefusesWrongArgumentsAsAWhole) {
  Batches b(3), other(1, 1, 2);
  const auto refused = [&](const std::vector<keyhole_session*>& sessions, uint32_t layer) {
    EXPECT_EQ(b.run(layer, sessions), KEYHOLE_INVALID_ARGUMENT);
    for (const keyhole_status s : b.statuses) EXPECT_EQ(s, KEYHOLE_INVALID_ARGUMENT);
    for (Member& m : b.members()) {
      EXPECT_EQ(layer_tokens(m.session.get(), 0).total, m.model.tokens(0));
    }
  };
  std::vector<keyhole_session*> all;
  for (Member& m : b.members()) all.push_back(m.session.get());
  b.fill({1, 2, 3});
  refused(all, 2);
  refused({all[0], nullptr, all[2]}, 0);
  refused({all[0], all[1], other.members()[0].session.get()}, 0);
  b.start = {0, 3, 2, 6};
  refused(all, 0);
  b.start = {1, 2, 3, 6};
  refused(all, 0);
  b.fill({0, 0, 0});
  EXPECT_OK(b.run(0, all));
  EXPECT_EQ(b.statuses, std::vector<keyhole_status>(3, KEYHOLE_OK));
}

// Two threads with batches of sessions of one engine, which both want one session now and then.
TEST(Batch, RunsBesideOthersOnTheSameEngine) {
  Batches b(7, 3);
  std::vector<keyhole_session*> sessions;
  for (Member& m : b.members()) sessions.push_back(m.session.get());
  std::atomic<uint32_t> refused{0};
  std::vector<std::atomic<uint32_t>> appended(7);
  const auto run = [&](size_t first) {
    // Three of its own, which join and leave, and one that is everybody's.
    Numbers numbers(first + 20);
    const Shape& s = b.shape();
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
      const uint32_t n = start.back();
      const auto k = numbers.many(s.kv(n)), v = numbers.many(k.size()), q = numbers.many(s.q(n));
      std::vector<float> o(q.size());
      const auto tk = tensor(k, {n, s.hkv, s.d}), tv = tensor(v, {n, s.hkv, s.d}),
                 tq = tensor(q, {n, s.hq, s.d}), out = tensor(o, {n, s.hq, s.d});
      std::vector<keyhole_status> statuses(batch.size());
      const keyhole_status status =
          keyhole_session_extend_batch(batch.data(), static_cast<uint32_t>(batch.size()), 0, &tq,
                                       &tk, &tv, start.data(), &out, nullptr, statuses.data());
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
