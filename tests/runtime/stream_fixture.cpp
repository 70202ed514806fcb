// The engine with the tests' device, and what tests of stream steps have in common.
#include "tests/runtime/stream_fixture.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "gpu/device.h"
#include "keyhole/stream.h"

namespace keyhole::test {

namespace {

/// The device of a StreamEngine: its parts are fakes whose launches go to the engine's stream.
class FakeGpu final : public gpu::Device {
 public:
  FakeGpu(StreamEngine& engine, bool slides)
      : engine_(&engine), slides_(slides), kernels_(&cpu::select_kernels(nullptr)) {}

  const std::string& name() const override { return name_; }
  bool has(gpu::DevicePart part) const override {
    switch (part) {
      case gpu::DevicePart::windows: return slides_;
      case gpu::DevicePart::prompts:
      case gpu::DevicePart::builds: return false;
      default: return true;
    }
  }

  std::unique_ptr<gpu::Resident> make_resident(
      const gpu::ResidentShape& shape,
      const std::shared_ptr<gpu::SessionOnDevice>& session) const override {
    session->claimed += gpu::cuda_resident_bytes(shape);
    if (session->memory_limit != 0 && session->claimed > session->memory_limit) {
      throw Error(Status::out_of_device_memory, "planted: no memory");
    }
    memory();
    return std::make_unique<FakeDevice>(shape, *kernels_, engine_->stream, engine_->faults);
  }
  std::unique_ptr<gpu::Codes> make_codes(gpu::Resident& resident,
                                         const gpu::CodesShape& shape) const override {
    auto& own = dynamic_cast<FakeDevice&>(resident);
    if (shape.layers != own.shape().layers) {
      throw Error(Status::invalid_argument, "planted: layers that the resident tokens have not");
    }
    if (gpu::codes_bytes(shape) > engine_->codes_room) {
      throw Error(Status::out_of_device_memory, "planted: no memory for codes");
    }
    memory();
    auto made = std::make_unique<FakeCodes>(shape, *kernels_, push(), wait(), engine_->pinned);
    made->on_call = command();
    made->timeout_ms = engine_->faults.timeout_ms;
    made->on_failure = [&own](const std::string& text) {
      own.note_failure(Status::cancelled, text);
    };
    engine_->codes = made.get();
    if (engine_->codes_rest) engine_->codes->rest();
    return made;
  }
  std::unique_ptr<gpu::Windows> make_windows(gpu::Resident&,
                                             const gpu::WindowsShape& shape) const override {
    if (!slides_) return nullptr;
    if (gpu::windows_bytes(shape) > engine_->windows_room) {
      throw Error(Status::out_of_device_memory, "planted: no memory for windows");
    }
    memory();
    auto made = std::make_unique<FakeWindows>(shape, *kernels_, push(), wait());
    made->on_call = command();
    made->fails = &engine_->faults.fails;
    return made;
  }
  std::unique_ptr<gpu::BlockedAttention> make_blocked(
      gpu::Resident&, const gpu::BlockedShape& shape) const override {
    auto made = std::make_unique<FakeBlocked>(shape, push(), wait());
    made->on_call = memory_or_command();
    made->calls = &engine_->blocked_calls;
    made->coded_calls = &engine_->coded_calls;
    made->chosen_blocks = &engine_->chosen_blocks;
    made->refuses_codes = &engine_->refuses_codes;
    made->doubts_codes = &engine_->doubts_codes;
    made->never_chooses = &engine_->never_chooses;
    made->doubted = &engine_->doubted;
    made->products_slowness = &engine_->products_slowness;
    return made;
  }
  std::unique_ptr<gpu::ListedAttention> make_listed(gpu::Resident&,
                                                    const gpu::BlockedShape& shape) const override {
    auto made = std::make_unique<FakeListed>(shape, *kernels_, push(), wait());
    made->on_call = memory_or_command();
    made->calls = &engine_->listed_calls;
    made->places = &engine_->listed_places;
    return made;
  }

  std::unique_ptr<gpu::PinnedMemory> make_pin() const override {
    auto made = std::make_unique<FakePinned>(&engine_->pinned_limit, &engine_->pin_pause_us);
    made->on_call = [e = engine_] { e->faults.on_call(DeviceCall::pinned); };
    engine_->pinned = made.get();
    return made;
  }
  std::unique_ptr<gpu::HostCopies> make_copies() const override {
    return std::make_unique<FakeCopies>(wait());
  }
  std::unique_ptr<gpu::RankStates> make_rank_states(
      const gpu::RankStatesShape& shape) const override {
    memory();
    auto made = std::make_unique<FakeRankStates>(shape, *kernels_, engine_->stream);
    made->on_call = command();
    return made;
  }

 private:
  void memory() const { engine_->faults.on_call(DeviceCall::memory); }
  [[nodiscard]] std::function<void(std::function<void()>)> push() const {
    return [e = engine_](std::function<void()> f) { e->stream.push(std::move(f)); };
  }
  [[nodiscard]] std::function<void()> wait() const {
    return [e = engine_] { e->stream.wait(); };
  }
  [[nodiscard]] std::function<void()> command() const {
    return [e = engine_] { e->faults.on_call(DeviceCall::command); };
  }
  [[nodiscard]] std::function<void(bool)> memory_or_command() const {
    return [e = engine_](bool memory) {
      e->faults.on_call(memory ? DeviceCall::memory : DeviceCall::command);
    };
  }

  StreamEngine* engine_;
  bool slides_;
  const cpu::Kernels* kernels_;
  std::string name_ = "test device";
};

}  // namespace

StreamEngine::StreamEngine(keyhole_engine_config c, uint32_t timeout_ms, bool slides) {
  c.timeout_ms = timeout_ms;
  faults.timeout_ms = timeout_ms;
  handle = std::make_unique<keyhole_engine>();
  handle->engine =
      std::make_shared<const runtime::Engine>(c, std::make_shared<const FakeGpu>(*this, slides));
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
    ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
  }
}

std::vector<float> StreamTest::attend_host(keyhole_session* s, uint32_t layer, const Token& t,
                                           float* lse) {
  std::vector<float> out(t.q.size());
  const keyhole_tensor q = tensor(t.q, {hq(), d()}), k = tensor(t.k, {hkv(), d()}),
                       v = tensor(t.v, {hkv(), d()}), o = tensor(out, {hq(), d()});
  EXPECT_OK(keyhole_session_attend(s, layer, &q, &k, &v, &o, lse));
  return out;
}

keyhole_status StreamTest::enqueue(keyhole_session* s, uint32_t layer, const Token& t,
                                   std::vector<float>& out, float* lse, bool halves) {
  const keyhole_tensor q = on_device(t.q, {hq(), d()}), k = on_device(t.k, {hkv(), d()}),
                       v = on_device(t.v, {hkv(), d()}), o = on_device(out, {hq(), d()});
  if (!halves) return keyhole_session_attend(s, layer, &q, &k, &v, &o, lse);
  const keyhole_status status = keyhole_session_attend_begin(s, layer, &q, &k, &v);
  return status != KEYHOLE_OK ? status : keyhole_session_attend_end(s, &o, lse);
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
      ASSERT_OK(keyhole_session_get_layer_tokens(host, l, &a));
      ASSERT_OK(keyhole_session_get_layer_tokens(stream, l, &b));
      ASSERT_EQ(0, std::memcmp(&a, &b, sizeof a)) << "token " << t << ", layer " << l;
    }
  }
}

}  // namespace keyhole::test
