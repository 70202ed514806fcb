// Saved sessions in which somebody has changed values and made the checksum right again: what is loaded can be used,
// and what cannot be is refused. A checksum finds damage; it is no defence.
#include <fstream>

#include "index/serial.h"
#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class ForgedSession : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto sc = small_session();
    sc.index = GetParam();
    sc.training_queries = 16;
    const SessionPtr s = make_session(engine_.get(), sc);
    Model model(ec_);
    // Codes are of 256 tokens at a time.
    const uint32_t tokens = std::string(GetParam()).starts_with("codes") ? 290 : 90;
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(s.get(), model, shape_, l, tokens, numbers_);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (uint32_t l = 0; l < ec_.layers; ++l) prefill_both(s.get(), model, shape_, l, 30, numbers_);
    ASSERT_OK(keyhole_session_save(s.get(), path_.c_str()));
    good_ = read_file(path_);
  }
  /// `bytes` with the checksum of what it holds in its last 8.
  static std::string sealed(std::string bytes) {
    constexpr size_t kChunk = 262144;
    const size_t end = bytes.size() - sizeof(uint64_t);
    index::Checksum sums;
    for (size_t at = 0; at < end; at += kChunk) {
      index::Checksum chunk;
      chunk.update(bytes.data() + at, std::min(kChunk, end - at));
      const uint64_t sum = chunk.value();
      sums.update(&sum, sizeof sum);
    }
    const uint64_t value = sums.value();
    std::copy_n(reinterpret_cast<const char*>(&value), sizeof value, bytes.end() - sizeof value);
    return bytes;
  }
  keyhole_status load(const std::string& bytes, SessionPtr& session) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << sealed(bytes);
    keyhole_session* loaded = nullptr;
    const keyhole_status status =
        keyhole_session_load(engine_.get(), path_.c_str(), nullptr, &loaded);
    EXPECT_EQ(status == KEYHOLE_OK, loaded != nullptr);
    session.reset(loaded);
    return status;
  }
  /// Every kind of call, which must not find that the session contradicts itself.
  void use(keyhole_session* s) {
    const auto attend = [&](uint32_t l, bool appends) {
      const auto q = numbers_.many(shape_.q(1)), k = numbers_.many(shape_.kv(1)),
                 v = numbers_.many(shape_.kv(1));
      std::vector<float> o(shape_.q(1));
      const auto tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d}),
                 tk = tensor(k, {shape_.hkv, shape_.d}), tv = tensor(v, {shape_.hkv, shape_.d});
      return keyhole_session_attend(s, l, &tq, appends ? &tk : nullptr, appends ? &tv : nullptr,
                                    &out, nullptr);
    };
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      if (layer_tokens(s, l).total != 0) expect_allowed(attend(l, false));
      for (int i = 0; i < 20; ++i) expect_allowed(attend(l, true));
    }
    expect_allowed(keyhole_session_build(s, nullptr, nullptr));
    for (uint32_t l = 0; l < ec_.layers; ++l) expect_allowed(attend(l, true));
    expect_allowed(keyhole_session_truncate(s, 50));
    keyhole_session* copy = nullptr;
    expect_allowed(keyhole_session_fork(s, &copy));
    keyhole_session_destroy(copy);
  }
  /// A forged config may forbid tokens or memory, forged keys may be so large that their products are beyond fp32;
  /// nothing more is wrong with the session.
  static void expect_allowed(keyhole_status status) {
    EXPECT_TRUE(status == KEYHOLE_OK || status == KEYHOLE_INVALID_ARGUMENT ||
                status == KEYHOLE_OUT_OF_MEMORY || status == KEYHOLE_NOT_FINITE)
        << status << ": " << keyhole_last_error();
  }

  /// Of three layers, of which the last slides.
  keyhole_engine_config with_a_window() {
    keyhole_engine_config c = small_engine();
    c.layers = c.layer_count = 3;
    for (keyhole_layer_config& l : layers_) keyhole_layer_config_init(&l, &c);
    layers_[2].window = 24;
    c.layer_configs = layers_;
    return c;
  }

  keyhole_layer_config layers_[3];
  keyhole_engine_config ec_ = with_a_window();
  EnginePtr engine_ = make_engine(ec_);
  Shape shape_{ec_};
  Numbers numbers_{41};
  TemporaryFolder folder_;
  std::string path_ = folder_ / "session";
  std::string good_;
};

TEST_P(ForgedSession, IsRefusedOrCanBeUsed) {
  SessionPtr session;
  ASSERT_OK(load(good_, session));
  uint32_t loaded = 0, refused = 0;
  for (uint32_t i = 0; i < unless_sanitized(400, 40); ++i) {
    SCOPED_TRACE("forgery " + std::to_string(i));
    std::string bytes = good_;
    // The config and the first layer's counts lie in the first KB; the rest is mostly numbers.
    const auto size = static_cast<uint32_t>(bytes.size());
    const size_t at = numbers_.below(i % 2 == 0 ? std::min(size, 1024U) : size);
    const uint32_t value =
        std::vector<uint32_t>{0,          1,          0x7FFFFFFF,
                              0x80000000, 0xFFFFFFFF, 0x7F800000,
                              0x7C007C00, 4096,       numbers_.below(1U << 31)}[numbers_.below(9)];
    const size_t n = std::min<size_t>(numbers_.below(2) == 0 ? 1 : 4, size - at);
    std::copy_n(reinterpret_cast<const char*>(&value), n, bytes.begin() + static_cast<long>(at));
    const keyhole_status status = load(bytes, session);
    if (status != KEYHOLE_OK) {
      ++refused;
      EXPECT_NE(status, KEYHOLE_INTERNAL) << "byte " << at << ": " << keyhole_last_error();
      continue;
    }
    ++loaded;
    use(session.get());
    if (HasFailure()) {
      ADD_FAILURE() << n << " bytes at " << at << " became " << value;
      return;
    }
  }
  EXPECT_GT(loaded, 0U);
  EXPECT_GT(refused, 0U);
}

TEST_P(ForgedSession, ALongWindowTakesMemoryAsTokensCome) {
  const auto resident = [] {
    std::ifstream file("/proc/self/statm");
    size_t all = 0, pages = 0;
    file >> all >> pages;
    return pages * 4096;
  };
  auto sc = small_session();
  sc.index = GetParam();
  sc.max_tokens = 1U << 21;
  sc.window = 1U << 20;
  const size_t before = resident();
  const SessionPtr s = make_session(engine_.get(), sc);
  Model model(ec_);
  prefill_both(s.get(), model, shape_, 0, 50, numbers_);
  EXPECT_LT(resident(), before + (size_t{64} << 20)) << "the window has room for 2 GiB of K and V";
  expect_exact(s.get(), model, shape_, 0, numbers_);
}

TEST_P(ForgedSession, NumbersThatAreNotFiniteAreRefused) {
  // A key of the sequence as it is stored, two of its elements infinite.
  SessionPtr session;
  uint32_t refused = 0;
  for (size_t at = 1024; at + 4 < good_.size(); at += good_.size() / 50) {
    std::string bytes = good_;
    bytes[at] = bytes[at + 2] = '\0';
    bytes[at + 1] = bytes[at + 3] = '\x7C';
    const keyhole_status status = load(bytes, session);
    refused += status == KEYHOLE_CORRUPT ? 1 : 0;
    if (status == KEYHOLE_OK) use(session.get());
  }
  EXPECT_GT(refused, 10U);
}

INSTANTIATE_TEST_SUITE_P(Types, ForgedSession,
                         ::testing::Values("flat", "ivf:C=8,probe=2", "hnsw:M=8,ef=40",
                                           "roargraph:M=8,ef=8", "sparq:r=8", "codes:k=2,v=2",
                                           "codes:k=2,v=2,lists=16"),
                         [](const auto& p) {
                           const std::string spec = p.param;
                           const bool lists = spec.find("lists") != std::string::npos;
                           return spec.substr(0, spec.find(':')) + (lists ? "_in_lists" : "");
                         });

}  // namespace
}  // namespace keyhole::test
