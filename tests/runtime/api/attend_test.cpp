// Modes, halves of a step, dtypes and layouts of the caller's tensors, statistics.
#include <algorithm>

#include "cpu/kernels.h"
#include "keyhole/stream.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

class Attend : public ::testing::Test {
 protected:
  void make(uint32_t n) {
    engine_ = make_engine(ec_);
    session_ = make_session(engine_.get(), sc_);
    ASSERT_NE(session_, nullptr);
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(session_.get(), model_, shape_, l, n, numbers_);
  }

  keyhole_engine_config ec_ = small_engine();
  keyhole_session_config sc_ = small_session();
  EnginePtr engine_;
  SessionPtr session_;
  Numbers numbers_{7};
  Model model_{ec_};
  Shape shape_{ec_};
};

TEST_F(Attend, ResidentModeReadsSinkAndWindowOnly) {
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  ASSERT_OK(keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_RESIDENT, 0));
  const auto t = layer_tokens(session_.get(), 0);
  const auto q = numbers_.many(shape_.q(1));
  std::vector<double> lse;
  const auto o =
      model_.attend(0, q, lse, [&](uint32_t i) { return i < t.sink || i >= t.total - t.window; });
  expect_near(attend_only(session_.get(), shape_, 0, q), o, lse);
  EXPECT_EQ(0U, statistics(session_.get()).keys_attended);
}

TEST_F(Attend, ExactModeIsExactWithASmallK) {
  sc_.budget.top_k = 1;
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  ASSERT_OK(keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_EXACT, 0));
  expect_exact(session_.get(), model_, shape_, 1, numbers_);
}

TEST_F(Attend, BeforeBuildEverythingIsPendingAndExact) {
  sc_.budget.top_k = 1;
  make(300);
  const auto t = layer_tokens(session_.get(), 0);
  EXPECT_EQ(0U, t.indexed);
  EXPECT_EQ(300 - t.sink - t.window, t.pending);
  expect_exact(session_.get(), model_, shape_, 0, numbers_);
}

// Flat scores everything, so attending what was scored is exact, whatever k is.
TEST_F(Attend, ScoredOverFlatIsExact) {
  sc_.budget.top_k = 1;
  sc_.budget.attend = KEYHOLE_ATTEND_SCORED;
  make(500);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto t = layer_tokens(session_.get(), 0);
  expect_exact(session_.get(), model_, shape_, 0, numbers_);
  const auto st = statistics(session_.get());
  EXPECT_EQ(4U * t.indexed, st.keys_attended);
  EXPECT_EQ(4U * t.indexed, st.keys_scored);
  // For each indexed token K is read once for the scan and V once for attention, for both KV heads, in fp16.
  EXPECT_EQ(2U * t.indexed * 2 * 64 * 2, st.bytes_read);
}

// Weights are those among the indexed tokens, and one head of the group is enough.
TEST_F(Attend, WeightAttendsTheGroupsHeavyTokens) {
  sc_.budget.top_k = 1;
  sc_.budget.attend = KEYHOLE_ATTEND_WEIGHT;
  sc_.budget.min_weight = 0.02F;
  make(400);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto t = layer_tokens(session_.get(), 0);
  const auto q = numbers_.many(shape_.q(1));
  const auto offloaded = [&](uint32_t i) { return i >= t.sink && i < t.total - t.window; };
  std::vector<double> lse_all, lse;
  (void)model_.attend(0, q, lse_all, offloaded);
  std::vector<double> o(shape_.q(1));
  lse.resize(ec_.q_heads);
  uint32_t heavy_tokens = 0;
  for (uint32_t kv_head = 0; kv_head < 2; ++kv_head) {
    std::vector<bool> heavy(t.total, false);
    for (uint32_t i = 0; i < t.total; ++i) {
      std::vector<double> one;
      (void)model_.attend(0, q, one, [&](uint32_t j) { return j == i; });
      for (uint32_t h = 2 * kv_head; h < 2 * kv_head + 2; ++h) {
        const double weight = std::exp(one[h] - lse_all[h]);
        ASSERT_GT(std::fabs(weight / sc_.budget.min_weight - 1), 1e-3) << "choose another seed";
        heavy[i] = heavy[i] || weight > sc_.budget.min_weight;
      }
      if (heavy[i] && offloaded(i)) ++heavy_tokens;
    }
    std::vector<double> part;
    const auto of_head =
        model_.attend(0, q, part, [&](uint32_t i) { return !offloaded(i) || heavy[i]; });
    for (uint32_t h = 2 * kv_head; h < 2 * kv_head + 2; ++h) {
      lse[h] = part[h];
      std::copy_n(of_head.begin() + h * 64, 64, o.begin() + h * 64);
    }
  }
  expect_near(attend_only(session_.get(), shape_, 0, q), o, lse);
  EXPECT_GT(heavy_tokens, 4U);
  EXPECT_EQ(2U * heavy_tokens, statistics(session_.get()).keys_attended);
}

TEST_F(Attend, AttendModeCanBeChangedAndReadBack) {
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto expect_config = [&](keyhole_attend_mode attend, float min_weight) {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    ASSERT_OK(keyhole_session_get_config(session_.get(), &c));
    EXPECT_EQ(attend, c.budget.attend);
    EXPECT_EQ(min_weight, c.budget.min_weight);
  };
  expect_config(KEYHOLE_ATTEND_TOPK, 1e-4F);
  ASSERT_OK(keyhole_session_set_attend(session_.get(), KEYHOLE_ATTEND_WEIGHT, 0.01F));
  expect_config(KEYHOLE_ATTEND_WEIGHT, 0.01F);
  ASSERT_OK(keyhole_session_set_attend(session_.get(), KEYHOLE_ATTEND_SCORED, 0.0F));
  expect_config(KEYHOLE_ATTEND_SCORED, 0.01F);
  expect_exact(session_.get(), model_, shape_, 0, numbers_);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_attend(session_.get(), 4, 0.0F));
  for (const float bad : {-1.0F, 1.0F, NAN}) {
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
              keyhole_session_set_attend(session_.get(), KEYHOLE_ATTEND_WEIGHT, bad));
  }
  expect_config(KEYHOLE_ATTEND_SCORED, 0.01F);
}

// Top-k attends each head's k best keys and what the other heads of its group found, nothing else.
TEST_F(Attend, SmallKAttendsTheUnionOfTheGroupsBestKeys) {
  sc_.budget.top_k = 3;
  make(200);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto t = layer_tokens(session_.get(), 0);
  const auto q = numbers_.many(shape_.q(1));
  const auto seen = attend_only(session_.get(), shape_, 0, q);
  const auto st = statistics(session_.get());
  // Two KV heads with two query heads each: between 3 and 6 keys, counted for each query head.
  EXPECT_GE(st.keys_attended, 2U * 2 * 3);
  EXPECT_LE(st.keys_attended, 2U * 2 * 6);
  EXPECT_EQ(4U * t.indexed, st.keys_offered);
  EXPECT_EQ(st.keys_offered, st.keys_scored);  // flat scores everything
  std::vector<double> lse, lse_resident;
  (void)model_.attend_all(0, q, lse);
  (void)model_.attend(0, q, lse_resident,
                      [&](uint32_t i) { return i < t.sink || i >= t.total - t.window; });
  for (uint32_t h = 0; h < ec_.q_heads; ++h) {
    EXPECT_GT(seen.lse[h], lse_resident[h]);
    EXPECT_LT(seen.lse[h], lse[h]);
  }
}

TEST_F(Attend, BeginAndEndGiveTheSameAsAttend) {
  make(200);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto q = numbers_.many(shape_.q(1));
  const auto whole = attend_only(session_.get(), shape_, 0, q);
  auto copy = q;
  const auto tq = tensor(copy, {shape_.hq, shape_.d});
  ASSERT_OK(keyhole_session_attend_begin(session_.get(), 0, &tq, nullptr, nullptr));
  std::fill(copy.begin(), copy.end(), 0.0F);  // begin has taken its copy
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_attend_begin(session_.get(), 0, &tq, nullptr, nullptr));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_truncate(session_.get(), 3));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto wrong = tensor(copy, {shape_.hq + 1, shape_.d});
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_attend_end(session_.get(), &wrong, nullptr));
  Answer a{std::vector<float>(shape_.q(1)), std::vector<float>(ec_.q_heads)};
  const auto out = tensor(a.o, {shape_.hq, shape_.d});
  ASSERT_OK(keyhole_session_attend_end(session_.get(), &out, a.lse.data()));
  EXPECT_EQ(whole.o, a.o);
  EXPECT_EQ(whole.lse, a.lse);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_attend_end(session_.get(), &out, nullptr));
}

TEST_F(Attend, TwoSessionsOfOneThreadMayOverlapTheirSteps) {
  make(200);
  const SessionPtr other = make_session(engine_.get(), sc_);
  Model other_model(ec_);
  prefill_both(other.get(), other_model, shape_, 0, 150, numbers_);
  const auto q = numbers_.many(shape_.q(1));
  const auto tq = tensor(q, {shape_.hq, shape_.d});
  ASSERT_OK(keyhole_session_attend_begin(session_.get(), 0, &tq, nullptr, nullptr));
  ASSERT_OK(keyhole_session_attend_begin(other.get(), 0, &tq, nullptr, nullptr));
  std::vector<double> lse;
  const auto finish = [&](keyhole_session* s, const Model& m) {
    Answer a{std::vector<float>(shape_.q(1)), std::vector<float>(ec_.q_heads)};
    const auto out = tensor(a.o, {shape_.hq, shape_.d});
    ASSERT_OK(keyhole_session_attend_end(s, &out, a.lse.data()));
    const auto o = m.attend_all(0, q, lse);
    expect_near(a, o, lse);
  };
  finish(session_.get(), model_);
  finish(other.get(), other_model);
}

TEST_F(Attend, DestroyingASessionInsideAStepIsSafe) {
  make(200);
  const auto q = numbers_.many(shape_.q(1));
  const auto tq = tensor(q, {shape_.hq, shape_.d});
  ASSERT_OK(keyhole_session_attend_begin(session_.get(), 0, &tq, nullptr, nullptr));
  session_.reset();
}

TEST_F(Attend, StridedTensorsOfEveryDtype) {
  make(40);
  const auto q = numbers_.many(shape_.q(1));
  const auto whole = attend_only(session_.get(), shape_, 0, q);
  const auto& kernels = cpu::select_kernels();
  for (const keyhole_dtype t : {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16}) {
    const size_t size = t == KEYHOLE_F32 ? 4 : 2;
    const int64_t stride = shape_.d + 24;
    std::vector<std::byte> rows(static_cast<size_t>(shape_.hq * stride) * size, std::byte{0x7f});
    std::vector<std::byte> result(rows.size(), std::byte{0x55});
    for (int64_t h = 0; h < shape_.hq; ++h) {
      kernels.from_f32[t](q.data() + h * shape_.d,
                          rows.data() + static_cast<size_t>(h * stride) * size,
                          static_cast<size_t>(shape_.d));
    }
    auto tq = keyhole_tensor{rows.data(), t, KEYHOLE_HOST, 2, {shape_.hq, shape_.d}, {stride, 1}};
    auto out = tq;
    out.data = result.data();
    ASSERT_OK(keyhole_session_attend(session_.get(), 0, &tq, nullptr, nullptr, &out, nullptr));
    std::vector<float> row(static_cast<size_t>(stride));
    for (int64_t h = 0; h < shape_.hq; ++h) {
      kernels.to_f32[t](result.data() + static_cast<size_t>(h * stride) * size, row.data(),
                        static_cast<size_t>(shape_.d));
      // bf16 keeps 8 bits: half a unit in the last place of values up to 4 is 2^-7.
      const double tolerance = t == KEYHOLE_F32 ? 0.0 : (t == KEYHOLE_F16 ? 1.0 / 512 : 1.0 / 64);
      for (int64_t i = 0; i < shape_.d; ++i) {
        ASSERT_NEAR(whole.o[static_cast<size_t>(h * shape_.d + i)], row[static_cast<size_t>(i)],
                    tolerance);
      }
      // What lies between the rows is the caller's.
      const size_t gap = static_cast<size_t>(h * stride + shape_.d) * size;
      for (size_t b = 0; b < 24 * size; ++b) ASSERT_EQ(std::byte{0x55}, result[gap + b]);
    }
  }
}

TEST_F(Attend, StatisticsCountWhatWasDone) {
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const auto before = statistics(session_.get());
  EXPECT_EQ(0U, before.attends);
  EXPECT_EQ(300U, before.tokens);
  EXPECT_GT(before.build_seconds, 0.0);
  EXPECT_STREQ("host", before.device);
  EXPECT_EQ(2U, before.threads);
  for (int i = 0; i < 3; ++i)
    (void)attend_only(session_.get(), shape_, 1, numbers_.many(shape_.q(1)));
  const auto after = statistics(session_.get());
  EXPECT_EQ(3U, after.attends);
  EXPECT_GT(after.attend_seconds, 0.0);
  EXPECT_GT(after.search_seconds, 0.0);
  EXPECT_GT(after.bytes_read, 0U);
  ASSERT_OK(keyhole_session_reset_statistics(session_.get()));
  EXPECT_EQ(0U, statistics(session_.get()).attends);
}

TEST_F(Attend, LogitsOfTenThousand) {
  ec_.scale = 100.0F;
  model_ = Model(ec_);
  make(120);
  const auto q = numbers_.many(shape_.q(1));
  std::vector<double> lse;
  const auto o = model_.attend_all(0, q, lse);
  const auto seen = attend_only(session_.get(), shape_, 0, q);
  for (size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(seen.o[i], o[i], 2e-2);
  // Logits reach 1e4; fp32 holds them to 1e-3.
  for (size_t h = 0; h < lse.size(); ++h)
    ASSERT_NEAR(seen.lse[h], lse[h], 1e-6 * std::fabs(lse[h]) + 1e-2);
}

}  // namespace
}  // namespace keyhole::test
