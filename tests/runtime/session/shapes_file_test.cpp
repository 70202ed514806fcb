// Files of sessions whose layers have different shapes: what is loaded answers with the same bits, other engines are
// refused, files of the version before are read.
#include <algorithm>

#include "index/serial.h"
#include "keyhole/save.h"
#include "tests/runtime/session/recurrence.h"
#include "tests/runtime/session/shapes_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class ShapesFile : public ::testing::Test {
 protected:
  /// `bytes` with the checksum of what it holds in its last 8.
  static std::string sealed(std::string bytes) {
    index::Checksum sums, all;
    const size_t end = bytes.size() - sizeof(uint64_t);
    constexpr size_t kChunk = 262144;
    for (size_t at = 0; at < end; at += kChunk) {
      index::Checksum chunk;
      chunk.update(bytes.data() + at, std::min(kChunk, end - at));
      const uint64_t sum = chunk.value();
      all.update(&sum, sizeof sum);
    }
    const uint64_t value = all.value();
    std::copy_n(reinterpret_cast<const char*>(&value), sizeof value, bytes.end() - sizeof value);
    return bytes;
  }
  keyhole_status load(keyhole_engine* engine, SessionPtr& session) {
    keyhole_session* loaded = nullptr;
    const keyhole_status status = keyhole_session_load(engine, path_.c_str(), nullptr, &loaded);
    session.reset(loaded);
    return status;
  }

  TemporaryFolder folder_;
  std::string path_ = (folder_ / "session").string();
  Numbers numbers_{12};
};

TEST_F(ShapesFile, ACopyAnswersWithTheSameBits) {
  ShapedConfig c(kHeads);
  c.layers[0].window = 20;
  const EnginePtr engine = make_engine(c.engine);
  const std::vector<std::string> indexes = {"ivf:C=8,probe=2", "hnsw", "codes:k=4,v=4", "roargraph",
                                            "sparq"};
  for (const std::string& index : unless_sanitized(indexes, 2)) {
    for (const keyhole_kv_host kv_host : {KEYHOLE_KV_HOST_SAME, KEYHOLE_KV_HOST_INT8}) {
      if (kv_host == KEYHOLE_KV_HOST_INT8 && index != "ivf:C=8,probe=2") continue;
      SCOPED_TRACE(index);
      keyhole_session_config sc = small_session();
      sc.index = index.c_str();
      sc.budget.top_k = 20;
      sc.training_queries = 16;
      sc.kv_host = kv_host;
      if (kv_host == KEYHOLE_KV_HOST_INT8) sc.flush_block = 256;
      const SessionPtr s = make_session(engine.get(), sc);
      Model model(c.engine);
      fill(s.get(), model, c, 400, numbers_);
      ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
      ASSERT_OK(keyhole_session_save(s.get(), path_.c_str()));
      SessionPtr copy;
      ASSERT_OK(load(engine.get(), copy));
      const SessionPtr fork = fork_of(s.get());
      EXPECT_GT(statistics(s.get()).shared_bytes + statistics(fork.get()).shared_bytes, 0U);
      for (uint32_t l = 0; l < 4; ++l) {
        EXPECT_EQ(layer_tokens(s.get(), l).indexed, layer_tokens(copy.get(), l).indexed);
        const auto q = numbers_.many(c.shape(l).q(1));
        const Answer a = attend_only(s.get(), c.shape(l), l, q);
        EXPECT_EQ(a.o, attend_only(copy.get(), c.shape(l), l, q).o);
        EXPECT_EQ(a.o, attend_only(fork.get(), c.shape(l), l, q).o);
      }
    }
  }
}

TEST_F(ShapesFile, AnEngineOfOtherShapesIsRefused) {
  const ShapedConfig c(kHeads);
  const EnginePtr engine = make_engine(c.engine);
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(c.engine);
  fill(s.get(), model, c, 50, numbers_);
  ASSERT_OK(keyhole_session_save(s.get(), path_.c_str()));
  // The largest of all is the same.
  ShapedConfig other(kHeads);
  std::swap(other.layers[0], other.layers[2]);
  SessionPtr copy;
  expect_error(load(make_engine(other.engine).get(), copy), KEYHOLE_INVALID_ARGUMENT,
               "saved with kv_heads of layer 0 2, the engine has 4");
  ShapedConfig alike({{8, 4, 128}, {8, 4, 128}, {8, 4, 128}, {8, 4, 128}});
  expect_error(load(make_engine(alike.engine).get(), copy), KEYHOLE_INVALID_ARGUMENT,
               "saved with q_heads of layer 0 4, the engine has 8");
  // A count that no file has.
  std::string bytes = read_file(path_);
  const size_t at = 8 + 4 + size_t{6} * 4 + size_t{4} * 8;
  ASSERT_EQ(bytes[at], 4);
  bytes[at] = 3;
  write_file(path_, sealed(bytes));
  expect_error(load(engine.get(), copy), KEYHOLE_CORRUPT,
               "shapes of 3 layers, allowed: 0, or all 4");
}

/// golden/session-11.bin is what a library that wrote version 11 has saved: two layers of 24 tokens, of which layer 1
/// slides; sink 2, window 4, flush_block 4, index ivf:C=2,probe=2.
TEST_F(ShapesFile, FilesOfTheVersionBeforeAreRead) {
  ShapedConfig c({{4, 2, 64}, {4, 2, 64}});
  c.layers[1].window = 6;
  c.layers[1].window_slack = 2;
  std::string bytes = read_file(KEYHOLE_GOLDEN_FOLDER "/session-11.bin");
  ASSERT_EQ(bytes[8], 11);
  write_file(path_, bytes);
  SessionPtr s;
  ASSERT_OK(load(make_engine(c.engine).get(), s));
  Model model(c.engine);
  Recurrence saved(7);
  for (uint32_t l = 0; l < 2; ++l) {
    const auto k = saved.many(size_t{24} * 2 * 64), v = saved.many(k.size());
    model.append(l, k, v);
    expect_exact(s.get(), model, c.shape(l), l, numbers_);
  }
  EXPECT_EQ(layer_tokens(s.get(), 0).indexed, 18U);
  c.layers[1].kv_heads = 1;
  expect_error(load(make_engine(c.engine).get(), s), KEYHOLE_INVALID_ARGUMENT,
               "saved with kv_heads of layer 1 2, the engine has 1");
  bytes[8] = 10;
  write_file(path_, bytes);
  expect_error(load(make_engine(c.engine).get(), s), KEYHOLE_VERSION_MISMATCH,
               "format version 10, this library reads 11 and 12");
}

}  // namespace
}  // namespace keyhole::test
