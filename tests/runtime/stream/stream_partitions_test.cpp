// Stream steps whose device scores the partitions of tails and chooses among them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

class StreamPartitions : public StreamTest {};

TEST_F(StreamPartitions, ReadThePartitionsThatTheDeviceHasChosen) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  c.budget.min_keys = 4096;  // all of them: then nothing is left to estimates
  SessionPtr host = make_session(host_engine.get(), c);
  c.partitions = KEYHOLE_PLACE_DEVICE;
  SessionPtr stream = make_session(device.handle.get(), c);
  for (keyhole_session* s : {host.get(), stream.get()}) {
    prefill(s, 300, 8);
    ASSERT_OK(keyhole_build(s, nullptr, nullptr));
  }
  compare(host.get(), stream.get(), 150, 1e-5);
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  ASSERT_OK(keyhole_get_statistics(stream.get(), &s));
  EXPECT_GT(s.partition_bytes, 0U);
  EXPECT_GT(s.keys_opened, 0U);
  EXPECT_GE(s.append_blocks, 2U);
}

TEST_F(StreamPartitions, EveryKeyCountsOnceForAnyChoice) {
  // Keys of a partition that are all alike: their mean stands for them exactly, so any choice gives the truth.
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  SessionPtr exact = make_session(host_engine.get(), c);
  ASSERT_OK(keyhole_session_set_mode(exact.get(), KEYHOLE_MODE_EXACT, 0));
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.budget.min_keys = 8;
  c.partitions = KEYHOLE_PLACE_DEVICE;
  SessionPtr stream = make_session(device.handle.get(), c);
  const uint32_t n = 400;
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    Numbers numbers(40 + l);
    const size_t row = size_t{engine_config_.kv_heads} * engine_config_.head_dim;
    std::vector<float> k, v;
    std::vector<std::vector<float>> kinds;
    for (int i = 0; i < 6; ++i) kinds.push_back(numbers.many(2 * row));
    for (uint32_t t = 0; t < n; ++t) {
      const auto& kind = kinds[numbers.below(6)];
      k.insert(k.end(), kind.begin(), kind.begin() + static_cast<ptrdiff_t>(row));
      v.insert(v.end(), kind.begin() + static_cast<ptrdiff_t>(row), kind.end());
    }
    const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
    for (keyhole_session* s : {exact.get(), stream.get()}) {
      ASSERT_OK(keyhole_prefill(s, l, &tk, &tv, nullptr));
    }
  }
  ASSERT_OK(keyhole_build(stream.get(), nullptr, nullptr));
  for (uint32_t t = 0; t < 20; ++t) {
    Token next = token();
    for (float& x : next.q) x *= 0.25F;  // int8 codes of mean keys: an error of 1e-2 in a logit
    std::vector<float> out(next.q.size(), NAN);
    ASSERT_OK(enqueue(stream.get(), 0, next, out, nullptr));
    ASSERT_OK(keyhole_session_synchronize(stream.get()));
    const auto truth = attend_host(exact.get(), 0, next, nullptr);
    for (size_t i = 0; i < truth.size(); ++i) ASSERT_NEAR(out[i], truth[i], 0.05) << t;
  }
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  ASSERT_OK(keyhole_get_statistics(stream.get(), &s));
  EXPECT_LT(s.keys_attended, s.keys_offered);
}

TEST_F(StreamPartitions, PartitionsThatDoNotFitTheDevice) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = small_session();
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.budget.min_keys = 16;
  c.device_memory_limit = gpu::cuda_resident_bytes({2, 4, 2, 64, DType::f16, 4, 24, 16, {}}) + 1000;
  for (const keyhole_placement place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_DEVICE}) {
    c.partitions = place;
    SessionPtr s = make_session(device.handle.get(), c);
    prefill(s.get(), 200, 4);
    ASSERT_OK(keyhole_build(s.get(), nullptr, nullptr));
    const Token t = token();
    std::vector<float> out(t.q.size(), NAN);
    const keyhole_status status = enqueue(s.get(), 0, t, out, nullptr);
    if (place == KEYHOLE_PLACE_DEVICE) {
      EXPECT_EQ(status, KEYHOLE_OUT_OF_DEVICE_MEMORY);
      EXPECT_NE(std::string(keyhole_last_error()).find("device_memory_limit"), std::string::npos);
    } else {
      EXPECT_EQ(status, KEYHOLE_OK) << keyhole_last_error();
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      EXPECT_TRUE(std::isfinite(out[0]));
    }
  }
  c.device_memory_limit = 1000;
  keyhole_session* none = nullptr;
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, keyhole_session_create(device.handle.get(), &c, &none));
  EXPECT_EQ(none, nullptr);
}

TEST_F(StreamPartitions, HeadsThatWantMoreThanTheDeviceChoosesStayOnTheHost) {
  struct Messages {
    static void add(void* user, int32_t, const char* text) {
      auto* self = static_cast<Messages*>(user);
      const std::lock_guard lock(self->mutex);
      self->texts.emplace_back(text);
    }
    std::mutex mutex;
    std::vector<std::string> texts;
  } messages;
  keyhole_engine_config logging = engine_config_;
  logging.log = &Messages::add;
  logging.log_user = &messages;
  StreamEngine device(logging);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.max_tokens = 8192;
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.budget.min_keys = 4400;  // 1100 partitions, of 1400 or so; a device chooses 1024
  SessionPtr host = make_session(host_engine.get(), c);
  SessionPtr stream = make_session(device.handle.get(), c);
  for (keyhole_session* s : {host.get(), stream.get()}) {
    prefill(s, 5600, 8);
    ASSERT_OK(keyhole_build(s, nullptr, nullptr));
  }
  compare(host.get(), stream.get(), 3, 1e-5);
  const keyhole_statistics a = statistics(host.get()), b = statistics(stream.get());
  EXPECT_EQ(a.keys_attended, b.keys_attended);
  EXPECT_EQ(b.partition_bytes, 0U);
  const auto told = [&] {
    const std::lock_guard lock(messages.mutex);
    return std::count_if(messages.texts.begin(), messages.texts.end(), [](const std::string& s) {
      return s.find("at most 1024") != std::string::npos;
    });
  };
  EXPECT_EQ(told(), 1);
  // Of two heads of a layer, one stays and one goes.
  keyhole_budget budget;
  ASSERT_OK(
      (keyhole_budget_init(&budget), keyhole_session_get_budget(stream.get(), 0, 0, &budget)));
  budget.min_keys = 3000;
  for (keyhole_session* s : {host.get(), stream.get()}) {
    ASSERT_OK(keyhole_session_set_budget(s, 0, 1, &budget));
  }
  const Token t = token();
  std::vector<float> out(t.q.size(), NAN);
  ASSERT_OK(enqueue(stream.get(), 0, t, out, nullptr));
  ASSERT_OK(keyhole_session_synchronize(stream.get()));
  const auto truth = attend_host(host.get(), 0, t, nullptr);
  const size_t half = truth.size() / 2;  // the query heads of KV head 0, the one that stays
  for (size_t i = 0; i < half; ++i) ASSERT_NEAR(out[i], truth[i], 1e-5) << i;
  EXPECT_GT(statistics(stream.get()).partition_bytes, 0U);
  EXPECT_EQ(told(), 1) << "once";
}

}  // namespace
}  // namespace keyhole::test
