// The engine with the tests' device, and what tests of stream steps have in common.
#include "tests/runtime/stream_fixture.h"

#include <cmath>
#include <cstring>
#include <utility>

namespace keyhole::test {

StreamEngine::StreamEngine(keyhole_engine_config c, uint32_t timeout_ms, bool slides) {
  c.timeout_ms = timeout_ms;
  faults.timeout_ms = timeout_ms;
  const cpu::Kernels& kernels = cpu::select_kernels(nullptr);
  runtime::StreamDevice device;
  device.name = "test device";
  device.make_resident = [this, &kernels](const gpu::ResidentShape& shape,
                                          const std::shared_ptr<gpu::SessionOnDevice>& session) {
    session->claimed += gpu::cuda_resident_bytes(shape);
    if (session->memory_limit != 0 && session->claimed > session->memory_limit) {
      throw Error(Status::out_of_device_memory, "planted: no memory");
    }
    faults.on_call(DeviceCall::memory);
    return std::make_unique<FakeDevice>(shape, kernels, stream, faults);
  };
  device.make_codes = [this, &kernels](gpu::Resident& resident, const gpu::CodesShape& shape) {
    if (shape.layers != static_cast<FakeDevice&>(resident).shape().layers) {
      throw Error(Status::invalid_argument, "planted: layers that the resident tokens have not");
    }
    if (gpu::codes_bytes(shape) > codes_room) {
      throw Error(Status::out_of_device_memory, "planted: no memory for codes");
    }
    faults.on_call(DeviceCall::memory);
    auto made = std::make_unique<FakeCodes>(
        shape, kernels, [this](std::function<void()> f) { stream.push(std::move(f)); },
        [this] { stream.wait(); }, pinned);
    made->on_call = [this] { faults.on_call(DeviceCall::command); };
    made->timeout_ms = faults.timeout_ms;
    made->on_failure = [&resident](const std::string& text) {
      static_cast<FakeDevice&>(resident).note_failure(Status::cancelled, text);
    };
    codes = made.get();
    if (codes_rest) codes->rest();
    return made;
  };
  device.make_blocked = [this](gpu::Resident&, const gpu::BlockedShape& shape) {
    auto made = std::make_unique<FakeBlocked>(
        shape, [this](std::function<void()> f) { stream.push(std::move(f)); },
        [this] { stream.wait(); });
    made->on_call = [this](bool memory) {
      faults.on_call(memory ? DeviceCall::memory : DeviceCall::command);
    };
    made->calls = &blocked_calls;
    return made;
  };
  device.make_listed = [this, &kernels](gpu::Resident&, const gpu::BlockedShape& shape) {
    auto made = std::make_unique<FakeListed>(
        shape, kernels, [this](std::function<void()> f) { stream.push(std::move(f)); },
        [this] { stream.wait(); });
    made->on_call = [this](bool memory) {
      faults.on_call(memory ? DeviceCall::memory : DeviceCall::command);
    };
    made->calls = &listed_calls;
    made->places = &listed_places;
    return made;
  };
  if (slides) {
    device.make_windows = [this, &kernels](gpu::Resident&, const gpu::WindowsShape& shape) {
      if (gpu::windows_bytes(shape) > windows_room) {
        throw Error(Status::out_of_device_memory, "planted: no memory for windows");
      }
      faults.on_call(DeviceCall::memory);
      auto made = std::make_unique<FakeWindows>(
          shape, kernels, [this](std::function<void()> f) { stream.push(std::move(f)); },
          [this] { stream.wait(); });
      made->on_call = [this] { faults.on_call(DeviceCall::command); };
      made->fails = &faults.fails;
      return made;
    };
  }
  device.make_rank_states = [this, &kernels](const gpu::RankStatesShape& shape) {
    faults.on_call(DeviceCall::memory);
    auto made = std::make_unique<FakeRankStates>(shape, kernels, stream);
    made->on_call = [this] { faults.on_call(DeviceCall::command); };
    return made;
  };
  device.make_copies = [this] { return std::make_unique<FakeCopies>([this] { stream.wait(); }); };
  device.make_pin = [this] {
    auto made = std::make_unique<FakePinned>(&pinned_limit, &pin_pause_us);
    made->on_call = [this] { faults.on_call(DeviceCall::pinned); };
    pinned = made.get();
    return made;
  };
  handle = std::make_unique<keyhole_engine>();
  handle->engine = std::make_shared<const runtime::Engine>(c, std::move(device));
}

Token StreamTest::token() {
  return {numbers_.many(size_t{engine_config_.q_heads} * engine_config_.head_dim),
          numbers_.many(size_t{engine_config_.kv_heads} * engine_config_.head_dim),
          numbers_.many(size_t{engine_config_.kv_heads} * engine_config_.head_dim)};
}

void StreamTest::prefill(keyhole_session* s, uint32_t n, uint64_t seed) {
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    Numbers numbers(seed + l);
    const auto k = numbers.many(size_t{n} * engine_config_.kv_heads * engine_config_.head_dim);
    const auto v = numbers.many(k.size());
    const auto q = numbers.many(size_t{n} * engine_config_.q_heads * engine_config_.head_dim);
    const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
    const keyhole_tensor tq = tensor(q, {n, hq(), d()});
    ASSERT_OK(keyhole_prefill(s, l, &tk, &tv, &tq));
  }
}

std::vector<float> StreamTest::attend_host(keyhole_session* s, uint32_t layer, const Token& t,
                                           float* lse) {
  std::vector<float> out(t.q.size());
  const keyhole_tensor q = tensor(t.q, {hq(), d()}), k = tensor(t.k, {hkv(), d()}),
                       v = tensor(t.v, {hkv(), d()}), o = tensor(out, {hq(), d()});
  EXPECT_OK(keyhole_attend(s, layer, &q, &k, &v, &o, lse));
  return out;
}

keyhole_status StreamTest::enqueue(keyhole_session* s, uint32_t layer, const Token& t,
                                   std::vector<float>& out, float* lse, bool halves) {
  const keyhole_tensor q = on_device(t.q, {hq(), d()}), k = on_device(t.k, {hkv(), d()}),
                       v = on_device(t.v, {hkv(), d()}), o = on_device(out, {hq(), d()});
  if (!halves) return keyhole_attend(s, layer, &q, &k, &v, &o, lse);
  const keyhole_status status = keyhole_attend_begin(s, layer, &q, &k, &v);
  return status != KEYHOLE_OK ? status : keyhole_attend_end(s, &o, lse);
}

void StreamTest::compare(keyhole_session* host, keyhole_session* stream, uint32_t tokens,
                         double tolerance) {
  const uint32_t layers = engine_config_.layers;
  for (uint32_t t = 0; t < tokens; ++t) {
    std::vector<Token> rows;
    std::vector<std::vector<float>> out(layers), lse(layers);
    for (uint32_t l = 0; l < layers; ++l) {
      rows.push_back(token());
      out[l].assign(rows[l].q.size(), NAN);
      lse[l].assign(engine_config_.q_heads, NAN);
    }
    // The whole token is enqueued before the caller waits.
    for (uint32_t l = 0; l < layers; ++l) {
      ASSERT_OK(enqueue(stream, l, rows[l], out[l], lse[l].data(), t % 2 == 1));
    }
    ASSERT_OK(keyhole_session_synchronize(stream));
    for (uint32_t l = 0; l < layers; ++l) {
      std::vector<float> host_lse(engine_config_.q_heads);
      const auto truth = attend_host(host, l, rows[l], host_lse.data());
      for (size_t i = 0; i < truth.size(); ++i) {
        ASSERT_NEAR(out[l][i], truth[i], tolerance) << "token " << t << ", layer " << l;
      }
      for (uint32_t h = 0; h < engine_config_.q_heads; ++h) {
        ASSERT_NEAR(lse[l][h], host_lse[h], tolerance) << "token " << t << ", layer " << l;
      }
      keyhole_layer_tokens a, b;
      keyhole_layer_tokens_init(&a);
      keyhole_layer_tokens_init(&b);
      ASSERT_OK(keyhole_get_layer_tokens(host, l, &a));
      ASSERT_OK(keyhole_get_layer_tokens(stream, l, &b));
      ASSERT_EQ(0, std::memcmp(&a, &b, sizeof a)) << "token " << t << ", layer " << l;
    }
  }
}

}  // namespace keyhole::test
