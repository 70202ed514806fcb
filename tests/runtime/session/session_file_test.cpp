// Save, load, fork: the copy answers with the same bits; damaged files are refused.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

class SessionFileTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    sc_.index = GetParam();
    sc_.budget.top_k = 20;
    sc_.training_queries = 16;
    sc_.budget.attend = KEYHOLE_ATTEND_WEIGHT;
    sc_.budget.min_weight = 0.01F;
    session_ = make_session(engine_.get(), sc_);
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(session_.get(), model_, shape_, l, 200, numbers_);
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(session_.get(), model_, shape_, l, 30, numbers_);
    keyhole_budget budget;
    keyhole_budget_init(&budget);
    budget.top_k = 7;
    ASSERT_OK(keyhole_session_set_budget(session_.get(), 1, 0, &budget));
    path_ = ::testing::TempDir() + "keyhole_session_" + std::to_string(::getpid()) + "_" +
            std::to_string(reinterpret_cast<uintptr_t>(this)) + ".bin";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  void expect_same(keyhole_session* other) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto a = layer_tokens(session_.get(), l);
      const auto b = layer_tokens(other, l);
      EXPECT_EQ(a.total, b.total);
      EXPECT_EQ(a.indexed, b.indexed);
      EXPECT_EQ(a.window, b.window);
      const auto q = numbers_.many(shape_.q(1));
      const auto x = attend_only(session_.get(), shape_, l, q);
      const auto y = attend_only(other, shape_, l, q);
      EXPECT_EQ(x.o, y.o);
      EXPECT_EQ(x.lse, y.lse);
    }
  }

  keyhole_engine_config ec_ = small_engine();
  keyhole_session_config sc_ = small_session();
  EnginePtr engine_ = make_engine(ec_);
  SessionPtr session_;
  Numbers numbers_{23};
  Model model_{ec_};
  Shape shape_{ec_};
  std::string path_;
};

TEST_P(SessionFileTest, LoadAnswersWithTheSameBits) {
  ASSERT_OK(keyhole_session_save(session_.get(), path_.c_str()));
  const SessionPtr guard = load_of(engine_.get(), path_);
  expect_same(guard.get());
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  ASSERT_OK(keyhole_session_get_config(guard.get(), &c));
  EXPECT_STREQ(GetParam(), c.index);
  EXPECT_EQ(sc_.window, c.window);
  EXPECT_EQ(KEYHOLE_ATTEND_WEIGHT, c.budget.attend);
  EXPECT_EQ(0.01F, c.budget.min_weight);
  EXPECT_EQ(20U, c.budget.top_k);
  keyhole_budget budget;
  keyhole_budget_init(&budget);
  ASSERT_OK(keyhole_session_get_budget(guard.get(), 1, 0, &budget));
  EXPECT_EQ(7U, budget.top_k);
  EXPECT_EQ(KEYHOLE_ATTEND_TOPK, budget.attend);
}

TEST_P(SessionFileTest, AForkIsIndependent) {
  const SessionPtr guard = fork_of(session_.get());
  expect_same(guard.get());
  ASSERT_OK(keyhole_session_truncate(guard.get(), 50));
  ASSERT_OK(keyhole_session_build(guard.get(), nullptr, nullptr));
  EXPECT_EQ(230U, layer_tokens(session_.get(), 0).total);
  Model half(ec_);
  ASSERT_OK(keyhole_session_set_mode(session_.get(), KEYHOLE_MODE_EXACT, 0));
  expect_exact(session_.get(), model_, shape_, 0, numbers_);
  model_.truncate(50);
  ASSERT_OK(keyhole_session_set_mode(guard.get(), KEYHOLE_MODE_EXACT, 0));
  expect_exact(guard.get(), model_, shape_, 0, numbers_);
}

TEST_P(SessionFileTest, AForkHasAllSettings) {
  keyhole_session_config c = sc_;
  c.host_memory_limit = size_t{1} << 30;
  c.device_memory_limit = size_t{1} << 29;
  c.offload_placement = KEYHOLE_PLACE_HOST;
  c.audit_share = 0.25;
  c.audit_action = KEYHOLE_AUDIT_WIDEN;
  c.audit_bound = 0.3F;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.budget.min_keys = 40;
  const SessionPtr session = make_session(engine_.get(), c);
  const SessionPtr guard = fork_of(session.get());
  // All that a file keeps of it is the same, and so is what is not in a file's bytes by itself.
  const auto saved = [&](keyhole_session* s) {
    EXPECT_OK(keyhole_session_save(s, path_.c_str()));
    std::ifstream in(path_, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(in)), {});
  };
  EXPECT_EQ(saved(session.get()), saved(guard.get()));
  keyhole_session_config b;
  keyhole_session_config_init(&b);
  ASSERT_OK(keyhole_session_get_config(guard.get(), &b));
  EXPECT_EQ(c.host_memory_limit, b.host_memory_limit);
  EXPECT_EQ(c.device_memory_limit, b.device_memory_limit);
  EXPECT_EQ(c.offload_placement, b.offload_placement);
  EXPECT_EQ(c.audit_share, b.audit_share);
  EXPECT_EQ(c.audit_action, b.audit_action);
  EXPECT_EQ(c.audit_bound, b.audit_bound);
}

TEST_P(SessionFileTest, LinksAndDevicesStayWhatTheyAre) {
  const std::string link = path_ + ".link";
  std::filesystem::create_symlink(path_, link);
  EXPECT_OK(keyhole_session_save(session_.get(), link.c_str()));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  std::filesystem::remove(link);
  expect_same(load_of(engine_.get(), path_).get());
  const std::string fifo = path_ + ".fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  std::thread reader([&] {
    std::ifstream from(fifo, std::ios::binary);
    std::ofstream(path_, std::ios::binary) << from.rdbuf();
  });
  EXPECT_OK(keyhole_session_save(session_.get(), fifo.c_str()));
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  // Whoever replaces it leaves the reader waiting.
  if (!std::filesystem::is_fifo(fifo)) std::_Exit(1);
  reader.join();
  std::filesystem::remove(fifo);
  expect_same(load_of(engine_.get(), path_).get());
}

TEST_P(SessionFileTest, ASaveThatFailsLeavesTheOldFile) {
  ASSERT_OK(keyhole_session_save(session_.get(), path_.c_str()));
  rlimit before{};
  ASSERT_EQ(0, getrlimit(RLIMIT_FSIZE, &before));
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);  // write() fails with EFBIG instead
  rlimit small = before;
  small.rlim_cur = 10000;
  ASSERT_EQ(0, setrlimit(RLIMIT_FSIZE, &small));
  const keyhole_status status = keyhole_session_save(session_.get(), path_.c_str());
  ASSERT_EQ(0, setrlimit(RLIMIT_FSIZE, &before));
  signal(SIGXFSZ, old_handler);
  EXPECT_EQ(KEYHOLE_IO, status);
  expect_error_text(path_);
  const SessionPtr guard = load_of(engine_.get(), path_);
  expect_same(guard.get());
}

TEST_P(SessionFileTest, DamageIsNoticed) {
  ASSERT_OK(keyhole_session_save(session_.get(), path_.c_str()));
  std::ifstream in(path_, std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(in)), {});
  in.close();
  const auto load = [&](const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
    keyhole_session* loaded = nullptr;
    const keyhole_status status =
        keyhole_session_load(engine_.get(), path_.c_str(), nullptr, &loaded);
    EXPECT_EQ(status == KEYHOLE_OK, loaded != nullptr);
    keyhole_session_destroy(loaded);
    return status;
  };
  ASSERT_OK(load(good));
  for (int i = 0; i < 60; ++i) {
    auto bad = good;
    const size_t at =
        i < 20 ? static_cast<size_t>(i) * 6 : numbers_.below(static_cast<uint32_t>(good.size()));
    bad[at] = static_cast<char>(bad[at] ^ (1 << numbers_.below(8)));
    EXPECT_NE(KEYHOLE_OK, load(bad)) << "flipped a bit of byte " << at;
  }
  for (int i = 0; i < 40; ++i) {
    const size_t size =
        i < 10 ? static_cast<size_t>(i) : numbers_.below(static_cast<uint32_t>(good.size()));
    EXPECT_EQ(KEYHOLE_CORRUPT, load(good.substr(0, size))) << "cut to " << size;
  }
  EXPECT_EQ(KEYHOLE_CORRUPT, load(good + "x"));
  auto newer = good;
  ++newer[8];
  EXPECT_EQ(KEYHOLE_VERSION_MISMATCH, load(newer));
  auto older = good;
  older[8] = 4;  // the format before this one, which had another checksum
  EXPECT_EQ(KEYHOLE_VERSION_MISMATCH, load(older));
}

TEST_P(SessionFileTest, ErrorsLeaveTheSessionAlone) {
  EXPECT_EQ(KEYHOLE_IO, keyhole_session_save(session_.get(), "/nonexistent/folder/file"));
  keyhole_session* loaded = nullptr;
  EXPECT_EQ(KEYHOLE_IO, keyhole_session_load(engine_.get(), "/nonexistent/file", nullptr, &loaded));
  ASSERT_OK(keyhole_session_save(session_.get(), path_.c_str()));
  auto other = small_engine();
  other.head_dim = 128;
  const EnginePtr wrong = make_engine(other);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_load(wrong.get(), path_.c_str(), nullptr, &loaded));
  expect_error_text("head_dim");
}

TEST_P(SessionFileTest, LayersOfManyChunksAreReadByAllThreads) {
  for (uint32_t l = 0; l < ec_.layers; ++l) {
    prefill_both(session_.get(), model_, shape_, l, 3000, numbers_);
  }
  ASSERT_OK(keyhole_session_save(session_.get(), path_.c_str()));
  ASSERT_GT(std::filesystem::file_size(path_), size_t{3} << 20) << "12 chunks";
  for (const uint32_t threads : {1U, 4U}) {
    auto ec = ec_;
    ec.threads = threads;
    const EnginePtr engine = make_engine(ec);
    const SessionPtr guard = load_of(engine.get(), path_);
    // Saved by so many threads it has the same bytes.
    const std::string again = path_ + "2";
    EXPECT_OK(keyhole_session_save(guard.get(), again.c_str()));
    std::ifstream a(path_, std::ios::binary), b(again, std::ios::binary);
    EXPECT_TRUE(std::string((std::istreambuf_iterator<char>(a)), {}) ==
                std::string((std::istreambuf_iterator<char>(b)), {}));
    std::filesystem::remove(again);
    expect_same(guard.get());
  }
  // An infinity far from the first chunk is seen where it is read, not by the sum alone.
  std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(1000000);
  file.write("\x00\x7C\x00\x7C\x00\x7C", 6);
  file.close();
  keyhole_session* loaded = nullptr;
  EXPECT_EQ(KEYHOLE_CORRUPT, keyhole_session_load(engine_.get(), path_.c_str(), nullptr, &loaded));
  expect_error_text("layer 0 has an element of K or V");
}

INSTANTIATE_TEST_SUITE_P(Types, SessionFileTest,
                         ::testing::Values("flat", "ivf:C=8,probe=2", "hnsw:M=8,ef=40",
                                           "roargraph:M=8,ef=8", "sparq:r=8,codec=int8"),
                         [](const auto& p) {
                           return std::string(p.param).substr(0, std::string(p.param).find(':'));
                         });

}  // namespace
}  // namespace keyhole::test
