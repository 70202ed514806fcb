// keyhole_session_announce_batch with the n-th allocation failing, on the device of tests/runtime/stream_device.h: all
// sessions are told of the launch, or none, and once all that grows has grown it allocates nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/stream.h"
#include "tests/runtime/codes_fixture.h"
#include "tests/runtime/faults/planted_faults.h"

namespace keyhole::test {
namespace {

class AnnounceFault : public StreamCodes {
 protected:
  static constexpr uint32_t kMembers = 3;

  void SetUp() override {
    for (uint32_t i = 0; i < kMembers; ++i) {
      sessions_.push_back(make_session(device_.handle.get(), coded()));
      handles_.push_back(sessions_.back().get());
      models_.emplace_back(engine_config_);
      prefill(handles_[i], models_[i], 300 + 40 * i);
      ASSERT_OK(keyhole_session_synchronize(handles_[i]));
    }
    tokens_.resize(engine_config_.layers);
    for (Tensors& t : tokens_) {
      draw(t);
      t.out.assign(t.q.size(), NAN);
      t.lse.assign(kMembers * static_cast<size_t>(hq()), NAN);
    }
    device_.stream.begin_capture();
    const uint32_t start[kMembers + 1] = {0, 1, 2, 3};
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      Tensors& t = tokens_[l];
      const keyhole_tensor q = on_device(t.q, {kMembers, hq(), d()}),
                           k = on_device(t.k, {kMembers, hkv(), d()}),
                           v = on_device(t.v, {kMembers, hkv(), d()}),
                           out = on_device(t.out, {kMembers, hq(), d()});
      ASSERT_OK(keyhole_session_extend_batch(handles_.data(), kMembers, l, &q, &k, &v, start, &out,
                                             t.lse.data(), nullptr));
    }
    device_.stream.end_capture();
    ASSERT_OK(keyhole_session_get_graph(handles_[0], &graph_));
  }

  /// Of a layer, a token of each session; a graph reads them where they are.
  struct Tensors {
    std::vector<float> q, k, v, out, lse;
  };
  void draw(Tensors& t) {
    const auto renew = [&](std::vector<float>& rows, int64_t heads) {
      const std::vector<float> fresh = numbers_.many(kMembers * static_cast<size_t>(heads * d()));
      rows.resize(fresh.size());
      std::copy(fresh.begin(), fresh.end(), rows.begin());
    };
    renew(t.q, hq());
    renew(t.k, hkv());
    renew(t.v, hkv());
  }
  keyhole_status announce() {
    return under_fault(
        [&] { return keyhole_session_announce_batch(handles_.data(), kMembers, graph_); });
  }
  void launch() {
    device_.stream.launch_graph();
    for (keyhole_session* s : handles_) ASSERT_OK(keyhole_session_synchronize(s));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      for (uint32_t i = 0; i < kMembers; ++i) {
        const auto part = [&](const std::vector<float>& rows, int64_t width) {
          const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(i) * width;
          return std::vector<float>(begin, begin + width);
        };
        const Tensors& t = tokens_[l];
        models_[i].append(l, part(t.k, hkv() * d()), part(t.v, hkv() * d()));
        expect_truth(models_[i], l, part(t.q, hq() * d()), part(t.out, hq() * d()),
                     part(t.lse, hq()));
      }
    }
  }

  StreamEngine device_{engine_config_};
  std::vector<SessionPtr> sessions_;
  std::vector<keyhole_session*> handles_;
  std::vector<Model> models_;
  std::vector<Tensors> tokens_;
  uint64_t graph_ = 0;
};

TEST_F(AnnounceFault, AllSessionsAreToldOrNone) {
  uint32_t failed = 0, without = 0;
  // Beyond a flush of every window, which allocates.
  for (uint32_t round = 0; round < kCodeBlock; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    for (Tensors& t : tokens_) draw(t);
    bool hit = true;
    for (int64_t n = 0; hit; ++n) {
      Planted::plant_here(Fault::allocation, n);
      const keyhole_status status = announce();
      hit = Planted::lift();
      if (status == KEYHOLE_OK) {
        without += !hit && n == 0 ? 1 : 0;
        break;
      }
      ASSERT_EQ(status, KEYHOLE_OUT_OF_MEMORY) << keyhole_last_error();
      ASSERT_TRUE(hit);
      ++failed;
      // Who had been told would wait for a launch that does not come.
      for (keyhole_session* s : handles_) ASSERT_OK(keyhole_session_synchronize(s));
    }
    launch();
    if (HasFailure()) return;
  }
  EXPECT_GT(failed, 0U);
  EXPECT_GT(without, kCodeBlock - 10);
}

}  // namespace
}  // namespace keyhole::test
