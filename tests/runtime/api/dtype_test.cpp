// K and V that come in another dtype than they are stored in: what does not fit is refused, and the
// log says once that kv_dtype is not the model's.
#include <cstring>

#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kTokens = 6;
constexpr uint16_t kLarge = 0x47C0;  // bf16: 98304, above f16's largest value

class Dtype : public ::testing::Test {
 protected:
  void make(keyhole_dtype kv_dtype) {
    keyhole_engine_config c = small_engine();
    c.kv_dtype = kv_dtype;
    c.log = [](void* user, int32_t level, const char* text) {
      if (std::strstr(text, "are stored as") == nullptr) return;
      EXPECT_EQ(level, KEYHOLE_LOG_INFO);
      static_cast<std::vector<std::string>*>(user)->emplace_back(text);
    };
    c.log_user = &told_;
    engine_ = make_engine(c);
    session_ = make_session(engine_.get(), small_session());
  }
  /// Zeros `[kTokens, Hkv, d]`.
  static std::vector<uint16_t> zeros() { return std::vector<uint16_t>(kTokens * size_t{2} * 64); }
  static keyhole_tensor rows(const std::vector<uint16_t>& data, keyhole_dtype dtype,
                             int64_t tokens = kTokens) {
    const int64_t shape[] = {tokens, 2, 64};
    return keyhole_tensor_host(data.data(), dtype, 3, shape);
  }
  keyhole_status prefill(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                         keyhole_dtype dtype) {
    const keyhole_tensor tk = rows(k, dtype);
    const keyhole_tensor tv = rows(v, dtype);
    return keyhole_session_append(session_.get(), 0, &tk, &tv, nullptr);
  }

  std::vector<std::string> told_;
  EnginePtr engine_;
  SessionPtr session_;
};

TEST_F(Dtype, AValueThatOverflowsIsRefusedByName) {
  make(KEYHOLE_F16);
  auto v = zeros();
  v[(3 * 2 + 1) * 64 + 17] = kLarge;
  ASSERT_EQ(KEYHOLE_NOT_FINITE, prefill(zeros(), v, KEYHOLE_BF16));
  const std::string text = keyhole_last_error();
  for (const char* part : {"tensor v", "token 3", "head 1", "f16", "65504"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(layer_tokens(session_.get(), 0).total, 0U);

  // In a step as well; then nothing is appended.
  ASSERT_OK(prefill(zeros(), zeros(), KEYHOLE_BF16));
  const std::vector<float> q(size_t{4} * 64);
  std::vector<float> out(q.size());
  const auto tq = tensor(q, {4, 64});
  const auto to = tensor(out, {4, 64});
  auto k = zeros();
  k[64] = kLarge;
  const auto none = zeros();
  const keyhole_tensor tk = rows(k, KEYHOLE_BF16, 1);
  const keyhole_tensor tv = rows(none, KEYHOLE_BF16, 1);
  EXPECT_EQ(KEYHOLE_NOT_FINITE,
            keyhole_session_attend(session_.get(), 0, &tq, &tk, &tv, &to, nullptr));
  expect_error_text("tensor k");
  EXPECT_EQ(layer_tokens(session_.get(), 0).total, kTokens);
}

TEST_F(Dtype, TheModelsOwnDtypeTakesIt) {
  make(KEYHOLE_BF16);
  auto v = zeros();
  v[0] = kLarge;
  ASSERT_OK(prefill(zeros(), v, KEYHOLE_BF16));
  EXPECT_TRUE(told_.empty());
}

TEST_F(Dtype, AnotherSixteenBitDtypeIsLoggedOnce) {
  make(KEYHOLE_F16);
  ASSERT_OK(prefill(zeros(), zeros(), KEYHOLE_F16));
  EXPECT_TRUE(told_.empty());
  ASSERT_OK(prefill(zeros(), zeros(), KEYHOLE_BF16));
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_NE(told_[0].find("bf16"), std::string::npos);
  EXPECT_NE(told_[0].find("stored as f16"), std::string::npos);
  ASSERT_OK(prefill(zeros(), zeros(), KEYHOLE_BF16));
  EXPECT_EQ(told_.size(), 1U);

  told_.clear();
  make(KEYHOLE_F32);  // loses nothing
  ASSERT_OK(prefill(zeros(), zeros(), KEYHOLE_BF16));
  EXPECT_TRUE(told_.empty());
}

}  // namespace
}  // namespace keyhole::test
