// keyhole_session_extend_batch with tensors in device memory: sessions that have a stream in common take their steps by
// one launch, and what fails there fails for those that were in it. Beside exact attention in double precision.
#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "keyhole/batch.h"
#include "keyhole/stream.h"
#include "tests/runtime/codes_fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kMost = FakeStepGroup::kMost;

class StreamBatch : public StreamCodes {
 protected:
  /// Sessions, each with its model and a prompt, and the tensors of a batch.
  struct Member {
    SessionPtr session;
    Model model;
    uint32_t tokens = 1;  ///< new ones of the next batch
  };
  void add(const keyhole_session_config& c, uint32_t prompt) {
    members_.push_back({make_session(device_.handle.get(), c), Model(engine_config_), 1});
    prefill(members_.back().session.get(), members_.back().model, prompt);
    ASSERT_OK(keyhole_session_synchronize(members_.back().session.get()));
  }

  struct Tensors {
    std::vector<float> q, k, v, out, lse;
    std::vector<uint32_t> start{0};
    std::vector<keyhole_status> statuses;
  };
  Tensors tensors() {
    Tensors t;
    for (const Member& m : members_) t.start.push_back(t.start.back() + m.tokens);
    const size_t n = t.start.back();
    t.q = numbers_.many(n * static_cast<size_t>(hq() * d()));
    t.k = numbers_.many(n * static_cast<size_t>(hkv() * d()));
    t.v = numbers_.many(n * static_cast<size_t>(hkv() * d()));
    t.out.assign(t.q.size(), NAN);
    t.lse.assign(n * static_cast<size_t>(hq()), NAN);
    t.statuses.assign(members_.size(), KEYHOLE_INTERNAL);
    return t;
  }
  keyhole_status extend(uint32_t layer, Tensors& t) {
    std::vector<keyhole_session*> handles;
    for (const Member& m : members_) handles.push_back(m.session.get());
    const int64_t n = t.start.back();
    const keyhole_tensor q = on_device(t.q, {n, hq(), d()}), k = on_device(t.k, {n, hkv(), d()}),
                         v = on_device(t.v, {n, hkv(), d()}), o = on_device(t.out, {n, hq(), d()});
    return keyhole_session_extend_batch(handles.data(), static_cast<uint32_t>(handles.size()),
                                        layer, &q, &k, &v, t.start.data(), &o, t.lse.data(),
                                        t.statuses.data());
  }
  /// Appends member i's tokens to its model, and compares its answers.
  void expect_answers(uint32_t layer, uint32_t i, const Tensors& t) {
    SCOPED_TRACE("layer " + std::to_string(layer) + ", member " + std::to_string(i));
    Model& model = members_[i].model;
    const auto part = [&](const std::vector<float>& x, uint32_t token, int64_t width) {
      const auto row = static_cast<size_t>(width);
      return std::vector<float>(x.data() + token * row, x.data() + (token + 1) * row);
    };
    for (uint32_t token = t.start[i]; token < t.start[i + 1]; ++token) {
      model.append(layer, part(t.k, token, hkv() * d()), part(t.v, token, hkv() * d()));
      expect_truth(model, layer, part(t.q, token, hq() * d()), part(t.out, token, hq() * d()),
                   part(t.lse, token, hq()));
      if (HasFatalFailure()) return;
    }
  }
  /// A batch of every layer, all of which succeed.
  void round() {
    std::vector<Tensors> all;
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      all.push_back(tensors());
      ASSERT_OK(extend(l, all.back()));
    }
    for (const Member& m : members_) ASSERT_OK(keyhole_session_synchronize(m.session.get()));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      for (uint32_t i = 0; i < members_.size(); ++i) expect_answers(l, i, all[l]);
    }
  }

  /// New numbers where a graph reads them.
  void renew(std::vector<Tensors>& all) {
    for (Tensors& t : all) {
      const Tensors fresh = tensors();
      std::copy(fresh.q.begin(), fresh.q.end(), t.q.begin());
      std::copy(fresh.k.begin(), fresh.k.end(), t.k.begin());
      std::copy(fresh.v.begin(), fresh.v.end(), t.v.begin());
    }
  }
  [[nodiscard]] uint64_t last_graph(uint32_t member) const {
    uint64_t graph = 0;
    EXPECT_OK(keyhole_session_get_graph(members_[member].session.get(), &graph));
    return graph;
  }
  keyhole_status announce_all(uint64_t graph) {
    std::vector<keyhole_session*> handles;
    for (const Member& m : members_) handles.push_back(m.session.get());
    return keyhole_session_announce_batch(handles.data(), static_cast<uint32_t>(handles.size()),
                                          graph);
  }

  StreamEngine device_{engine_config_};
  std::vector<Member> members_;
};

TEST_F(StreamBatch, OneLaunchIsOfManySessions) {
  for (uint32_t i = 0; i < kMost + 1; ++i) add(coded(), 20 + 300 * i);
  round();
  // Of every layer, 2 and 3 of 5.
  std::vector<uint32_t> want;
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    want.push_back((kMost + 1) / 2);
    want.push_back(kMost + 1 - (kMost + 1) / 2);
  }
  EXPECT_EQ(device_.faults.launches_of_groups, want);
  // Some windows are flushed meanwhile.
  for (uint32_t i = 0; i < unless_sanitized(60U, 10U); ++i) {
    round();
    if (HasFatalFailure()) return;
  }
}

TEST_F(StreamBatch, StepsOfOtherKindsGoByThemselves) {
  keyhole_session_config exact = coded();
  exact.index = "flat";
  exact.offload_placement = KEYHOLE_PLACE_AUTO;
  keyhole_budget_init(&exact.budget);
  exact.mode = KEYHOLE_MODE_EXACT;
  keyhole_session_config audited = coded();
  audited.audit_share = 1.0;
  add(coded(), 300);
  add(exact, 300);
  add(coded(), 700);
  add(audited, 300);
  add(coded(), 40);
  members_[4].tokens = 2;  // one step
  add(coded(), 300);
  members_[5].tokens = 0;
  add(coded(), 300);
  members_[6].tokens = 11;  // several, each of which waits for the one before
  round();
  for (const uint32_t n : device_.faults.launches_of_groups) EXPECT_EQ(n, 3U);
  EXPECT_EQ(device_.faults.launches_of_groups.size(), engine_config_.layers);
  members_[0].tokens = 0;
  members_[2].tokens = 0;
  members_[4].tokens = 1;
  device_.faults.launches_of_groups.clear();
  round();
  // Member 4 and the audited one, which is not known to go alone before it is enqueued.
  for (const uint32_t n : device_.faults.launches_of_groups) EXPECT_EQ(n, 1U);
}

TEST_F(StreamBatch, ALaunchThatFailsIsEveryMembers) {
  keyhole_session_config exact = coded();
  exact.index = "flat";
  exact.offload_placement = KEYHOLE_PLACE_AUTO;
  keyhole_budget_init(&exact.budget);
  exact.mode = KEYHOLE_MODE_EXACT;
  for (uint32_t i = 0; i < 3; ++i) add(i == 1 ? exact : coded(), 300);
  device_.faults.fails_together = true;
  Tensors t = tensors();
  EXPECT_EQ(extend(0, t), KEYHOLE_DEVICE_ERROR);
  expect_error_text("planted: a launch failed");
  EXPECT_EQ(t.statuses,
            (std::vector<keyhole_status>{KEYHOLE_DEVICE_ERROR, KEYHOLE_OK, KEYHOLE_DEVICE_ERROR}));
  ASSERT_OK(keyhole_session_synchronize(members_[1].session.get()));
  expect_answers(0, 1, t);
  // As after any launch that failed: nothing was appended, and there are no more steps.
  device_.faults.fails_together = false;
  for (const uint32_t i : {0U, 2U}) {
    EXPECT_EQ(layer_tokens(members_[i].session.get(), 0).total, 300U);
    EXPECT_EQ(keyhole_session_accept(members_[i].session.get(), 1, nullptr),
              KEYHOLE_INVALID_ARGUMENT);
    EXPECT_EQ(keyhole_session_synchronize(members_[i].session.get()), KEYHOLE_DEVICE_ERROR);
  }
  t = tensors();
  EXPECT_EQ(extend(0, t), KEYHOLE_DEVICE_ERROR);
  EXPECT_EQ(t.statuses,
            (std::vector<keyhole_status>{KEYHOLE_DEVICE_ERROR, KEYHOLE_OK, KEYHOLE_DEVICE_ERROR}));
  ASSERT_OK(keyhole_session_synchronize(members_[1].session.get()));
  expect_answers(0, 1, t);
}

TEST_F(StreamBatch, AMemberThatFailsLeavesOthersAlone) {
  for (uint32_t i = 0; i < 4; ++i) {
    keyhole_session_config c = coded();
    if (i == 2) c.max_tokens = 300;
    add(c, 300);
  }
  Tensors t = tensors();
  t.q[static_cast<size_t>(hq() * d()) + 3] = NAN;  // member 1's
  EXPECT_EQ(extend(0, t), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(t.statuses, (std::vector<keyhole_status>{KEYHOLE_OK, KEYHOLE_OK,
                                                     KEYHOLE_INVALID_ARGUMENT, KEYHOLE_OK}));
  EXPECT_EQ(device_.faults.launches_of_groups, std::vector<uint32_t>{3});
  // What is not finite is found when the host has it.
  EXPECT_EQ(keyhole_session_synchronize(members_[1].session.get()), KEYHOLE_NOT_FINITE);
  for (const uint32_t i : {0U, 3U}) {
    ASSERT_OK(keyhole_session_synchronize(members_[i].session.get()));
    expect_answers(0, i, t);
  }
}

TEST_F(StreamBatch, GraphsHoldLaunchesOfManySessions) {
  for (uint32_t i = 0; i < 3; ++i) add(coded(), 30 + 250 * i);
  members_[1].tokens = 2;
  std::vector<Tensors> all;
  for (uint32_t l = 0; l < engine_config_.layers; ++l) all.push_back(tensors());
  device_.stream.begin_capture();
  for (uint32_t l = 0; l < engine_config_.layers; ++l) ASSERT_OK(extend(l, all[l]));
  device_.stream.end_capture();
  EXPECT_EQ(device_.faults.launches_of_groups, std::vector<uint32_t>(engine_config_.layers, 3));
  for (uint32_t i = 0; i < unless_sanitized(150U, 10U); ++i) {
    renew(all);
    // One by one, or all at once.
    if (i % 2 == 0) {
      for (const Member& m : members_) ASSERT_OK(keyhole_session_announce(m.session.get()));
    } else {
      ASSERT_OK(announce_all(last_graph(0)));
    }
    device_.stream.launch_graph();
    for (const Member& m : members_) ASSERT_OK(keyhole_session_synchronize(m.session.get()));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      for (uint32_t j = 0; j < members_.size(); ++j) expect_answers(l, j, all[l]);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(StreamBatch, AGraphIsAnnouncedToAllSessionsOrToNone) {
  for (uint32_t i = 0; i < 3; ++i) {
    keyhole_session_config c = coded();
    if (i == 2) c.max_tokens = 302;
    add(c, 300);
  }
  std::vector<Tensors> all;
  for (uint32_t l = 0; l < engine_config_.layers; ++l) all.push_back(tensors());
  device_.stream.begin_capture();
  for (uint32_t l = 0; l < engine_config_.layers; ++l) ASSERT_OK(extend(l, all[l]));
  device_.stream.end_capture();
  const uint64_t graph = last_graph(0);
  EXPECT_EQ(last_graph(2), graph);
  EXPECT_EQ(announce_all(0), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_OK(keyhole_session_announce_batch(nullptr, 0, 0));
  EXPECT_EQ(keyhole_session_announce_batch(nullptr, 1, graph), KEYHOLE_INVALID_ARGUMENT);
  std::vector<keyhole_session*> none{members_[0].session.get(), nullptr};
  EXPECT_EQ(keyhole_session_announce_batch(none.data(), 2, graph), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(announce_all(graph + 1000), KEYHOLE_INVALID_ARGUMENT);
  round();
  round();
  if (HasFatalFailure()) return;
  EXPECT_EQ(announce_all(graph), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("max_tokens = 302");
  // The others wait for no launch.
  for (uint32_t i = 0; i < 2; ++i)
    ASSERT_OK(keyhole_session_synchronize(members_[i].session.get()));
  members_[2].tokens = 0;
  round();
  if (HasFatalFailure()) return;
  members_[2].tokens = 1;
  ASSERT_OK(keyhole_session_truncate(members_[2].session.get(), 300));
  members_[2].model.truncate(300);
  renew(all);
  ASSERT_OK(announce_all(graph));
  device_.stream.launch_graph();
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    for (uint32_t j = 0; j < members_.size(); ++j) {
      ASSERT_OK(keyhole_session_synchronize(members_[j].session.get()));
      expect_answers(l, j, all[l]);
    }
    if (HasFatalFailure()) return;
  }
  // A session that is there twice is in use.
  std::vector<keyhole_session*> twice{members_[1].session.get(), members_[1].session.get()};
  EXPECT_EQ(keyhole_session_announce_batch(twice.data(), 2, graph), KEYHOLE_BUSY);
  ASSERT_OK(keyhole_session_synchronize(members_[1].session.get()));
}

TEST_F(StreamBatch, ALaunchThatFailsInACaptureCostsTheGraphAlone) {
  for (uint32_t i = 0; i < 2; ++i) add(coded(), 300);
  Tensors t = tensors();
  device_.stream.begin_capture();
  device_.faults.fails_together = true;
  EXPECT_EQ(extend(0, t), KEYHOLE_DEVICE_ERROR);
  EXPECT_EQ(t.statuses, std::vector<keyhole_status>(2, KEYHOLE_DEVICE_ERROR));
  device_.stream.end_capture();
  device_.faults.fails_together = false;
  for (const Member& m : members_) {
    EXPECT_EQ(keyhole_session_announce(m.session.get()), KEYHOLE_INVALID_ARGUMENT);
  }
  round();
}

}  // namespace
}  // namespace keyhole::test
