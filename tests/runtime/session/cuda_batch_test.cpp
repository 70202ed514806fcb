// keyhole_session_extend_batch of sessions on the machine's CUDA device that share a stream, beside twins of theirs
// that take the same tokens one by one: one launch for many sessions changes nothing but rounding.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/captured_graph.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

class CudaBatch : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    config_ = small_engine(4);
    config_.head_dim = 128;
    config_.q_heads = 4 * config_.kv_heads;
    // A row that one side reads exactly and the other by its code, of two that weigh the same, hardly changes the
    // output.
    config_.scale = 0.02F;
    config_.device = KEYHOLE_DEVICE_CUDA;
    config_.timeout_ms = 5000;
    config_.signal = KEYHOLE_SIGNAL_WAIT;
    engine_ = make_engine(config_);
  }
  void TearDown() override {
    members_.clear();
    twins_.clear();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] int64_t hq() const { return config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return config_.head_dim; }

  void append(keyhole_session* s, uint64_t seed, uint32_t prompt) {
    for (uint32_t l = 0; l < config_.layers && prompt != 0; ++l) {
      Numbers numbers(100 * seed + l);
      const auto k = numbers.many(static_cast<size_t>(prompt * hkv() * d()));
      const auto v = numbers.many(k.size());
      const auto q = numbers.many(static_cast<size_t>(prompt * hq() * d()));
      const keyhole_tensor tk = tensor(k, {prompt, hkv(), d()}),
                           tv = tensor(v, {prompt, hkv(), d()}),
                           tq = tensor(q, {prompt, hq(), d()});
      ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
    }
  }
  void add(const char* index, uint32_t prompt) {
    keyhole_session_config c = small_session();
    c.index = index;
    c.flush_block = 256;
    c.append_block = 256;
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    const uint64_t seed = members_.size() + 1;
    for (std::vector<SessionPtr>* some : {&members_, &twins_}) {
      some->push_back(make_session(engine_.get(), c));
      keyhole_session* const s = some->back().get();
      append(s, seed, prompt);
      if (HasFatalFailure()) return;
      ASSERT_OK(keyhole_session_set_stream(s, stream_));
      ASSERT_OK(keyhole_session_synchronize(s));
    }
  }

  /// The tensors of a layer's batch, with so many tokens of each member.
  struct Tensors {
    Tensors(const CudaBatch& of, std::vector<uint32_t> starts)
        : start(std::move(starts)),
          q(static_cast<size_t>(start.back() * of.hq() * of.d())),
          k(static_cast<size_t>(start.back() * of.hkv() * of.d())),
          v(static_cast<size_t>(start.back() * of.hkv() * of.d())),
          out(static_cast<size_t>(start.back() * of.hq() * of.d())),
          lse(static_cast<size_t>(start.back() * of.hq())) {}
    std::vector<uint32_t> start;
    DeviceVector q, k, v, out, lse;
  };
  [[nodiscard]] std::vector<uint32_t> starts(const std::vector<uint32_t>& tokens) const {
    std::vector<uint32_t> start{0};
    for (size_t i = 0; i < members_.size(); ++i) {
      start.push_back(start.back() + tokens[i % tokens.size()]);
    }
    return start;
  }
  void draw(Tensors& t) {
    const auto n = static_cast<size_t>(t.start.back());
    t.q.set(numbers_.many(n * static_cast<size_t>(hq() * d())), stream_);
    t.k.set(numbers_.many(n * static_cast<size_t>(hkv() * d())), stream_);
    t.v.set(numbers_.many(n * static_cast<size_t>(hkv() * d())), stream_);
    t.out.set(std::vector<float>(n * static_cast<size_t>(hq() * d()), NAN), stream_);
    t.lse.set(std::vector<float>(n * static_cast<size_t>(hq()), NAN), stream_);
  }
  void extend(uint32_t layer, Tensors& t) {
    std::vector<keyhole_session*> handles;
    for (const SessionPtr& s : members_) handles.push_back(s.get());
    const int64_t n = t.start.back();
    const keyhole_tensor q = t.q.tensor({n, hq(), d()}), k = t.k.tensor({n, hkv(), d()}),
                         v = t.v.tensor({n, hkv(), d()}), o = t.out.tensor({n, hq(), d()}),
                         lse = t.lse.tensor({n, hq()});
    ASSERT_OK(keyhole_session_extend_batch(handles.data(), static_cast<uint32_t>(handles.size()),
                                           layer, &q, &k, &v, t.start.data(), &o,
                                           static_cast<float*>(lse.data), nullptr));
  }
  void synchronize(const std::vector<SessionPtr>& sessions) {
    for (const SessionPtr& s : sessions) ASSERT_OK(keyhole_session_synchronize(s.get()));
  }
  /// The twins take the same tokens alone; `seen` of the batch.
  void expect_as_alone(uint32_t layer, Tensors& t) {
    const std::vector<float> seen = t.out.get(), seen_lse = t.lse.get();
    const int64_t n = t.start.back();
    const keyhole_tensor q = t.q.tensor({n, hq(), d()}), k = t.k.tensor({n, hkv(), d()}),
                         v = t.v.tensor({n, hkv(), d()}), o = t.out.tensor({n, hq(), d()}),
                         lse = t.lse.tensor({n, hq()});
    const auto part = [&](keyhole_tensor whole, int64_t heads, size_t i) {
      whole.data = static_cast<float*>(whole.data) + t.start[i] * heads * d();
      whole.shape[0] = t.start[i + 1] - t.start[i];
      return whole;
    };
    for (size_t i = 0; i < twins_.size(); ++i) {
      if (t.start[i] == t.start[i + 1]) continue;
      const keyhole_tensor pq = part(q, hq(), i), pk = part(k, hkv(), i), pv = part(v, hkv(), i),
                           po = part(o, hq(), i);
      ASSERT_OK(keyhole_session_extend(twins_[i].get(), layer, &pq, &pk, &pv, nullptr, &po,
                                       static_cast<float*>(lse.data) + t.start[i] * hq()));
      ASSERT_OK(keyhole_session_synchronize(twins_[i].get()));
    }
    const std::vector<float> want = t.out.get(), want_lse = t.lse.get();
    const auto width = static_cast<size_t>(hq() * d());
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(seen[i], want[i], 5e-3) << "layer " << layer << ", token " << i / width;
    }
    for (size_t i = 0; i < want_lse.size(); ++i) {
      ASSERT_NEAR(seen_lse[i], want_lse[i], 5e-3)
          << "layer " << layer << ", token " << i / static_cast<size_t>(hq());
    }
  }
  /// A batch of every layer.
  void round(const std::vector<uint32_t>& tokens) {
    std::vector<std::unique_ptr<Tensors>> all;
    for (uint32_t l = 0; l < config_.layers; ++l) {
      all.push_back(std::make_unique<Tensors>(*this, starts(tokens)));
      draw(*all.back());
    }
    for (uint32_t l = 0; l < config_.layers; ++l) extend(l, *all[l]);
    synchronize(members_);
    for (uint32_t l = 0; l < config_.layers; ++l) {
      expect_as_alone(l, *all[l]);
      if (HasFatalFailure()) return;
    }
  }

  cudaStream_t stream_ = nullptr;
  keyhole_engine_config config_{};
  EnginePtr engine_;
  std::vector<SessionPtr> members_, twins_;
  Numbers numbers_{23};
};

TEST_F(CudaBatch, SessionsOnOneStreamAnswerAsAlone) {
  for (const uint32_t count : {2U, 3U, 16U, 17U}) {
    SCOPED_TRACE(std::to_string(count) + " sessions");
    members_.clear();
    twins_.clear();
    for (uint32_t i = 0; i < count; ++i) {
      add(i % 2 == 0 ? "codes:k=2,v=2" : "codes:k=4,v=4", i == 1 ? 0 : 20 + i * 777 % 2900);
    }
    if (HasFatalFailure()) return;
    for (uint32_t i = 0; i < 20; ++i) {
      round({1});
      if (HasFatalFailure()) return;
    }
    // Steps of several tokens, several steps, and none.
    round({1, 3, 0, 2, 9});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaBatch, ForksAttendWhatTheyShareAsAlone) {
  add("codes:k=2,v=2", 2600);
  for (int i = 0; i < 5; ++i) {
    for (std::vector<SessionPtr>* some : {&members_, &twins_}) {
      // The last is a copy of a copy.
      some->push_back(fork_of((*some)[i == 4 ? 2 : 0].get()));
      ASSERT_OK(keyhole_session_set_stream(some->back().get(), stream_));
    }
  }
  for (int i = 0; i < 3; ++i) {
    round({1});
    if (HasFatalFailure()) return;
  }
  // One parts within what all share, and all grow by blocks of their own.
  for (const std::vector<SessionPtr>* some : {&members_, &twins_}) {
    ASSERT_OK(keyhole_session_truncate((*some)[3].get(), 1000));
  }
  for (int i = 0; i < 40; ++i) {
    round({8, 13, 0, 7});
    if (HasFatalFailure()) return;
  }
  // What was copied first goes before its copies.
  for (std::vector<SessionPtr>* some : {&members_, &twins_}) some->erase(some->begin());
  for (int i = 0; i < 3; ++i) {
    round({1, 2});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaBatch, GraphsOfBatchesAreLaunchedOften) {
  for (uint32_t i = 0; i < 5; ++i) add("codes:k=2,v=2", 30 + 600 * i);
  if (HasFatalFailure()) return;
  std::vector<std::unique_ptr<Tensors>> all;
  for (uint32_t l = 0; l < config_.layers; ++l) {
    all.push_back(std::make_unique<Tensors>(*this, starts({1})));
  }
  const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    for (uint32_t l = 0; l < config_.layers; ++l) extend(l, *all[l]);
  });
  size_t nodes = 0;
  ASSERT_CUDA(cudaGraphGetNodes(graph.get(), nullptr, &nodes));
  // Two kernels a layer, where the device can.
  if (gpu::kernels_major(0) >= 9) {
    EXPECT_EQ(nodes, 2 * config_.layers);
  }
  // Beyond a flush of every window.
  for (uint32_t round = 0; round < 280; ++round) {
    for (auto& t : all) draw(*t);
    // One by one, or all at once by the graph's number.
    if (round % 2 == 0) {
      for (const SessionPtr& s : members_) ASSERT_OK(keyhole_session_announce(s.get()));
    } else {
      std::vector<keyhole_session*> handles;
      uint64_t number = 0;
      for (const SessionPtr& s : members_) {
        handles.push_back(s.get());
        uint64_t own = 0;
        ASSERT_OK(keyhole_session_get_graph(s.get(), &own));
        EXPECT_TRUE(number == 0 || number == own);
        number = own;
      }
      ASSERT_OK(keyhole_session_announce_batch(handles.data(),
                                               static_cast<uint32_t>(handles.size()), number));
    }
    graph.launch();
    synchronize(members_);
    for (uint32_t l = 0; l < config_.layers; ++l) {
      expect_as_alone(l, *all[l]);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaBatch, GraphsOfCopiesStayRightWhenOneIsCopiedAgain) {
  add("codes:k=2,v=2", 2600);
  for (std::vector<SessionPtr>* some : {&members_, &twins_}) {
    some->push_back(fork_of((*some)[0].get()));
    ASSERT_OK(keyhole_session_set_stream(some->back().get(), stream_));
    // The first one goes on otherwise, so that it has less than half of its rows in common with its copy.
    ASSERT_OK(keyhole_session_truncate((*some)[0].get(), 600));
    append((*some)[0].get(), 77, 1300);
    if (HasFatalFailure()) return;
    synchronize(*some);
  }
  std::vector<std::unique_ptr<Tensors>> all;
  for (uint32_t l = 0; l < config_.layers; ++l) {
    all.push_back(std::make_unique<Tensors>(*this, starts({1})));
  }
  const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    for (uint32_t l = 0; l < config_.layers; ++l) extend(l, *all[l]);
  });
  std::vector<SessionPtr> copies;
  for (uint32_t round = 0; round < 6; ++round) {
    for (auto& t : all) draw(*t);
    for (const SessionPtr& s : members_) ASSERT_OK(keyhole_session_announce(s.get()));
    graph.launch();
    synchronize(members_);
    for (uint32_t l = 0; l < config_.layers; ++l) {
      expect_as_alone(l, *all[l]);
      if (HasFatalFailure()) return;
    }
    // What the first has in common with these copies is nothing that the graph's other session has.
    if (round % 2 == 1) copies.push_back(fork_of(members_[0].get()));
  }
}

TEST_F(CudaBatch, AMemberThatIsNotFiniteLeavesOthersAlone) {
  for (uint32_t i = 0; i < 4; ++i) add("codes:k=2,v=2", 900 + 300 * i);
  if (HasFatalFailure()) return;
  Tensors t(*this, starts({1}));
  draw(t);
  const auto width = static_cast<size_t>(hq() * d());
  std::vector<float> q = t.q.get();
  const std::vector<float> finite = q;
  q[2 * width + 5] = NAN;
  t.q.set(q, stream_);
  extend(0, t);
  for (size_t i = 0; i < members_.size(); ++i) {
    EXPECT_EQ(keyhole_session_synchronize(members_[i].get()),
              i == 2 ? KEYHOLE_NOT_FINITE : KEYHOLE_OK);
  }
  const std::vector<float> seen = t.out.get();
  t.q.set(finite, stream_);
  // The twins take what is finite.
  std::vector<keyhole_session*> handles;
  for (const SessionPtr& s : twins_) handles.push_back(s.get());
  const int64_t n = t.start.back();
  const keyhole_tensor tq = t.q.tensor({n, hq(), d()}), k = t.k.tensor({n, hkv(), d()}),
                       v = t.v.tensor({n, hkv(), d()}), o = t.out.tensor({n, hq(), d()});
  ASSERT_OK(keyhole_session_extend_batch(handles.data(), 4, 0, &tq, &k, &v, t.start.data(), &o,
                                         nullptr, nullptr));
  synchronize(twins_);
  const std::vector<float> want = t.out.get();
  for (size_t i = 0; i < want.size(); ++i) {
    if (i / width != 2) {
      ASSERT_EQ(seen[i], want[i]) << i;
    }
  }
}

}  // namespace
}  // namespace keyhole::test
