// Bad input: a clear error that names the offender, and a session that has lost nothing.
#include <cstddef>
#include <cstring>
#include <limits>

#include "keyhole/index.h"
#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/scoped_variable.h"

namespace keyhole::test {
namespace {

bool error_says(const char* text) {
  return std::string(keyhole_last_error()).find(text) != std::string::npos;
}
#define EXPECT_ERROR(status, text, call)                   \
  do {                                                     \
    EXPECT_EQ(status, (call));                             \
    EXPECT_TRUE(error_says(text)) << keyhole_last_error(); \
  } while (false)

TEST(EngineErrors, SayThatThereIsNoDevice) {
  auto c = small_engine();
  c.device = KEYHOLE_DEVICE_CUDA;
  keyhole_engine* e = nullptr;
  const keyhole_status status = keyhole_engine_create(&c, &e);
  keyhole_engine_destroy(e);
  if (status == KEYHOLE_OK) GTEST_SKIP() << "there is a device";
  EXPECT_EQ(status, KEYHOLE_UNSUPPORTED);
  EXPECT_TRUE(error_says("CUDA")) << keyhole_last_error();
}

TEST(EngineErrors, NameTheField) {
  keyhole_engine* e = nullptr;
  const auto refused = [&](auto change, const char* text,
                           keyhole_status status = KEYHOLE_INVALID_ARGUMENT) {
    auto c = small_engine();
    change(c);
    EXPECT_ERROR(status, text, keyhole_engine_create(&c, &e));
    EXPECT_EQ(nullptr, e);
  };
  refused([](auto& c) { c.struct_size = 0; }, "struct_size");
  refused([](auto& c) { c.layers = 0; }, "layers");
  refused([](auto& c) { c.layers = 100000; }, "layers");
  refused([](auto& c) { c.kv_heads = 3; }, "kv_heads");
  refused([](auto& c) { c.q_heads = 258; }, "1..128");
  refused([](auto& c) { c.head_dim = 100; }, "multiples of 16 from 64 to 576");
  refused([](auto& c) { c.head_dim = 592; }, "head_dim is 592");
  refused([](auto& c) { c.kv_dtype = 3; }, "kv_dtype");
  refused([](auto& c) { c.scale = std::numeric_limits<float>::quiet_NaN(); }, "scale");
  refused([](auto& c) { c.softcap = -1.0F; }, "softcap");
  refused([](auto& c) { c.rope_theta = INFINITY; }, "rope_theta");
  refused(
      [](auto& c) {
        c.rope_theta = 1e4F, c.rope_scaling = 9;
        c.rope_factor = 2;
      },
      "rope_scaling");
  refused([](auto& c) { c.rope_theta = 1e4F, c.rope_scaling = KEYHOLE_ROPE_LINEAR; },
          "rope_factor");
  refused(
      [](auto& c) { c.rope_theta = 1e4F, c.rope_scaling = KEYHOLE_ROPE_LLAMA3, c.rope_factor = 8; },
      "rope_low_freq_factor");
  refused([](auto& c) { c.threads = 1000000; }, "threads");
  refused([](auto& c) { c.cpu_level = "sse9"; }, "sse9");
  refused([](auto& c) { c.device = 17; }, "device");
  refused([](auto& c) { c.signal = 3; }, "signal is 3, allowed: KEYHOLE_SIGNAL_AUTO (0)");
  refused([](auto& c) { c.signal = -1; }, "signal is -1");
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "config is NULL", keyhole_engine_create(nullptr, &e));
  auto c = small_engine();
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "out is NULL", keyhole_engine_create(&c, nullptr));
}

// Here as on a device: a host engine checks it and says what it would be.
TEST(EngineErrors, ASignalOfTheEnvironmentIsTakenOrRefusedByName) {
  const auto signal_by = [](const char* value, keyhole_signal wish) {
    const ScopedVariable variable("KEYHOLE_SIGNAL", value);
    keyhole_engine_config c = small_engine();
    c.signal = wish;
    const EnginePtr engine = make_engine(c);
    keyhole_engine_config_init(&c);
    EXPECT_OK(keyhole_engine_get_config(engine.get(), &c));
    return c.signal;
  };
  EXPECT_EQ(signal_by(nullptr, KEYHOLE_SIGNAL_AUTO), KEYHOLE_SIGNAL_AUTO);
  EXPECT_EQ(signal_by("", KEYHOLE_SIGNAL_AUTO), KEYHOLE_SIGNAL_AUTO);
  EXPECT_EQ(signal_by("wait", KEYHOLE_SIGNAL_AUTO), KEYHOLE_SIGNAL_WAIT);
  EXPECT_EQ(signal_by("launch", KEYHOLE_SIGNAL_AUTO), KEYHOLE_SIGNAL_LAUNCH);
  EXPECT_EQ(signal_by("launch", KEYHOLE_SIGNAL_WAIT), KEYHOLE_SIGNAL_WAIT);
  EXPECT_EQ(signal_by("no such way", KEYHOLE_SIGNAL_LAUNCH), KEYHOLE_SIGNAL_LAUNCH);
  for (const char* wrong : {"Wait", "launch ", "1"}) {
    const ScopedVariable variable("KEYHOLE_SIGNAL", wrong);
    const keyhole_engine_config c = small_engine();
    keyhole_engine* e = nullptr;
    EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT,
                 (std::string("environment variable KEYHOLE_SIGNAL is \"") + wrong +
                  "\", allowed: wait, launch")
                     .c_str(),
                 keyhole_engine_create(&c, &e));
    EXPECT_EQ(e, nullptr);
  }
}

TEST(EngineErrors, ANewerStructIsAcceptedIfItsNewFieldsAreUnused) {
  struct Newer {
    keyhole_engine_config c;
    uint64_t future;
  } newer{small_engine(), 0};
  newer.c.struct_size = sizeof newer;
  keyhole_engine* e = nullptr;
  ASSERT_OK(keyhole_engine_create(&newer.c, &e));
  keyhole_engine_destroy(e);
  newer.future = 1;
  EXPECT_ERROR(KEYHOLE_VERSION_MISMATCH, "does not know", keyhole_engine_create(&newer.c, &e));
}

// A program that was compiled against a header whose structs had fewer fields: the library writes what they have.
TEST(OlderStructs, KeepTheirEnds) {
  constexpr unsigned char kMark = 0xA5;
  const auto ends_are_kept = [&](auto init, size_t size, size_t known) {
    for (const size_t bytes :
         {sizeof(size_t), size / 2 / sizeof(size_t) * sizeof(size_t), size, size + 64}) {
      std::vector<unsigned char> memory(size + 256, kMark);
      init(memory.data(), bytes);
      size_t written = 0;
      std::memcpy(&written, memory.data(), sizeof written);
      EXPECT_EQ(written, bytes);
      for (size_t i = bytes; i < memory.size(); ++i) ASSERT_EQ(memory[i], kMark) << i;
      for (size_t i = known; i < bytes; ++i) ASSERT_EQ(memory[i], 0) << i;
    }
  };
#define KEYHOLE_TEST_ENDS(name)                                                                   \
  ends_are_kept(                                                                                  \
      [](void* p, size_t n) { keyhole_##name##_init_sized(static_cast<keyhole_##name*>(p), n); }, \
      sizeof(keyhole_##name), sizeof(keyhole_##name))
  KEYHOLE_TEST_ENDS(engine_config);
  KEYHOLE_TEST_ENDS(session_config);
  KEYHOLE_TEST_ENDS(budget);
  KEYHOLE_TEST_ENDS(layer_tokens);
  KEYHOLE_TEST_ENDS(statistics);
  KEYHOLE_TEST_ENDS(audit);
  KEYHOLE_TEST_ENDS(memory_plan);
  KEYHOLE_TEST_ENDS(search_options);
  KEYHOLE_TEST_ENDS(search_cost);
  KEYHOLE_TEST_ENDS(index_info);
  KEYHOLE_TEST_ENDS(identity);
  KEYHOLE_TEST_ENDS(load_options);
#undef KEYHOLE_TEST_ENDS
  keyhole_engine_config_init_sized(nullptr, 100);

  // And such structs work: what they lack is AUTO.
  struct {
    keyhole_engine_config c;
    uint64_t mark = 0x123456789ABCDEF0;
  } older;
  const size_t size = offsetof(keyhole_engine_config, device_ordinal);
  keyhole_engine_config_init_sized(&older.c, size);
  older.c.device_ordinal = 77;  // beyond its end: not there for the library
  older.c.layers = 1;
  older.c.q_heads = older.c.kv_heads = 1;
  older.c.head_dim = 64;
  older.c.threads = 1;
  older.c.device = KEYHOLE_DEVICE_HOST;
  EnginePtr engine = make_engine(older.c);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &older.c));
  EXPECT_EQ(older.c.struct_size, size);
  EXPECT_EQ(older.c.device_ordinal, 77U);
  EXPECT_EQ(older.mark, 0x123456789ABCDEF0);
}

TEST(EngineErrors, EffectiveValuesCanBeReadBack) {
  auto c = small_engine(0);
  const EnginePtr engine = make_engine(c);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  EXPECT_FLOAT_EQ(0.125F, seen.scale);
  EXPECT_GE(seen.threads, 1U);
  EXPECT_EQ(KEYHOLE_DEVICE_HOST, seen.device);
  EXPECT_NE(nullptr, seen.cpu_level);
}

TEST(SessionErrors, NameTheField) {
  const EnginePtr engine = make_engine(small_engine());
  keyhole_session* s = nullptr;
  const auto refused = [&](auto change, const char* text,
                           keyhole_status status = KEYHOLE_INVALID_ARGUMENT) {
    auto c = small_session();
    change(c);
    EXPECT_ERROR(status, text, keyhole_session_create(engine.get(), &c, &s));
    EXPECT_EQ(nullptr, s);
  };
  refused([](auto& c) { c.window = 0; }, "window");
  refused([](auto& c) { c.budget.top_k = 0; }, "top_k");
  refused([](auto& c) { c.max_tokens = 0x80000001U; }, "max_tokens");
  refused([](auto& c) { c.sink = 0xFFFFFFFFU; }, "sink");
  refused([](auto& c) { c.mode = 5; }, "mode");
  refused([](auto& c) { c.index = "roargaph"; }, "roargaph");
  refused([](auto& c) { c.index = "ivf:D=3"; }, "D");
  const uint32_t layer = 2;
  refused([&](auto& c) { c.dense_layers = &layer, c.dense_layer_count = 1; }, "dense_layers");
  refused([](auto& c) { c.dense_layer_count = 1; }, "dense_layers");
}

// 2^29 resident tokens in 1024 layers of 256 heads pass any address space.
TEST(SessionErrors, AbsurdSizesAreOutOfMemory) {
  auto ec = small_engine();
  ec.layers = 1024;
  ec.kv_heads = ec.q_heads = 4096;
  ec.head_dim = 256;
  ec.kv_dtype = KEYHOLE_F32;
  const EnginePtr engine = make_engine(ec);
  auto sc = small_session();
  sc.window = 1U << 29;
  keyhole_session* s = nullptr;
  EXPECT_EQ(KEYHOLE_OUT_OF_MEMORY, keyhole_session_create(engine.get(), &sc, &s));
  EXPECT_EQ(nullptr, s);
  sc = small_session();
  sc.max_tokens = 0x80000000U;
  EXPECT_EQ(KEYHOLE_OUT_OF_MEMORY, keyhole_session_create(engine.get(), &sc, &s));
}

class CallErrors : public ::testing::Test {
 protected:
  void SetUp() override {
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(session_.get(), model_, shape_, l, 60, numbers_);
  }
  void TearDown() override {
    // Whatever was refused: nothing is lost and the session still answers.
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      EXPECT_EQ(model_.tokens(l), layer_tokens(session_.get(), l).total);
      expect_exact(session_.get(), model_, shape_, l, numbers_);
    }
  }
  keyhole_engine_config ec_ = small_engine();
  EnginePtr engine_ = make_engine(ec_);
  SessionPtr session_ = make_session(engine_.get(), small_session());
  Numbers numbers_{3};
  Model model_{ec_};
  Shape shape_{ec_};
  std::vector<float> kv_ = numbers_.many(shape_.kv(3));
  std::vector<float> q_ = numbers_.many(shape_.q(3));
};

TEST_F(CallErrors, ShapesThatDoNotMatch) {
  auto good = tensor(kv_, {3, shape_.hkv, shape_.d});
  const auto refused = [&](const keyhole_tensor& bad, const char* text) {
    EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, text,
                 keyhole_session_append(session_.get(), 0, &bad, &good, nullptr));
    EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, text,
                 keyhole_session_append(session_.get(), 0, &good, &bad, nullptr));
  };
  refused(tensor(kv_, {3, shape_.hkv, shape_.d - 1}), "needed: [n, 2, 64]");
  refused(tensor(kv_, {3, shape_.hkv + 1, shape_.d}), "needed: [n, 2, 64]");
  refused(tensor(kv_, {shape_.hkv, shape_.d - 1}), "needed: [n, 2, 64]");
  refused(tensor(kv_, {3, shape_.hkv, shape_.d, 1}), "needed: [n, 2, 64]");
  refused(tensor(kv_, {shape_.hkv, shape_.d}), "tokens");  // one, beside three
  refused(tensor(kv_, {2, shape_.hkv, shape_.d}), "tokens");
  auto bad = good;
  bad.rank = 9;
  refused(bad, "rank");
  bad = good;
  bad.dtype = 77;
  refused(bad, "dtype 77");
  bad = good;
  bad.memory = 4;
  refused(bad, "memory kind");
  bad = good;
  bad.strides[2] = 2;
  refused(bad, "stride 2 of the last axis");
  bad = good;
  bad.data = nullptr;
  refused(bad, "data is NULL");
  bad = good;
  bad.shape[0] = -1;
  refused(bad, "negative");
  bad = good;
  bad.shape[0] = std::numeric_limits<int64_t>::max();
  refused(bad, "");
  bad = good;
  bad.strides[0] = std::numeric_limits<int64_t>::max() / 2;
  refused(bad, "overflows");
  bad = good;
  bad.memory = KEYHOLE_DEVICE;
  EXPECT_ERROR(KEYHOLE_UNSUPPORTED, "device memory",
               keyhole_session_append(session_.get(), 0, &bad, &good, nullptr));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "NULL",
               keyhole_session_append(session_.get(), 0, nullptr, &good, nullptr));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "NULL",
               keyhole_session_append(nullptr, 0, &good, &good, nullptr));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "layer is 2",
               keyhole_session_append(session_.get(), 2, &good, &good, nullptr));
}

TEST_F(CallErrors, OutputsThatDoNotFit) {
  const auto q = tensor(q_, {1, shape_.hq, shape_.d});
  std::vector<float> o(shape_.q(1));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "out",
               keyhole_session_attend(session_.get(), 0, &q, nullptr, nullptr, nullptr, nullptr));
  auto out = tensor(o, {shape_.hq, shape_.d - 16});
  const auto k = tensor(kv_, {1, shape_.hkv, shape_.d});
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "out",
               keyhole_session_attend(session_.get(), 0, &q, &k, &k, &out, nullptr));
  out = tensor(o, {shape_.hq, shape_.d});
  out.strides[0] = 1;
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "overlap",
               keyhole_session_attend(session_.get(), 0, &q, &k, &k, &out, nullptr));
  out = tensor(o, {shape_.hq, shape_.d});
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "both or none",
               keyhole_session_attend(session_.get(), 0, &q, &k, nullptr, &out, nullptr));
}

TEST_F(CallErrors, NotANumber) {
  std::vector<float> o(shape_.q(1));
  const auto out = tensor(o, {shape_.hq, shape_.d});
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (size_t at : {size_t{0}, shape_.kv(3) - 1, shape_.kv(1) + 5}) {
      auto bad = kv_;
      bad[at] = poison;
      const auto good = tensor(kv_, {3, shape_.hkv, shape_.d});
      const auto tensor_bad = tensor(bad, {3, shape_.hkv, shape_.d});
      EXPECT_ERROR(KEYHOLE_NOT_FINITE, "tensor k",
                   keyhole_session_append(session_.get(), 0, &tensor_bad, &good, nullptr));
      EXPECT_ERROR(KEYHOLE_NOT_FINITE, "tensor v",
                   keyhole_session_append(session_.get(), 0, &good, &tensor_bad, nullptr));
      EXPECT_ERROR(KEYHOLE_NOT_FINITE, ("token " + std::to_string(at / shape_.kv(1))).c_str(),
                   keyhole_session_append(session_.get(), 0, &tensor_bad, &good, nullptr));
    }
    auto bad_q = q_;
    bad_q[shape_.q(1) - 1] = poison;
    const auto q = tensor(bad_q, {shape_.hq, shape_.d});
    const auto k = tensor(kv_, {shape_.hkv, shape_.d});
    EXPECT_ERROR(KEYHOLE_NOT_FINITE, "tensor q",
                 keyhole_session_attend(session_.get(), 0, &q, &k, &k, &out, nullptr));
  }
}

TEST_F(CallErrors, AValueThatOverflowsTheStorage) {
  kv_[7] = 1e5F;
  const auto bad = tensor(kv_, {3, shape_.hkv, shape_.d});
  EXPECT_ERROR(KEYHOLE_NOT_FINITE, "65504",
               keyhole_session_append(session_.get(), 0, &bad, &bad, nullptr));
}

TEST_F(CallErrors, MoreTokensThanRoom) {
  const auto many = numbers_.many(shape_.kv(4037));
  const auto t = tensor(many, {4037, shape_.hkv, shape_.d});
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "max_tokens",
               keyhole_session_append(session_.get(), 0, &t, &t, nullptr));
}

TEST_F(CallErrors, KAboveEverythingIsAllowed) {
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  ASSERT_OK(keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_INDEXED, 4096));  // max_tokens
}

TEST_F(CallErrors, TopKAboveMaxTokensIsRefused) {
  for (const uint32_t top_k : {4097U, 1000000000U, 0xFFFFFFFFU}) {
    EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT,
                 ("top_k is " + std::to_string(top_k) + ", allowed: 1..4096").c_str(),
                 keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_EXACT, top_k));
  }
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  ASSERT_OK(keyhole_session_get_config(session_.get(), &c));
  EXPECT_EQ(KEYHOLE_MODE_INDEXED, c.mode) << "a refused call changes nothing";
}

TEST(StepErrors, ALayerWithoutTokens) {
  const auto ec = small_engine();
  const Shape shape(ec);
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), small_session());
  const std::vector<float> q(shape.q(1), 1.0F);
  std::vector<float> o(shape.q(1));
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "no token",
               keyhole_session_attend(session.get(), 0, &tq, nullptr, nullptr, &out, nullptr));
}

// Inner products of 1e60 do not fit fp32; attention over finite rows is finite all the same.
TEST(StepErrors, LogitsBeyondFp32StillAttend) {
  auto ec = small_engine();
  ec.kv_dtype = KEYHOLE_F32;
  const Shape shape(ec);
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), small_session());
  const std::vector<float> huge(shape.q(1), 1e30F);
  std::vector<float> o(shape.q(1));
  const auto q = tensor(huge, {shape.hq, shape.d});
  const auto k = tensor(huge, {shape.hkv, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  ASSERT_OK(keyhole_session_attend(session.get(), 0, &q, &k, &k, &out, nullptr));
  for (const float x : o) ASSERT_FLOAT_EQ(1e30F, x);
}

TEST(IndexErrors, AreNamed) {
  const auto ec = small_engine();
  const EnginePtr engine = make_engine(ec);
  keyhole_index* index = nullptr;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_index_create(engine.get(), "nothing", 0, 0, &index));
  EXPECT_EQ(nullptr, index);
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "layer is 2",
               keyhole_index_create(engine.get(), "flat", ec.layers, 0, &index));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "kv_head is 2",
               keyhole_index_create(engine.get(), "flat", 0, ec.kv_heads, &index));
  ASSERT_OK(keyhole_index_create(engine.get(), "flat", 1, 1, &index));
  keyhole_search_options ten;
  keyhole_search_options_init(&ten);
  ten.budget.top_k = 10;
  keyhole_search_options bad = ten;
  Numbers numbers(5);
  const auto keys = numbers.many(129 * 64);
  const auto t = tensor(keys, {50, 64});
  const auto q = tensor(keys, {2, 64});
  const auto too_many = tensor(keys, {129, 64});
  uint32_t ids[20];
  uint32_t counts[2];
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "keyhole_index_build",
               keyhole_index_search(index, &q, &ten, ids, nullptr, counts, nullptr));
  const auto none = tensor(keys, {0, 64});
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "0 rows",
               keyhole_index_build(index, &none, nullptr, nullptr, nullptr, 0, nullptr, nullptr));
  ASSERT_OK(keyhole_index_build(index, &t, nullptr, nullptr, nullptr, 0, nullptr, nullptr));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "1..128",
               keyhole_index_search(index, &too_many, &ten, ids, nullptr, counts, nullptr));
  bad.budget.top_k = 0;
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "k is 0",
               keyhole_index_search(index, &q, &bad, ids, nullptr, counts, nullptr));
  float o[128], lse[2];
  for (const float weight : {-1e-3F, 1.0F, 2.0F, NAN}) {
    bad = ten;
    bad.budget.min_weight = weight;
    EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "min_weight is",
                 keyhole_index_attend(index, &q, &bad, o, lse, nullptr, nullptr, nullptr));
  }
  bad = ten;
  bad.budget.attend = 4;
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "attend is 4",
               keyhole_index_attend(index, &q, &bad, o, lse, nullptr, nullptr, nullptr));
  EXPECT_ERROR(KEYHOLE_INVALID_ARGUMENT, "without values",
               keyhole_index_attend(index, &q, &ten, o, lse, nullptr, nullptr, nullptr));
  ASSERT_OK(keyhole_index_search(index, &q, &ten, ids, nullptr, counts, nullptr));
  EXPECT_EQ(10U, counts[0]);
  keyhole_index_destroy(index);
}

TEST(Texts, NeverNull) {
  for (int32_t s = -20; s <= 5; ++s) EXPECT_NE(nullptr, keyhole_status_string(s));
  EXPECT_STREQ("unknown status", keyhole_status_string(-999));
  EXPECT_NE(nullptr, keyhole_last_error());
  keyhole_engine_destroy(nullptr);
  keyhole_session_destroy(nullptr);
  keyhole_index_destroy(nullptr);
  EXPECT_NE(std::string(keyhole_index_help()).find("flat"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::test
