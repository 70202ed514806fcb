// Sliding layers with tensors in device memory: steps, halves, graphs, several tokens, drafts, copies, and calls with tensors in
// host memory between them, beside attention in double precision over exactly their newest tokens.
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::test {
namespace {

class StreamWindows : public LayerConfig {
 protected:
  void slide(uint32_t layer, uint32_t window, uint32_t slack = KEYHOLE_AUTO) {
    if (layers_.empty()) own_layers();
    layers_[layer].window = window;
    layers_[layer].window_slack = slack;
  }

  /// A step of a layer that is under way on the stream, or several tokens.
  struct Turn {
    uint32_t layer = 0, n = 0;
    std::vector<float> q, k, v, out, lse;
  };
  Turn turn(uint32_t layer, uint32_t n) {
    Turn t{layer,
           n,
           numbers_.many(shape().q(n)),
           numbers_.many(shape().kv(n)),
           numbers_.many(shape().kv(n)),
           {},
           {}};
    t.out.assign(t.q.size(), NAN);
    t.lse.assign(static_cast<size_t>(n * hq()), NAN);
    return t;
  }
  keyhole_status extend_on_device(keyhole_session* s, Turn& t, const uint64_t* mask = nullptr) {
    const auto q = on_device(t.q, {t.n, hq(), d()}), k = on_device(t.k, {t.n, hkv(), d()}),
               v = on_device(t.v, {t.n, hkv(), d()}), o = on_device(t.out, {t.n, hq(), d()});
    return keyhole_extend(s, t.layer, &q, &k, &v, mask, &o, t.lse.data());
  }
  keyhole_status extend_on_host(keyhole_session* s, Turn& t) {
    const auto q = tensor(t.q, {t.n, hq(), d()}), k = tensor(t.k, {t.n, hkv(), d()}),
               v = tensor(t.v, {t.n, hkv(), d()}), o = tensor(t.out, {t.n, hq(), d()});
    return keyhole_extend(s, t.layer, &q, &k, &v, nullptr, &o, t.lse.data());
  }
  keyhole_status step_on_device(keyhole_session* s, Turn& t, bool halves) {
    const auto q = on_device(t.q, {hq(), d()}), k = on_device(t.k, {hkv(), d()}),
               v = on_device(t.v, {hkv(), d()}), o = on_device(t.out, {hq(), d()});
    if (!halves) return keyhole_attend(s, t.layer, &q, &k, &v, &o, t.lse.data());
    const keyhole_status status = keyhole_attend_begin(s, t.layer, &q, &k, &v);
    return status != KEYHOLE_OK ? status : keyhole_attend_end(s, &o, t.lse.data());
  }
  /// Appends the turn's tokens to the model, one after the other; each answer is that of the model.
  void expect_turn(Model& model, const Turn& t) {
    for (uint32_t i = 0; i < t.n; ++i) {
      SCOPED_TRACE("layer " + std::to_string(t.layer) + ", token " + std::to_string(i) + " of " +
                   std::to_string(t.n) + " after " + std::to_string(model.tokens(t.layer)));
      const auto part = [&](const std::vector<float>& x, size_t size) {
        return std::vector<float>(x.begin() + static_cast<ptrdiff_t>(i * size),
                                  x.begin() + static_cast<ptrdiff_t>((i + 1) * size));
      };
      model.append(t.layer, part(t.k, shape().kv(1)), part(t.v, shape().kv(1)));
      std::vector<double> lse;
      const auto o = model.attend_all(t.layer, part(t.q, shape().q(1)), lse);
      expect_near({part(t.out, shape().q(1)), part(t.lse, static_cast<size_t>(hq()))}, o, lse);
    }
  }
  /// A token of every layer on the stream, checked.
  void decode_on_device(keyhole_session* s, Model& model, bool halves = false) {
    std::vector<Turn> turns;
    for (uint32_t l = 0; l < engine_config_.layers; ++l) turns.push_back(turn(l, 1));
    for (Turn& t : turns) ASSERT_OK(step_on_device(s, t, halves));
    ASSERT_OK(keyhole_session_synchronize(s));
    for (const Turn& t : turns) expect_turn(model, t);
  }
  /// Attends without appending, on the stream.
  void expect_exact_on_device(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      Turn t = turn(l, 1);
      const auto q = on_device(t.q, {hq(), d()}), o = on_device(t.out, {hq(), d()});
      ASSERT_OK(keyhole_attend(s, l, &q, nullptr, nullptr, &o, t.lse.data()));
      ASSERT_OK(keyhole_session_synchronize(s));
      std::vector<double> lse;
      const auto truth = model.attend_all(l, t.q, lse);
      expect_near({t.out, t.lse}, truth, lse);
    }
  }
  void prefill_from_device(keyhole_session* s, Model& model, uint32_t n) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const Turn t = turn(l, n);
      const auto k = on_device(t.k, {n, hkv(), d()}), v = on_device(t.v, {n, hkv(), d()});
      ASSERT_OK(keyhole_prefill(s, l, &k, &v, nullptr));
      model.append(l, t.k, t.v);
    }
  }
  static void expect_text(const char* text) {
    EXPECT_NE(std::string(keyhole_last_error()).find(text), std::string::npos)
        << keyhole_last_error();
  }
};

TEST_F(StreamWindows, AttendExactlyTheirWindow) {
  const std::vector<float> sinks = {1, -3, 8, 0, 2, 15, -1, 4};
  for (const uint32_t window : {1U, 2U, 16U, 500U}) {
    for (const uint32_t slack : {0U, 1U, 40U}) {
      SCOPED_TRACE("window " + std::to_string(window) + ", slack " + std::to_string(slack));
      engine_config_.sink_logits = slack == 1 ? sinks.data() : nullptr;
      slide(1, window, slack);
      layers_[1].softcap = slack == 40 ? 5.0F : 0.0F;
      layers_[1].scale = 0.2F;
      StreamEngine device(engine_config_);
      const SessionPtr s = make_session(device.handle.get(), small_session());
      Model model(engine_config_);
      for (int i = 0; i < 3; ++i) decode_on_device(s.get(), model, i % 2 == 1);
      for (const uint32_t chunk : {1U, 30U, 200U}) {
        prefill_from_device(s.get(), model, chunk);
        expect_exact_on_device(s.get(), model);
        for (int i = 0; i < 5; ++i) decode_on_device(s.get(), model, i % 2 == 0);
        const keyhole_layer_tokens t = layer_tokens(s.get(), 1);
        EXPECT_EQ(t.total, model.tokens(1));
        EXPECT_EQ(t.window, std::min(window, model.tokens(1)));
        EXPECT_EQ(t.sink + t.indexed + t.pending, 0U);
      }
      for (int i = 0; i < 45; ++i) decode_on_device(s.get(), model);
      expect_all_exact(s.get(), model);
    }
  }
}

TEST_F(StreamWindows, RandomCalls) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("keyhole_device_windows_" + std::to_string(getpid()));
  for (uint64_t seed = 0; seed < unless_sanitized(40, 8); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Numbers random(seed);
    numbers_ = Numbers(seed + 1000);
    layers_.clear();
    engine_config_ = small_engine(1 + random.below(3));
    engine_config_.layers = 3;
    engine_config_.layer_configs = nullptr;
    engine_config_.kv_dtype = random.below(2) == 0 ? KEYHOLE_F16 : KEYHOLE_F32;
    const std::vector<float> sinks = numbers_.many(12);
    engine_config_.sink_logits = random.below(2) == 0 ? sinks.data() : nullptr;
    const uint32_t slack = 1 + random.below(30);
    slide(1, 1 + random.below(50), slack);
    if (random.below(2) == 0) slide(2, 1 + random.below(10), slack);
    layers_[1].softcap = random.below(2) == 0 ? 3.0F : 0.0F;
    StreamEngine device(engine_config_);
    keyhole_session_config c = small_session();
    c.max_tokens = random.below(2) * 400 + 60;
    SessionPtr s = make_session(device.handle.get(), c);
    Model model(engine_config_);
    for (int call = 0; call < 40; ++call) {
      const uint32_t tokens = model.tokens(0), room = c.max_tokens - tokens;
      switch (random.below(9)) {
        case 0:
          if (room != 0) prefill_model(s.get(), model, 1 + random.below(std::min(room, 90U)));
          break;
        case 1:
          if (room != 0) prefill_from_device(s.get(), model, 1 + random.below(std::min(room, 90U)));
          break;
        case 2: {
          if (tokens == 0) break;
          const uint32_t n = tokens - random.below(std::min(slack, tokens) + 1);
          if (keyhole_truncate(s.get(), n) != KEYHOLE_OK) {
            // Only tokens that an earlier truncation took the slack of.
            expect_text("sliding window");
            break;
          }
          model.truncate(n);
          break;
        }
        case 3: {
          keyhole_session* fork = nullptr;
          ASSERT_OK(keyhole_fork(s.get(), &fork));
          s.reset(fork);
          break;
        }
        case 4: {
          keyhole_session* loaded = nullptr;
          ASSERT_OK(keyhole_save(s.get(), path.c_str()));
          if (random.below(2) == 0) break;  // and it goes on itself
          ASSERT_OK(keyhole_load(device.handle.get(), path.c_str(), &loaded));
          s.reset(loaded);
          break;
        }
        case 5: {
          // Drafts, of which some are dropped where the slack allows.
          const uint32_t n = 1 + random.below(10);
          if (n > room) break;
          const bool on_host = random.below(3) == 0;
          std::vector<Turn> turns;
          for (uint32_t l = 0; l < 3; ++l) turns.push_back(turn(l, n));
          for (Turn& t : turns) {
            ASSERT_OK(on_host ? extend_on_host(s.get(), t) : extend_on_device(s.get(), t));
          }
          std::vector<uint32_t> ids;
          for (uint32_t i = 0; i < n; ++i) {
            if (random.below(3) != 0) ids.push_back(i);
          }
          const auto m = static_cast<uint32_t>(ids.size());
          const bool by_path = m != 0 && random.below(2) == 0;
          if (!by_path) std::iota(ids.begin(), ids.end(), 0U);
          const bool accepted =
              keyhole_session_accept(s.get(), m, by_path ? ids.data() : nullptr) == KEYHOLE_OK;
          if (!accepted) expect_text("sliding window");
          ASSERT_OK(keyhole_session_synchronize(s.get()));
          for (const Turn& t : turns) expect_turn(model, t);
          if (!accepted) break;
          model.truncate(tokens);
          for (const Turn& t : turns) {
            for (const uint32_t i : ids) {
              const auto at = static_cast<ptrdiff_t>(shape().kv(i));
              const auto end = static_cast<ptrdiff_t>(shape().kv(i + 1));
              model.append(t.layer, {t.k.begin() + at, t.k.begin() + end},
                           {t.v.begin() + at, t.v.begin() + end});
            }
          }
          break;
        }
        case 6:
          for (uint32_t i = random.below(20); i != 0 && model.tokens(0) < c.max_tokens; --i) {
            decode(s.get(), model);
          }
          break;
        default:
          for (uint32_t i = random.below(20); i != 0 && model.tokens(0) < c.max_tokens; --i) {
            decode_on_device(s.get(), model, random.below(2) == 0);
          }
      }
      if (model.tokens(0) == 0) continue;
      for (uint32_t l = 0; l < 3; ++l) {
        ASSERT_EQ(layer_tokens(s.get(), l).total, model.tokens(l)) << "call " << call;
      }
      if (random.below(4) == 0) {
        expect_all_exact(s.get(), model);
      } else {
        expect_exact_on_device(s.get(), model);
      }
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace keyhole::test
