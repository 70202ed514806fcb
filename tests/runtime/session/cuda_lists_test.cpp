// Sessions on the machine's CUDA device whose steps choose among lists of codes, beside exact attention on the host:
// prompts, appends, truncation, copies, files, graphs; drafts of which some stay, beside double precision.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "keyhole/batch.h"
#include "keyhole/inspect.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/captured_graph.h"
#include "tests/runtime/device_turn.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"
#include "tests/scoped_variable.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class CudaLists : public testing::Test {
 protected:
  static constexpr uint32_t kPrompt = 33400;

  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    config_ = small_engine(8);
    config_.layers = 1;
    config_.head_dim = 64;
    config_.q_heads = 8;
    config_.scale =
        0.012F;  // logits of rows lie half a nat about those of their centres, and these one nat apart
    host_ = make_engine(config_);
    config_.device = KEYHOLE_DEVICE_CUDA;
    config_.timeout_ms = 5000;
    engine_ = make_engine(config_);
    make_sessions(44000, "codes:k=4,v=4,lists=64,miss=0,from=32768");
  }
  /// Of at most so many tokens: exact ones, codes in the lists of this index spec, and codes alone.
  void make_sessions(uint32_t max_tokens, const char* lists) {
    exact_.reset(), lists_.reset(), codes_.reset();
    keyhole_session_config c = small_session();
    c.max_tokens = max_tokens;
    c.flush_block = c.append_block = 256;
    c.index = "exact";
    exact_ = make_session(host_.get(), c);
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    c.index = lists;
    lists_ = make_session(engine_.get(), c);
    c.index = "codes:k=4,v=4";
    codes_ = make_session(engine_.get(), c);
  }
  void TearDown() override {
    exact_.reset(), lists_.reset(), codes_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] int64_t hq() const { return config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return config_.head_dim; }

  /// Appends n tokens in clusters to the sessions.
  void append(std::vector<keyhole_session*> sessions, uint32_t n) {
    const auto size = static_cast<size_t>(hkv() * d());
    std::vector<float> k = numbers_.many(n * size), v = numbers_.many(n * size),
                       q = numbers_.many(n * static_cast<size_t>(hq() * d()));
    if (centres_.empty()) centres_ = numbers_.many(64 * size);
    for (uint32_t i = 0; i < n; ++i) {
      const size_t c = numbers_.below(64);
      for (size_t j = 0; j < size; ++j) {
        k[i * size + j] += 2.0F * centres_[c * size + j];
        v[i * size + j] += centres_[c * size + j];
      }
    }
    const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()}),
                         tq = tensor(q, {n, hq(), d()});
    for (keyhole_session* s : sessions) ASSERT_OK(keyhole_session_append(s, 0, &tk, &tv, &tq));
  }
  struct Answer {
    std::vector<float> o, lse;
  };
  /// Steps without a token of their own.
  Answer on_host(keyhole_session* s, const std::vector<float>& q) {
    Answer a{std::vector<float>(q.size()), std::vector<float>(static_cast<size_t>(hq()))};
    const keyhole_tensor tq = tensor(q, {hq(), d()}), to = tensor(a.o, {hq(), d()});
    EXPECT_OK(keyhole_session_attend(s, 0, &tq, nullptr, nullptr, &to, a.lse.data()));
    return a;
  }
  Answer on_device(keyhole_session* s, const std::vector<float>& q) {
    EXPECT_OK(keyhole_session_set_stream(s, stream_));
    DeviceVector dq(q.size()), out(q.size()), lse(static_cast<size_t>(hq()));
    dq.set(q, stream_);
    const keyhole_tensor tq = dq.tensor({hq(), d()}), to = out.tensor({hq(), d()}),
                         tl = lse.tensor({hq()});
    EXPECT_OK(
        keyhole_session_attend(s, 0, &tq, nullptr, nullptr, &to, static_cast<float*>(tl.data)));
    EXPECT_OK(keyhole_session_synchronize(s));
    return {out.get(), lse.get()};
  }
  /// The relative error of all heads together.
  static double error(const Answer& seen, const Answer& right) {
    double difference = 0.0, norm = 1e-30;
    for (size_t i = 0; i < right.o.size(); ++i) {
      difference += std::pow(seen.o[i] - right.o[i], 2.0);
      norm += std::pow(right.o[i], 2.0);
    }
    return std::sqrt(difference / norm);
  }
  void expect_near(keyhole_session* s, keyhole_session* exact) {
    for (uint32_t i = 0; i < 3; ++i) {
      const std::vector<float> q = numbers_.many(static_cast<size_t>(hq() * d()));
      const Answer right = on_host(exact, q), seen = on_device(s, q);
      EXPECT_LT(error(seen, right), 0.05);
      for (size_t h = 0; h < right.lse.size(); ++h) EXPECT_NEAR(seen.lse[h], right.lse[h], 0.02);
    }
    // For a query of zeros all tokens weigh the same, by code, by mean or exactly: the log-sum-exp counts them.
    const std::vector<float> zeros(static_cast<size_t>(hq() * d()));
    const Answer right = on_host(exact, zeros), seen = on_device(s, zeros);
    for (size_t h = 0; h < right.lse.size(); ++h) EXPECT_NEAR(seen.lse[h], right.lse[h], 5e-4);
  }
  [[nodiscard]] uint64_t code_bytes() const {
    keyhole_memory_use use;
    keyhole_memory_use_init(&use);
    EXPECT_OK(keyhole_engine_get_memory(engine_.get(), &use));
    return use.code_bytes;
  }

  void follow_a_session();
  void stay_in_a_graph();

  cudaStream_t stream_ = nullptr;
  keyhole_engine_config config_;
  EnginePtr host_, engine_;
  SessionPtr exact_, lists_, codes_;
  Numbers numbers_{29};
  std::vector<float> centres_;
};

void CudaLists::follow_a_session() {
  append({exact_.get(), lists_.get(), codes_.get()}, kPrompt);
  expect_near(lists_.get(), exact_.get());
  // Once lists are made it chooses: its answers are not those of all codes.
  const std::vector<float> q = numbers_.many(static_cast<size_t>(hq() * d()));
  const Answer by_codes = on_device(codes_.get(), q);
  double apart = 0.0;
  for (uint32_t i = 0; i < 1000 && apart < 1e-5; ++i) {
    apart = error(on_device(lists_.get(), q), by_codes);
  }
  EXPECT_GT(apart, 1e-5);
  const uint64_t all = code_bytes();
  codes_.reset();
  EXPECT_GT(code_bytes(), (all - code_bytes()) * 3 / 2);

  append({exact_.get(), lists_.get()}, 5000);
  expect_near(lists_.get(), exact_.get());
  SessionPtr copy = fork_of(lists_.get());
  expect_near(copy.get(), exact_.get());
  for (keyhole_session* s : {exact_.get(), lists_.get()}) {
    ASSERT_OK(keyhole_session_truncate(s, 34000));
  }
  expect_near(lists_.get(), exact_.get());
  append({exact_.get(), lists_.get()}, 4500);
  expect_near(lists_.get(), exact_.get());

  const TemporaryFolder folder;
  const std::string path = (folder / "session").string();
  ASSERT_OK(keyhole_session_save(lists_.get(), path.c_str()));
  copy.reset();
  SessionPtr loaded = load_of(engine_.get(), path);
  expect_near(loaded.get(), exact_.get());
  for (keyhole_session* s : {exact_.get(), loaded.get()}) {
    ASSERT_OK(keyhole_session_truncate(s, 1000));
  }
  expect_near(loaded.get(), exact_.get());
}

void CudaLists::stay_in_a_graph() {
  append({exact_.get(), lists_.get()}, kPrompt);
  keyhole_session* const s = lists_.get();
  ASSERT_OK(keyhole_session_set_stream(s, stream_));
  ASSERT_OK(keyhole_session_synchronize(s));
  const auto kv = static_cast<size_t>(hkv() * d());
  DeviceVector q(static_cast<size_t>(hq() * d())), k(kv), v(kv),
      out(static_cast<size_t>(hq() * d()));
  const keyhole_tensor tq = q.tensor({hq(), d()}), tk = k.tensor({hkv(), d()}),
                       tv = v.tensor({hkv(), d()}), to = out.tensor({hq(), d()});
  (void)on_device(s, numbers_.many(static_cast<size_t>(hq() * d())));
  const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    ASSERT_OK(keyhole_session_attend(s, 0, &tq, &tk, &tv, &to, nullptr));
  });
  for (uint32_t t = 0; t < 600; ++t) {
    const std::vector<float> nq = numbers_.many(static_cast<size_t>(hq() * d())),
                             nk = numbers_.many(kv), nv = numbers_.many(kv);
    q.set(nq, stream_);
    k.set(nk, stream_);
    v.set(nv, stream_);
    ASSERT_OK(keyhole_session_announce(s));
    graph.launch();
    const keyhole_tensor hk = tensor(nk, {1, hkv(), d()}), hv = tensor(nv, {1, hkv(), d()});
    ASSERT_OK(keyhole_session_append(exact_.get(), 0, &hk, &hv, nullptr));
    if (t % 150 != 149) continue;
    ASSERT_OK(keyhole_session_synchronize(s));
    Answer seen{out.get(), {}};
    EXPECT_LT(error(seen, on_host(exact_.get(), nq)), 0.05) << "token " << t;
  }
}

TEST_F(CudaLists, FollowASession) { follow_a_session(); }

TEST_F(CudaLists, StayInAGraph) { stay_in_a_graph(); }

/// By the ways of devices without clusters of thread blocks, whose choices tell each other by memory.
class CudaListsWithoutClusters : public CudaLists {
  ScopedVariable capability_{"KEYHOLE_CUDA_CAPABILITY", "8.9"};
};

TEST_F(CudaListsWithoutClusters, FollowASession) { follow_a_session(); }

TEST_F(CudaListsWithoutClusters, StayInAGraph) { stay_in_a_graph(); }

/// Drafts of a session that chooses among lists. Keys and values of all tokens are kept here, and attended in double
/// precision.
class CudaListsWithDrafts : public CudaLists {
 protected:
  static constexpr uint32_t kDrafts = 7;
  static constexpr uint32_t kListed = 8192, kTokens = kListed + 700;
  /// Of a draft's value, in a component of its own: a draft that is attended twice or not at all moves the mean of all
  /// values there by 0.11. Codes of 4 bits without such values leave some 0.02 of that mean; with them in a block they
  /// leave 0.6, as the block's mean is far from all of its rows.
  static constexpr float kMark = 1024.0F;
  using Turn = DeviceTurn<DeviceVector>;

  void SetUp() override {
    CudaLists::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    make_sessions(12000, "codes:k=4,v=4,lists=64,miss=0,from=8192");
    k_ = numbers_.many(kTokens * kv());
    v_ = numbers_.many(kTokens * kv());
    const std::vector<float> q = numbers_.many(kTokens * static_cast<size_t>(hq() * d())),
                             centres = numbers_.many(64 * kv());
    for (uint32_t i = 0; i < kTokens; ++i) {
      const size_t centre = numbers_.below(64);
      for (size_t j = 0; j < kv(); ++j) {
        k_[i * kv() + j] += 2.0F * centres[centre * kv() + j];
        v_[i * kv() + j] += centres[centre * kv() + j];
      }
    }
    const keyhole_tensor tk = tensor(k_, {kTokens, hkv(), d()}),
                         tv = tensor(v_, {kTokens, hkv(), d()}),
                         tq = tensor(q, {kTokens, hq(), d()});
    for (keyhole_session* s : {lists_.get(), codes_.get()}) {
      ASSERT_OK(keyhole_session_append(s, 0, &tk, &tv, &tq));
      ASSERT_OK(keyhole_session_set_stream(s, stream_));
    }
  }
  [[nodiscard]] size_t kv() const { return static_cast<size_t>(hkv() * d()); }
  [[nodiscard]] size_t tokens() const { return k_.size() / kv(); }

  /// New drafts in the turn's memory. The queries of every second one are zeros.
  void draw(Turn& turn) {
    turn.host = new_tokens(turn.shape, turn.host.n, numbers_);
    const auto row = static_cast<size_t>(hq() * d());
    for (uint32_t i = 0; i < turn.host.n; ++i) {
      if (i % 2 == 1) std::fill_n(turn.host.q.begin() + static_cast<ptrdiff_t>(i * row), row, 0.0F);
      for (int64_t h = 0; h < hkv(); ++h) {
        turn.host.v[i * kv() + static_cast<size_t>(h * d()) + (marks_ + i) % 64] = kMark;
      }
    }
    marks_ += turn.host.n;
    turn.fill(stream_);
  }
  /// Whether tokens that were drafts have left the window.
  [[nodiscard]] bool drafts_in_codes() const {
    keyhole_layer_tokens held;
    keyhole_layer_tokens_init(&held);
    EXPECT_OK(keyhole_session_get_layer_tokens(lists_.get(), 0, &held));
    return held.total - held.window > kTokens;
  }
  /// What codes are made of: of every token that was a draft the session has its own keys and values.
  void expect_rows() {
    const size_t n = tokens() - kTokens;
    std::vector<float> k(n * kv()), v(n * kv());
    const keyhole_tensor tk = tensor(k, {static_cast<int64_t>(n), hkv(), d()}),
                         tv = tensor(v, {static_cast<int64_t>(n), hkv(), d()});
    ASSERT_OK(keyhole_session_get_rows(lists_.get(), 0, kTokens, &tk, &tv));
    for (size_t i = 0; i < n * kv(); ++i) {
      ASSERT_EQ(k[i], k_[kTokens * kv() + i]) << "key of token " << kTokens + i / kv();
      ASSERT_EQ(v[i], v_[kTokens * kv() + i]) << "value of token " << kTokens + i / kv();
    }
  }
  /// Of one query, to all tokens and to the drafts that it sees: the log-sum-exp of a head, and its output.
  double attend(const float* q, int64_t head, const NewTokens& drafts, uint64_t sees,
                std::vector<double>& o) const {
    const auto dim = static_cast<size_t>(d()),
               at = static_cast<size_t>(head / (hq() / hkv())) * dim;
    o.assign(dim, 0.0);
    double sum = 0.0;  // logits are within a few nats of 0
    const auto take = [&](const float* key, const float* value) {
      double dot = 0.0;
      for (size_t j = 0; j < dim; ++j) dot += double{q[j]} * key[j];
      const double w = std::exp(double{config_.scale} * dot);
      sum += w;
      for (size_t j = 0; j < dim; ++j) o[j] += w * value[j];
    };
    for (size_t i = 0; i < tokens(); ++i) take(&k_[i * kv() + at], &v_[i * kv() + at]);
    for (uint32_t i = 0; i < drafts.n; ++i) {
      if ((sees >> i & 1U) != 0) take(&drafts.k[i * kv() + at], &drafts.v[i * kv() + at]);
    }
    for (double& x : o) x /= sum;
    return std::log(sum);
  }
  void expect_row(const float* q, const Answer& seen, uint32_t row, const NewTokens& drafts,
                  uint64_t sees) const {
    const auto dim = static_cast<size_t>(d());
    const bool flat = std::all_of(q, q + hq() * d(), [](float x) { return x == 0.0F; });
    std::vector<double> right;
    for (int64_t h = 0; h < hq(); ++h) {
      SCOPED_TRACE("token " + std::to_string(row) + ", head " + std::to_string(h));
      const size_t at = static_cast<size_t>(row * hq() + h);
      const double lse = attend(q + static_cast<size_t>(h) * dim, h, drafts, sees, right);
      double difference = 0.0, norm = 1e-30, most = 0.0;
      for (size_t j = 0; j < dim; ++j) {
        const double x = seen.o[at * dim + j] - right[j];
        difference += x * x;
        norm += right[j] * right[j];
        most = std::max(most, std::abs(x));
      }
      // A query of zeros counts: a token more or less of 9,000 is 1.1e-4 of the log-sum-exp.
      ASSERT_NEAR(seen.lse[at], lse, flat ? 4e-5 : 0.1);
      if (drafts_in_codes()) continue;
      // Keys and values by codes of 4 bits: up to 0.1 of a query that looks at some 60 tokens.
      ASSERT_LT(std::sqrt(difference / norm), 0.25);
      if (flat) {
        ASSERT_LT(most, 0.04);
      }
    }
  }
  /// The drafts' answers; those that `kept` names follow the tokens then.
  void expect_drafts(Turn& turn, const uint64_t* mask, const std::vector<uint32_t>& kept) {
    turn.fetch();
    const auto row = static_cast<size_t>(hq() * d());
    const Answer seen{turn.host.answer.o, turn.host.answer.lse};
    for (uint32_t i = 0; i < turn.host.n; ++i) {
      expect_row(&turn.host.q[i * row], seen, i, turn.host,
                 mask != nullptr ? mask[i] : (uint64_t{2} << i) - 1);
      if (HasFatalFailure()) return;
    }
    for (const uint32_t i : kept) {
      for (auto [all, from] : {std::pair{&k_, &turn.host.k}, std::pair{&v_, &turn.host.v}}) {
        const auto begin = from->begin() + static_cast<ptrdiff_t>(i * kv());
        all->insert(all->end(), begin, begin + static_cast<ptrdiff_t>(kv()));
      }
    }
  }
  /// Steps that choose, with and without a query that looks at anything.
  void expect_steps(keyhole_session* s) {
    for (const bool flat : {false, true}) {
      std::vector<float> q(static_cast<size_t>(hq() * d()));
      if (!flat) q = numbers_.many(q.size());
      expect_row(q.data(), on_device(s, q), 0, {}, 0);
    }
  }
  /// The steps of lists_ are not those of all codes: it chooses.
  void expect_to_choose() {
    const auto n = static_cast<int64_t>(tokens() - kTokens);
    const std::vector<float> k(k_.begin() + kTokens * kv(), k_.end()),
        v(v_.begin() + kTokens * kv(), v_.end());
    const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
    ASSERT_OK(keyhole_session_append(codes_.get(), 0, &tk, &tv, nullptr));
    const std::vector<float> q = numbers_.many(static_cast<size_t>(hq() * d()));
    const CudaLists::Answer by_codes = on_device(codes_.get(), q);
    EXPECT_GT(error(on_device(lists_.get(), q), by_codes), 1e-5);
  }
  /// Two branches behind the first draft.
  static constexpr std::array<uint64_t, kDrafts> kTree{1, 3, 5, 11, 21, 43, 85};
  static constexpr std::array<uint32_t, 4> kPath{0, 2, 4, 6};

  std::vector<float> k_, v_;
  uint32_t marks_ = 0;
};

TEST_F(CudaListsWithDrafts, AttendEveryTokenOnce) {
  keyhole_session* const s = lists_.get();
  expect_steps(s);
  Turn turn(Shape(config_), kDrafts, numbers_);
  for (uint32_t round = 0; round < 120; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    draw(turn);
    const bool is_tree = round % 3 == 2;
    const uint64_t* const mask = is_tree ? kTree.data() : nullptr;
    std::vector<uint32_t> kept(kPath.begin(), kPath.end());
    if (!is_tree) {
      kept.clear();
      for (uint32_t i = 0; i < round % (kDrafts + 1); ++i) kept.push_back(i);
    }
    ASSERT_OK(turn.extend(s, 0, mask));
    ASSERT_OK(keyhole_session_accept(s, static_cast<uint32_t>(kept.size()),
                                     is_tree ? kept.data() : nullptr));
    ASSERT_OK(keyhole_session_synchronize(s));
    expect_drafts(turn, mask, kept);
    ASSERT_FALSE(HasFatalFailure());
    if (round % 8 == 7) expect_steps(s);
    ASSERT_FALSE(HasFatalFailure());
  }
  ASSERT_TRUE(drafts_in_codes());
  expect_rows();
  expect_to_choose();
}

TEST_F(CudaListsWithDrafts, AttendEveryTokenOnceInGraphs) {
  keyhole_session* const s = lists_.get();
  Turn turn(Shape(config_), kDrafts, numbers_), one(Shape(config_), 1, numbers_);
  // What a graph does has to have been done before.
  draw(turn);
  ASSERT_OK(turn.extend(s, 0, kTree.data()));
  ASSERT_OK(keyhole_session_accept(s, 4, kPath.data()));
  ASSERT_OK(keyhole_session_synchronize(s));
  expect_drafts(turn, kTree.data(), {kPath.begin(), kPath.end()});
  expect_steps(s);
  ASSERT_FALSE(HasFatalFailure());
  const CapturedGraph drafts(stream_, cudaStreamCaptureModeThreadLocal,
                             [&] { ASSERT_OK(turn.extend(s, 0, kTree.data())); });
  uint64_t number_of_drafts = 0, number_of_step = 0;
  ASSERT_OK(keyhole_session_get_graph(s, &number_of_drafts));
  const CapturedGraph step(stream_, cudaStreamCaptureModeThreadLocal,
                           [&] { ASSERT_OK(one.attend(s, 0, false)); });
  ASSERT_OK(keyhole_session_get_graph(s, &number_of_step));
  for (uint32_t round = 0; round < 100; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    draw(turn);
    ASSERT_OK(keyhole_session_announce_graph(s, number_of_drafts));
    drafts.launch();
    const uint32_t m = round % 5;
    const std::vector<uint32_t> kept(kPath.begin(), kPath.begin() + m);
    ASSERT_OK(keyhole_session_accept(s, m, kPath.data()));
    ASSERT_OK(keyhole_session_synchronize(s));
    expect_drafts(turn, kTree.data(), kept);
    ASSERT_FALSE(HasFatalFailure());
    // A step of one token by the other graph, which chooses; of every second one the query is zeros.
    draw(one);
    if (round % 2 == 1) {
      std::fill(one.host.q.begin(), one.host.q.end(), 0.0F);
      one.q.set(one.host.q, stream_);
    }
    ASSERT_OK(keyhole_session_announce_graph(s, number_of_step));
    step.launch();
    ASSERT_OK(keyhole_session_synchronize(s));
    expect_drafts(one, nullptr, {0});
    ASSERT_FALSE(HasFatalFailure());
  }
  ASSERT_TRUE(drafts_in_codes());
  expect_rows();
  expect_to_choose();
}

}  // namespace
}  // namespace keyhole::test
