// Batches of copies of one sequence, which do what they have in common once for all: every member answers as exact
// attention in double precision does, and as it would alone, whatever the members' lengths are and whoever comes and
// goes.
#include <cmath>
#include <string>
#include <vector>

#include "keyhole/batch.h"
#include "tests/runtime/session/members.h"
#include "tests/runtime/session/shapes_fixture.h"

namespace keyhole::test {
namespace {

keyhole_session_config exact() {
  keyhole_session_config c = small_session();
  c.max_tokens = 40000;
  c.append_block = 512;
  c.mode = KEYHOLE_MODE_EXACT;
  return c;
}
keyhole_session_config coded(const char* index, uint32_t rows) {
  keyhole_session_config c = exact();
  c.mode = KEYHOLE_MODE_INDEXED;
  c.index = index;
  c.budget.top_k = rows;
  c.budget.tail = KEYHOLE_TAIL_CODES;
  return c;
}

/// For keys of 0: these have exact codes and weigh alike, and blocks and lists hold the mean of their values exactly. A
/// token that is there twice, or another's in its place, shows.
keyhole_session_config by_means(const char* index) {
  keyhole_session_config c = coded(index, 1);
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  return c;
}

/// Near to rounding.
void expect_alike(const Answer& a, const Answer& b, double tolerance) {
  ASSERT_EQ(a.o.size(), b.o.size());
  for (size_t i = 0; i < a.o.size(); ++i) ASSERT_NEAR(a.o[i], b.o[i], tolerance) << i;
  for (size_t i = 0; i < a.lse.size(); ++i) ASSERT_NEAR(a.lse[i], b.lse[i], tolerance) << i;
}

constexpr Heads kSmall = {4, 2, 64}, kOneHead = {2, 1, 64};

/// A sequence and what has been forked from it, in the order in which they came.
class Family {
 public:
  Family(const keyhole_session_config& sc, uint32_t tokens, uint32_t threads, uint64_t seed,
         float key_size = 1.0F, const std::vector<Heads>& layers = {kSmall})
      : config_(layers, threads),
        numbers(seed),
        engine_(make_engine(config_.engine)),
        key_size_(key_size) {
    members.push_back({make_session(engine_.get(), sc), Model(config_.engine)});
    prefill(members[0], tokens);
    build(0);
  }

  void prefill(Member& m, uint32_t n) {
    for (uint32_t l = 0; l < layers(); ++l) {
      const Shape s = shape(l);
      auto k = numbers.many(s.kv(n));
      for (float& x : k) x *= key_size_;
      const auto v = numbers.many(s.kv(n));
      const auto tk = tensor(k, {n, s.hkv, s.d}), tv = tensor(v, {n, s.hkv, s.d});
      EXPECT_OK(keyhole_session_append(m.session.get(), l, &tk, &tv, nullptr));
      m.model.append(l, k, v);
    }
  }
  void join(size_t of) {
    members.push_back({fork_of(members[of].session.get()), members[of].model});
  }
  void build(size_t i) {
    EXPECT_OK(keyhole_session_build(members[i].session.get(), nullptr, nullptr));
  }
  void leave(size_t i) { members.erase(members.begin() + static_cast<std::ptrdiff_t>(i)); }
  void truncate(size_t i, uint32_t n) {
    EXPECT_OK(keyhole_session_truncate(members[i].session.get(), n));
    members[i].model.truncate(n);
  }
  [[nodiscard]] Batch batch(const std::vector<uint32_t>& tokens, uint32_t layer = 0) {
    return {shape(layer), layer, tokens, numbers, key_size_};
  }
  [[nodiscard]] std::vector<keyhole_session*> sessions() const {
    std::vector<keyhole_session*> all;
    for (const Member& m : members) all.push_back(m.session.get());
    return all;
  }
  [[nodiscard]] uint32_t layers() const { return config_.engine.layers; }
  [[nodiscard]] Shape shape(uint32_t layer) const { return config_.shape(layer); }

 private:
  ShapedConfig config_;

 public:
  Numbers numbers;
  std::vector<Member> members;

 private:
  EnginePtr engine_;
  float key_size_;
};

/// Members come, go, grow by themselves and are cut, some of them into what they share.
void live(Family& f, uint32_t rounds, double tolerance) {
  for (uint32_t round = 0; round < rounds; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto any = [&] { return f.numbers.below(static_cast<uint32_t>(f.members.size())); };
    if (f.members.size() < 6) f.join(any());
    if (f.members.size() > 2 && f.numbers.below(4) == 0) f.leave(any());
    if (f.numbers.below(2) == 0) f.prefill(f.members[any()], 1 + f.numbers.below(1500));
    if (f.numbers.below(3) == 0) {
      const size_t i = any();
      f.truncate(i, f.members[i].model.tokens(0) - f.numbers.below(1200));
    }
    if (f.numbers.below(2) == 0) f.build(any());
    std::vector<uint32_t> tokens;
    for (size_t i = 0; i < f.members.size(); ++i) tokens.push_back(f.numbers.below(4));
    for (uint32_t layer = 0; layer < f.layers(); ++layer) {
      SCOPED_TRACE("layer " + std::to_string(layer));
      Batch b = f.batch(tokens, layer);
      ASSERT_OK(b.run(f.sessions()));
      for (size_t i = 0; i < f.members.size(); ++i) {
        b.expect_truth(f.members[i], i, tolerance);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Cascade, ForksOfDifferentLengthsAttendExactly) {
  for (uint64_t seed = 1; seed <= cases(4); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Family f(exact(), 2600 + 700 * static_cast<uint32_t>(seed), 1 + seed % 3, seed);
    live(f, unless_sanitized(8, 4), 2e-4);
  }
}

// Fewer and smaller heads than the layer before, and more and larger ones.
TEST(Cascade, LayersOfDifferentShapesAttendExactly) {
  for (const bool codes : {false, true}) {
    const auto c = codes ? by_means("codes:k=2,v=0") : exact();
    Family f(c, unless_sanitized(3000, 1800), 2, 21, codes ? 0.0F : 1.0F,
             {{4, 2, 64}, {3, 1, 128}, {8, 4, 80}});
    live(f, unless_sanitized(4, 2), codes ? 1e-3 : 2e-4);
  }
}

TEST(Cascade, ForksOfDifferentLengthsAttendByCodes) {
  for (uint64_t seed = 1; seed <= cases(4); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto c = by_means("codes:k=2,v=0");
    Family f(c, 7000 + 1500 * static_cast<uint32_t>(seed), 1 + seed % 3, 10 + seed, 0.0F);
    live(f, unless_sanitized(6, 3), 1e-3);
  }
}

// Members cut into their last chunk of lists, and some into the first, which are those of others no more.
TEST(Cascade, ForksOfDifferentLengthsAttendByLists) {
  for (uint64_t seed = 1; seed <= cases(3); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Family f(by_means("codes:k=2,v=0,lists=64"), 17300, 1 + seed % 3, 30 + seed, 0.0F, {kOneHead});
    live(f, unless_sanitized(6, 2), 1e-3);
  }
}

// What a member answers is what it would answer alone.
TEST(Cascade, AnswersAsEachWouldAlone) {
  struct Case {
    keyhole_session_config config;
    uint32_t q_heads;
    bool is_shared = true;   ///< much of what is read is in common
    uint32_t tokens = 7500;  ///< indexed
    uint32_t pending = 0;    ///< of the one that is forked
    double tolerance = 2e-5;
  };
  auto rounded = exact();
  rounded.kv_host = KEYHOLE_KV_HOST_INT8;
  rounded.flush_block = 0;
  auto audited = coded("codes:k=2,v=2", 16);
  audited.audit_share = 0.5;
  const auto searched = [](const char* index) {
    auto c = exact();
    c.mode = KEYHOLE_MODE_INDEXED;
    c.index = index;
    c.append_block = 8192;
    return c;
  };
  const std::vector<Case> cases = {{exact(), 12},
                                   {coded("codes:k=2,v=2,lists=32", 16), 4, false, 24000, 0, 0.0},
                                   {rounded, 4},
                                   {coded("codes:k=2,v=2", 16), 4},
                                   {coded("codes:k=4,v=4", 100), 12},
                                   {searched("ivf:C=32,probe=4"), 4, true, 2000, 4000},
                                   {searched("roargraph"), 4, true, 1500, 4000},
                                   {audited, 4}};
  for (const Case& c : unless_sanitized(cases, 2)) {
    SCOPED_TRACE(c.config.index);
    Family f(c.config, c.tokens, 2, 3, 0.3F, {{c.q_heads, 2, 64}});
    f.prefill(f.members[0], c.pending);
    for (const size_t of : {0, 0, 1, 2, 0}) {
      f.join(of);
      f.prefill(f.members.back(), 300 + 200 * static_cast<uint32_t>(f.members.size()));
      if (c.pending == 0 && f.members.size() % 2 == 0) f.build(f.members.size() - 1);
    }
    std::vector<SessionPtr> twins;
    for (keyhole_session* s : f.sessions()) {
      twins.push_back(fork_of(s));
      EXPECT_OK(keyhole_session_reset_statistics(s));
      EXPECT_OK(keyhole_session_reset_statistics(twins.back().get()));
    }
    Batch b = f.batch({1, 1, 3, 1, 2, 1});
    ASSERT_OK(b.run(f.sessions()));
    uint64_t together = 0, one_by_one = 0;
    for (size_t i = 0; i < twins.size(); ++i) {
      SCOPED_TRACE("session " + std::to_string(i));
      expect_alike(b.of(i).answer, b.alone(twins[i].get(), i), c.tolerance);
      if (HasFatalFailure()) return;
      const auto seen = statistics(f.members[i].session.get()), alone = statistics(twins[i].get());
      EXPECT_EQ(seen.attends, alone.attends);
      EXPECT_EQ(seen.keys_scored, alone.keys_scored);
      EXPECT_EQ(seen.keys_offered, alone.keys_offered);
      EXPECT_EQ(seen.keys_attended, alone.keys_attended);
      EXPECT_LE(seen.bytes_read, alone.bytes_read);
      together += seen.bytes_read;
      one_by_one += alone.bytes_read;
    }
    if (c.is_shared) {
      EXPECT_LT(5 * together, 4 * one_by_one);
    }
  }
}

TEST(Cascade, ThreadsChangeNoBit) {
  const std::vector<keyhole_session_config> configs = {exact(), coded("codes:k=2,v=2", 16),
                                                       coded("codes:k=2,v=2,lists=64", 16)};
  for (const auto& c : unless_sanitized(configs, 3)) {
    SCOPED_TRACE(c.index);
    const bool lists = std::string(c.index).find("lists") != std::string::npos;
    std::vector<float> first;
    for (const uint32_t threads : unless_sanitized(std::vector<uint32_t>{1, 2, 5}, 2)) {
      Family f(c, lists ? 17000 : 7000, threads, 5, 0.3F, {kOneHead});
      for (uint32_t i = 0; i < 9; ++i) {
        f.join(i / 2);
        f.prefill(f.members.back(), 50 * i + 1);
      }
      Batch b = f.batch(std::vector<uint32_t>(10, 1));
      ASSERT_OK(b.run(f.sessions()));
      std::vector<float> seen = b.tokens.answer.o;
      seen.insert(seen.end(), b.tokens.answer.lse.begin(), b.tokens.answer.lse.end());
      if (first.empty()) first = seen;
      EXPECT_EQ(seen, first) << threads << " threads";
    }
  }
}

TEST(Cascade, GoesOnWhereOneFails) {
  for (const bool lists : {false, true}) {
    Family f(lists ? by_means("codes:k=2,v=0,lists=64") : exact(), lists ? 17000 : 3000, 3, 7,
             lists ? 0.0F : 1.0F, {kOneHead});
    for (uint32_t i = 0; i < 4; ++i) f.join(0);
    for (const size_t broken : unless_sanitized(std::vector<size_t>{0, 2, 4}, lists ? 3 : 1)) {
      for (const bool in_q : {true, false}) {
        Batch b = f.batch({1, 2, 1, 1, 3});
        if (in_q) {
          b.tokens.q[f.shape(0).q(b.start[broken + 1]) - 1] = NAN;
        } else {
          b.tokens.k[f.shape(0).kv(b.start[broken + 1]) - 1] = INFINITY;
        }
        EXPECT_EQ(b.run(f.sessions()), KEYHOLE_NOT_FINITE);
        for (size_t i = 0; i < f.members.size(); ++i) {
          EXPECT_EQ(b.statuses[i], i == broken ? KEYHOLE_NOT_FINITE : KEYHOLE_OK);
          if (i != broken) b.expect_truth(f.members[i], i, lists ? 1e-3 : 2e-4);
          EXPECT_EQ(layer_tokens(f.members[i].session.get(), 0).total,
                    f.members[i].model.tokens(0));
        }
      }
    }
  }
}

// More sessions than are under way at once, of two families and by themselves.
TEST(Cascade, TakesManyFamilies) {
  Family f(exact(), 2200, 2, 9);
  for (uint32_t i = 0; i < unless_sanitized(37, 4); ++i) f.join(0);
  f.join(1);
  f.truncate(1, 40);
  f.prefill(f.members[1], 2300);  // nobody's any more
  f.join(1);
  Batch b = f.batch(std::vector<uint32_t>(f.members.size(), 1));
  ASSERT_OK(b.run(f.sessions()));
  for (size_t i = 0; i < f.members.size(); ++i) {
    b.expect_truth(f.members[i], i, 2e-4);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace keyhole::test
