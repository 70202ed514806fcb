// Several new tokens at once: every answer is exact attention over what came before and the new tokens that each may
// see, whatever borders of sink, window and blocks they cross; what is accepted stays, and nothing else.
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "keyhole/batch.h"
#include "tests/runtime/session/extend_fixture.h"

namespace keyhole::test {
namespace {

/// Each token sees some of those before it.
std::vector<uint64_t> random_tree(uint32_t n, Numbers& numbers) {
  std::vector<uint64_t> mask;
  for (uint32_t i = 0; i < n; ++i) {
    uint64_t bits = uint64_t{1} << i;
    for (uint32_t j = 0; j < i; ++j) bits |= uint64_t{numbers.below(2)} << j;
    mask.push_back(bits);
  }
  return mask;
}

struct ExtendCase {
  const char* name;
  const char* index;
  keyhole_mode mode;
  keyhole_tail_mode tail;
  keyhole_kv_host kv_host;
  double tolerance;
};
void PrintTo(const ExtendCase& c, std::ostream* out) { *out << c.name; }

class Extend : public ::testing::TestWithParam<ExtendCase> {
 protected:
  [[nodiscard]] keyhole_session_config config(Numbers& numbers) const {
    const ExtendCase& c = GetParam();
    keyhole_session_config sc = small_session();
    sc.index = c.index;
    sc.mode = c.mode;
    sc.budget.tail = c.tail;
    // The budget covers all: so many rows are read exactly at most, and no test has more.
    if (c.tail == KEYHOLE_TAIL_CODES) sc.budget.top_k = 1024, sc.max_tokens = 1024;
    if (c.tail == KEYHOLE_TAIL_SECOND) sc.budget.min_keys = sc.max_tokens;
    sc.kv_host = c.kv_host;
    sc.sink = numbers.below(9);
    sc.window = 1 + numbers.below(40);
    sc.flush_block = c.kv_host == KEYHOLE_KV_HOST_INT8 ? 256 : 1 + numbers.below(24);
    sc.append_block = 1 + numbers.below(40);
    return sc;
  }
};

TEST_P(Extend, EveryAnswerIsExactAcrossAllBorders) {
  const double tolerance = GetParam().tolerance;
  for (uint64_t seed = 1; seed <= unless_sanitized(6, 1); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Numbers numbers(seed);
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    auto ec = small_engine(1 + numbers.below(3));
    ec.layers = 1 + numbers.below(2);
    ec.head_dim = some_head_dim(numbers.below(1000));
    ec.value_dim = numbers.below(2) == 0 ? 0 : 16 * (1 + numbers.below(ec.head_dim / 16));
    ec.values_in_keys = numbers.below(3) == 0 ? 1 : 0;
    ec.kv_heads = 1 + numbers.below(2);
    ec.q_heads = ec.kv_heads * some_group(numbers.below(1000));
    ec.kv_dtype = kTypes[numbers.below(3)];
    ec.softcap = numbers.below(2) == 0 ? 0.0F : 10.0F;
    ec.scale = 0.05F;
    Pair p(ec, config(numbers), seed);
    for (uint32_t i = 0; i < unless_sanitized(14, 6); ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      switch (numbers.below(5)) {
        case 0: p.prefill(1 + numbers.below(60)); break;
        case 1: ASSERT_OK(keyhole_session_build(p.session(), nullptr, nullptr)); break;
        case 2: {
          const uint32_t n = numbers.below(p.model().tokens(0) + 1);
          ASSERT_OK(keyhole_session_truncate(p.session(), n));
          p.model().truncate(n);
          break;
        }
        default: break;
      }
      const bool is_long = numbers.below(5) == 0 && !kSanitized;
      const uint32_t n =
          std::min(1 + numbers.below(is_long ? 600 : 20), 1000 - p.model().tokens(0));
      if (n == 0) continue;
      const bool is_tree = n <= 64 && numbers.below(2) == 0;
      const auto mask = is_tree ? random_tree(n, numbers) : std::vector<uint64_t>{};
      p.extend_and_check(n, mask, tolerance, 1 + n / 6);
      if (HasFatalFailure()) return;
      if (numbers.below(2) == 0) {
        std::vector<uint32_t> path;
        const uint32_t one_in = 1 + numbers.below(4);
        for (uint32_t j = 0; j < n; ++j) {
          if (numbers.below(one_in) == 0) path.push_back(j);
        }
        path.reserve(1);
        ASSERT_OK(
            keyhole_session_accept(p.session(), static_cast<uint32_t>(path.size()), path.data()));
        p.keep(n, path);
      }
      p.expect_all_exact(tolerance);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, Extend,
    ::testing::Values(ExtendCase{"flat", "flat", KEYHOLE_MODE_INDEXED, KEYHOLE_TAIL_NONE,
                                 KEYHOLE_KV_HOST_SAME, 1e-4},
                      ExtendCase{"exact", "flat", KEYHOLE_MODE_EXACT, KEYHOLE_TAIL_NONE,
                                 KEYHOLE_KV_HOST_SAME, 1e-4},
                      ExtendCase{"codes", "codes:k=4,v=4", KEYHOLE_MODE_INDEXED, KEYHOLE_TAIL_CODES,
                                 KEYHOLE_KV_HOST_SAME, 1e-4},
                      ExtendCase{"lists", "codes:k=4,v=4,lists=16,read=100", KEYHOLE_MODE_INDEXED,
                                 KEYHOLE_TAIL_CODES, KEYHOLE_KV_HOST_SAME, 1e-4},
                      ExtendCase{"tail", "flat", KEYHOLE_MODE_INDEXED, KEYHOLE_TAIL_SECOND,
                                 KEYHOLE_KV_HOST_SAME, 1e-4},
                      ExtendCase{"hnsw", "hnsw:M=6,ef=100000,efc=20", KEYHOLE_MODE_INDEXED,
                                 KEYHOLE_TAIL_NONE, KEYHOLE_KV_HOST_SAME, 1e-4},
                      ExtendCase{"int8", "flat", KEYHOLE_MODE_INDEXED, KEYHOLE_TAIL_NONE,
                                 KEYHOLE_KV_HOST_INT8, 0.2},
                      ExtendCase{"codes_int8", "codes:k=4,v=4", KEYHOLE_MODE_INDEXED,
                                 KEYHOLE_TAIL_CODES, KEYHOLE_KV_HOST_INT8, 0.2}),
    [](const auto& p) { return p.param.name; });

// One by one, in one call, and as steps of keyhole_session_attend.
TEST(ExtendCall, IsWhatSingleStepsGive) {
  for (const char* index : {"flat", "codes:k=4,v=4", "ivf:C=4,probe=16777216"}) {
    SCOPED_TRACE(index);
    auto ec = small_engine();
    auto sc = small_session();
    sc.index = index;
    if (std::string(index).find("codes") == 0)
      sc.budget.tail = KEYHOLE_TAIL_CODES, sc.budget.top_k = 1024;
    Pair once(ec, sc, 7), each(ec, sc, 7), steps(ec, sc, 7);
    for (Pair* p : {&once, &each, &steps}) {
      p->prefill(unless_sanitized(700, 200));
      ASSERT_OK(keyhole_session_build(p->session(), nullptr, nullptr));
    }
    const auto tokens = unless_sanitized(70, 12);
    for (uint32_t l = 0; l < ec.layers; ++l) {
      NewTokens all = once.new_tokens(tokens);
      ASSERT_OK(once.extend(l, all));
      const Shape& s = once.shape();
      for (uint32_t i = 0; i < tokens; ++i) {
        NewTokens one = part_of(all, s, i, i + 1), step = one;
        const Answer of_all = one.answer;
        ASSERT_OK(each.extend(l, one));
        ASSERT_OK(attend(steps.session(), s, l, step));
        const Answer &a = one.answer, &b = step.answer;
        for (size_t j = 0; j < a.o.size(); ++j) {
          ASSERT_NEAR(a.o[j], of_all.o[j], 2e-5);
          ASSERT_NEAR(a.o[j], b.o[j], 2e-5);
        }
        for (uint32_t h = 0; h < ec.q_heads; ++h) {
          ASSERT_NEAR(a.lse[h], of_all.lse[h], 2e-5);
          ASSERT_NEAR(a.lse[h], b.lse[h], 2e-5);
        }
      }
    }
    EXPECT_EQ(statistics(once.session()).attends, uint64_t{tokens} * ec.layers);
  }
}

TEST(ExtendCall, HasTheSameBitsForAnyNumberOfThreads) {
  for (const char* index : {"flat", "codes:k=2,v=2"}) {
    std::vector<std::vector<float>> seen;
    for (const uint32_t threads : {1U, 2U, 5U}) {
      auto sc = small_session();
      sc.index = index;
      sc.budget.top_k = 20;
      if (std::string(index).find("codes") == 0) sc.budget.tail = KEYHOLE_TAIL_CODES;
      sc.append_mode = KEYHOLE_APPEND_IN_STEP;
      Pair p(small_engine(threads), sc, 11);
      p.prefill(unless_sanitized(2500, 1100));
      ASSERT_OK(keyhole_session_build(p.session(), nullptr, nullptr));
      std::vector<float> all;
      for (const uint32_t n : {1U, 3U, 8U, 100U}) {
        NewTokens t = p.new_tokens(n);
        ASSERT_OK(p.extend(0, t));
        all.insert(all.end(), t.answer.o.begin(), t.answer.o.end());
        all.insert(all.end(), t.answer.lse.begin(), t.answer.lse.end());
      }
      seen.push_back(all);
    }
    EXPECT_EQ(seen[0], seen[1]) << index;
    EXPECT_EQ(seen[0], seen[2]) << index;
  }
}

// Where all is attended, an audit finds no error: it counts the new tokens as the step did.
TEST(ExtendCall, IsAuditedWithItsNewTokens) {
  auto sc = small_session();
  sc.audit_share = 1.0;
  Pair p(small_engine(), sc, 3);
  p.prefill(300);
  ASSERT_OK(keyhole_session_build(p.session(), nullptr, nullptr));
  p.extend_and_check(20, {}, 1e-4);
  keyhole_audit a;
  keyhole_audit_init(&a);
  ASSERT_OK(keyhole_session_get_audit(p.session(), KEYHOLE_ALL, KEYHOLE_ALL, &a));
  EXPECT_EQ(a.audits, 20U * 2 * 4);
  EXPECT_LT(a.error_max, 1e-4);
  EXPECT_GT(a.mass_mean, 0.9999);
}

TEST(ExtendCall, AttendsInALayerWithoutTokens) {
  Pair p(small_engine(), small_session(), 5);
  p.extend_and_check(40, {}, 1e-4);
  p.expect_all_exact(1e-4);
}

TEST(ExtendCall, WritesItsAnswersWhereTheQueriesWere) {
  Pair p(small_engine(), small_session(), 6);
  p.prefill(100);
  NewTokens t = p.new_tokens(9);
  const NewTensors x(t, p.shape(), KEYHOLE_HOST);
  const std::vector<float> q = t.q;
  ASSERT_OK(
      keyhole_session_extend(p.session(), 0, &x.q, &x.k, &x.v, nullptr, &x.q, t.answer.lse.data()));
  t.answer.o = t.q;
  t.q = q;
  p.model().append(0, t.k, t.v);
  expect_answers(p.model(), p.shape(), 0, t);
}

TEST(ExtendCall, RefusesWhatItCannotDoAndChangesNothing) {
  auto sc = small_session();
  sc.max_tokens = 200;
  Pair p(small_engine(), sc, 8);
  p.prefill(150);
  const Shape& s = p.shape();
  const auto refused =
      [&](keyhole_status expected, uint32_t n,
          const std::function<void(NewTokens&, keyhole_tensor*, std::vector<uint64_t>&, uint32_t&)>&
              spoil) {
        NewTokens t = p.new_tokens(n);
        std::vector<float> o(t.q.size() + 1);
        // q, k, v, out
        keyhole_tensor x[] = {tensor(t.q, {n, s.hq, s.d}), tensor(t.k, {n, s.hkv, s.d}),
                              tensor(t.v, {n, s.hkv, s.d}), tensor(o, {n, s.hq, s.d})};
        std::vector<uint64_t> mask;
        uint32_t layer = 0;
        spoil(t, x, mask, layer);
        EXPECT_EQ(keyhole_session_extend(p.session(), layer, &x[0], &x[1], &x[2],
                                         mask.empty() ? nullptr : mask.data(), &x[3], nullptr),
                  expected)
            << keyhole_last_error();
        p.expect_all_exact(1e-4);
      };
  using Mask = std::vector<uint64_t>;
  const auto bad = KEYHOLE_INVALID_ARGUMENT;
  refused(bad, 3, [](NewTokens&, keyhole_tensor*, Mask&, uint32_t& layer) { layer = 2; });
  refused(bad, 0, [](NewTokens&, keyhole_tensor*, Mask&, uint32_t&) {});
  refused(bad, 51, [](NewTokens&, keyhole_tensor*, Mask&, uint32_t&) {});
  for (const int which : {0, 1, 2, 3}) {
    refused(bad, 3,
            [&](NewTokens&, keyhole_tensor* x, Mask&, uint32_t&) { x[which].shape[0] = 2; });
    refused(bad, 3,
            [&](NewTokens&, keyhole_tensor* x, Mask&, uint32_t&) { x[which].shape[1] += 1; });
    refused(KEYHOLE_UNSUPPORTED, 3, [&](NewTokens&, keyhole_tensor* x, Mask&, uint32_t&) {
      x[which].memory = KEYHOLE_DEVICE;
    });
  }
  refused(bad, 3, [](NewTokens&, keyhole_tensor* x, Mask&, uint32_t&) { x[3].strides[0] = 64; });
  refused(bad, 3, [](NewTokens&, keyhole_tensor* x, Mask&, uint32_t&) { x[3].strides[1] = 0; });
  refused(bad, 3, [](NewTokens&, keyhole_tensor*, Mask& m, uint32_t&) { m = {1, 2, 3}; });
  refused(bad, 3, [](NewTokens&, keyhole_tensor*, Mask& m, uint32_t&) { m = {1, 3, 12}; });
  refused(KEYHOLE_NOT_FINITE, 3,
          [](NewTokens& t, keyhole_tensor*, Mask&, uint32_t&) { t.q.back() = NAN; });
  refused(KEYHOLE_NOT_FINITE, 3,
          [](NewTokens& t, keyhole_tensor*, Mask&, uint32_t&) { t.k.back() = NAN; });
  refused(KEYHOLE_NOT_FINITE, 3,
          [](NewTokens& t, keyhole_tensor*, Mask&, uint32_t&) { t.v.back() = INFINITY; });
  p.extend_and_check(50, {}, 1e-4, 7);  // and there is room for 50
}

TEST(ExtendCall, KeepsToTheMemoryLimit) {
  auto sc = small_session();
  sc.host_memory_limit = 1500000;
  Pair p(small_engine(), sc, 9);
  p.prefill(400);
  NewTokens t = p.new_tokens(3000);
  EXPECT_EQ(p.extend(0, t), KEYHOLE_OUT_OF_MEMORY);
  p.expect_all_exact(1e-4);
  p.extend_and_check(30, {}, 1e-4, 5);
  EXPECT_LE(statistics(p.session()).host_bytes, sc.host_memory_limit);
}

TEST(Accept, RefusesWhatWasNotExtended) {
  Pair p(small_engine(), small_session(), 10);
  keyhole_session* const s = p.session();
  const auto bad = KEYHOLE_INVALID_ARGUMENT;
  EXPECT_EQ(keyhole_session_accept(s, 0, nullptr), bad) << "nothing at all";
  p.prefill(60);
  EXPECT_EQ(keyhole_session_accept(s, 0, nullptr), bad) << "a prompt alone";
  p.extend_and_check(6, {}, 1e-4);
  EXPECT_EQ(keyhole_session_accept(s, 7, nullptr), bad);
  const uint32_t falling[] = {3, 2}, beyond[] = {0, 6};
  EXPECT_EQ(keyhole_session_accept(s, 2, falling), bad);
  EXPECT_EQ(keyhole_session_accept(s, 2, beyond), bad);
  p.expect_all_exact(1e-4);
  p.prefill(1);
  EXPECT_EQ(keyhole_session_accept(s, 2, nullptr), bad) << "after other tokens";
  p.extend_and_check(6, {}, 1e-4);
  NewTokens t = p.new_tokens(6);
  ASSERT_OK(p.extend(1, t));
  p.model().append(1, t.k, t.v);
  EXPECT_EQ(keyhole_session_accept(s, 2, nullptr), bad) << "layers of other tokens";
  ASSERT_OK(keyhole_session_truncate(s, 67));
  p.model().truncate(67);
  p.extend_and_check(5, {}, 1e-4);
  ASSERT_OK(keyhole_session_truncate(s, 71));
  p.model().truncate(71);
  EXPECT_EQ(keyhole_session_accept(s, 2, nullptr), bad) << "after a truncation";
  p.expect_all_exact(1e-4);
}

// One layer was extended: another keeps its tokens.
TEST(Accept, LeavesLayersAloneThatTookNoPart) {
  Pair p(small_engine(), small_session(), 12);
  p.prefill(50);
  NewTokens t = p.new_tokens(5);
  ASSERT_OK(p.extend(1, t));
  ASSERT_OK(keyhole_session_accept(p.session(), 2, nullptr));
  EXPECT_EQ(layer_tokens(p.session(), 0).total, 50U);
  EXPECT_EQ(layer_tokens(p.session(), 1).total, 52U);
}

// Drafts: the accepted path goes on as if nothing else had ever been there.
TEST(Accept, GoesOnAsIfTheOthersHadNeverBeen) {
  Pair drafts(small_engine(), small_session(), 13), plain(small_engine(), small_session(), 13);
  for (Pair* p : {&drafts, &plain}) {
    p->prefill(40);
    ASSERT_OK(keyhole_session_build(p->session(), nullptr, nullptr));
  }
  for (uint32_t round = 0; round < unless_sanitized(30, 8); ++round) {
    const uint32_t n = 1 + drafts.numbers().below(7);
    std::vector<uint32_t> path;
    for (uint32_t i = 0; i < n; ++i) {
      if (drafts.numbers().below(2) == 0) path.push_back(i);
    }
    path.reserve(1);
    drafts.extend_and_check(n, random_tree(n, drafts.numbers()), 1e-4);
    if (HasFatalFailure()) return;
    ASSERT_OK(
        keyhole_session_accept(drafts.session(), static_cast<uint32_t>(path.size()), path.data()));
    drafts.keep(n, path);
    drafts.expect_all_exact(1e-4);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace keyhole::test
