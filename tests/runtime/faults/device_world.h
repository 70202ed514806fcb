// A session on the device of tests/runtime/stream_device.h, which can be told to refuse a call, beside the
// double-precision model of its tokens.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/stream_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {

/// How a session attends.
struct Way {
  const char* name;
  const char* spec;
  keyhole_placement place;
  bool has_codes = false, has_partitions = false;
  bool slides = false;  ///< layer 1
};
inline void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

/// The call of the device that is refused, and how many of its kind come before it; negative: none is refused.
struct Refusal {
  DeviceCall kind = DeviceCall::memory;
  std::atomic<int64_t> left{-1}, hits{0};

  void plant(DeviceCall refused, int64_t calls_before) {
    kind = refused;
    hits = 0;
    left = calls_before;
  }
  /// Ends the refusal; returns whether it has come.
  bool lift() {
    left = -1;
    return hits != 0;
  }
  void on_call(DeviceCall call) {
    if (left.load() < 0 || call != kind || left.fetch_sub(1) != 0) return;
    ++hits;
    throw Error(status(), "planted: the device refuses");
  }
  [[nodiscard]] Status status() const {
    if (kind == DeviceCall::memory) return Status::out_of_device_memory;
    return kind == DeviceCall::pinned ? Status::out_of_memory : Status::device_error;
  }
};

/// A session with a prompt, steps and an index, beside the double-precision model of its tokens.
class DeviceWorld {
 public:
  explicit DeviceWorld(const Way& way) : way_(way) {
    device_.faults.on_call = [this](DeviceCall call) { refusal.on_call(call); };
    session_ = make_session(device_.handle.get(), config());
    for (uint32_t l = 0; l < ec_.layers; ++l) EXPECT_OK(prefill(l, way.has_codes ? 600 : 200));
    EXPECT_OK(build());
    for (int i = 0; i < 3; ++i) EXPECT_OK(stream_token());
  }

  [[nodiscard]] keyhole_session_config config() const {
    keyhole_session_config sc = small_session();
    sc.index = way_.spec;
    sc.offload_placement = way_.place;
    sc.tail_partition = 4;
    sc.append_block = 16;
    sc.append_mode = KEYHOLE_APPEND_IN_STEP;
    sc.budget = budget();
    if (way_.has_codes) sc.flush_block = kCodeBlock;
    return sc;
  }
  /// A budget with which all keys are read, or the device's codes, which are exact, stand for them.
  [[nodiscard]] keyhole_budget budget() const {
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.top_k = way_.has_codes ? 16 : 4096;
    if (way_.has_codes) b.tail = KEYHOLE_TAIL_CODES;
    if (way_.has_partitions) {
      b.attend = KEYHOLE_ATTEND_NONE;
      b.tail = KEYHOLE_TAIL_CENTROID;
      b.min_keys = 4096;
    }
    return b;
  }

  // Calls. A call notes at its beginning in maybe_ what it may append, until the next one begins.

  keyhole_status prefill(uint32_t layer, uint32_t n) {
    const auto k = numbers_.many(shape_.kv(n)), v = numbers_.many(k.size()),
               q = numbers_.many(shape_.q(n));
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d}), tv = tensor(v, {n, shape_.hkv, shape_.d}),
               tq = tensor(q, {n, shape_.hq, shape_.d});
    maybe_ = model_;
    maybe_.append(layer, k, v);
    return taken(keyhole_session_append(session(), layer, &tk, &tv, &tq));
  }
  keyhole_status host_step(uint32_t layer) {
    const Rows r = rows();
    maybe_ = model_;
    maybe_.append(layer, r.k, r.v);
    std::vector<float> o(shape_.q(1));
    const auto tk = tensor(r.k, {shape_.hkv, shape_.d}), tv = tensor(r.v, {shape_.hkv, shape_.d}),
               tq = tensor(r.q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
    return taken(keyhole_session_attend(session(), layer, &tq, &tk, &tv, &out, nullptr));
  }
  /// Takes a token through all layers on the stream. A layer's step that is refused is made again, once.
  keyhole_status stream_token() {
    maybe_ = model_;
    keyhole_status first = KEYHOLE_OK;
    steps_.clear();
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      steps_.push_back(rows());
      maybe_.append(l, steps_.back().k, steps_.back().v);
      keyhole_status status = enqueue(l, steps_.back());
      if (status == KEYHOLE_OUT_OF_MEMORY || status == KEYHOLE_OUT_OF_DEVICE_MEMORY) {
        first = status;
        status = enqueue(l, steps_.back());
      }
      if (status != KEYHOLE_OK) return status;
    }
    const keyhole_status status = keyhole_session_synchronize(session());
    if (status == KEYHOLE_DEVICE_ERROR) return status;
    model_ = maybe_;
    return first != KEYHOLE_OK ? first : status;
  }
  /// Takes tokens through all layers by a graph that is captured, announced and launched.
  keyhole_status graph() {
    maybe_ = model_;
    steps_.clear();
    if (const auto status = keyhole_session_synchronize(session())) return status;
    device_.stream.begin_capture();
    keyhole_status status = KEYHOLE_OK;
    for (uint32_t l = 0; l < ec_.layers && status == KEYHOLE_OK; ++l) {
      steps_.push_back(rows());
      maybe_.append(l, steps_.back().k, steps_.back().v);
      status = enqueue(l, steps_.back());
    }
    device_.stream.end_capture();
    if (status == KEYHOLE_OK) status = keyhole_session_announce(session());
    if (status != KEYHOLE_OK) {
      maybe_ = model_;
      return status;
    }
    device_.stream.launch_graph();
    status = keyhole_session_synchronize(session());
    if (status != KEYHOLE_DEVICE_ERROR) model_ = maybe_;
    return status;
  }
  /// Fills each window until only two more tokens fit.
  keyhole_status fill_windows() {
    const keyhole_session_config c = config();
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const uint32_t held = layer_tokens(session(), l).window + 2;
      if (held >= c.window + c.flush_block) continue;
      if (const auto status = prefill(l, c.window + c.flush_block - held)) return status;
    }
    return KEYHOLE_OK;
  }
  keyhole_status build() {
    maybe_ = model_;
    return keyhole_session_build(session(), nullptr, nullptr);
  }
  keyhole_status truncate(uint32_t n) {
    maybe_ = model_;
    maybe_.truncate(n);
    const keyhole_status status = keyhole_session_truncate(session(), n);
    if (status == KEYHOLE_OK) model_ = maybe_;
    return status;
  }
  keyhole_status call(const std::function<keyhole_status(keyhole_session*)>& body) {
    maybe_ = model_;
    return body(session());
  }
  /// Goes on with a copy through memory or a file, which has all tokens.
  keyhole_status copy(bool through_file) {
    maybe_ = model_;
    keyhole_session* made = nullptr;
    keyhole_status status = KEYHOLE_OK;
    if (through_file) {
      const std::string path = folder_ / "session";
      status = keyhole_session_save(session(), path.c_str());
      EXPECT_TRUE(status == KEYHOLE_OK || way_.slides) << "what it saves lies in host memory";
      if (status == KEYHOLE_OK) {
        status = keyhole_session_load(device_.handle.get(), path.c_str(), nullptr, &made);
      }
    } else {
      status = keyhole_session_fork(session(), &made);
    }
    (void)refusal.lift();
    const SessionPtr owner(made);
    EXPECT_EQ(made != nullptr, status == KEYHOLE_OK);
    if (made != nullptr) check(made);
    return status;
  }
  keyhole_status create() {
    maybe_ = model_;
    const keyhole_session_config sc = config();
    keyhole_session* made = nullptr;
    const keyhole_status status = keyhole_session_create(device_.handle.get(), &sc, &made);
    const SessionPtr owner(made);
    EXPECT_EQ(made != nullptr, status == KEYHOLE_OK);
    return status;
  }

  // Checks of what has become of the session:

  [[nodiscard]] std::string settings() {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    EXPECT_OK(keyhole_session_get_config(session(), &c));
    keyhole_budget b;
    keyhole_budget_init(&b);
    EXPECT_OK(keyhole_session_get_budget(session(), 0, 1, &b));
    return std::string(c.index) + " mode " + std::to_string(c.mode) + " k " +
           std::to_string(c.budget.top_k) + "; " + std::to_string(b.top_k) + " " +
           std::to_string(b.attend) + " " + std::to_string(b.tail) + " " +
           std::to_string(b.min_keys);
  }
  /// Checks tokens, and answers in host memory and on the stream.
  void check() { check(session()); }
  void check(keyhole_session* s) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      ASSERT_EQ(layer_tokens(s, l).total, model_.tokens(l));
      expect_truth(s, l, model_, model_.tokens(l));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  /// Checks a session whose device has failed: a copy has, for each layer, the beginning of its tokens.
  void check_failed() {
    keyhole_session* const s = session();
    EXPECT_EQ(keyhole_session_build(s, nullptr, nullptr), KEYHOLE_DEVICE_ERROR);
    EXPECT_EQ(keyhole_session_synchronize(s), KEYHOLE_DEVICE_ERROR);
    EXPECT_EQ(keyhole_session_truncate(s, 0), KEYHOLE_DEVICE_ERROR);
    const SessionPtr owner = fork_of(s);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const uint32_t total = layer_tokens(owner.get(), l).total;
      const uint32_t before = model_.tokens(l), after = maybe_.tokens(l);
      ASSERT_GE(total, std::min(before, after));
      ASSERT_LE(total, std::max(before, after));
      if (total != 0) expect_truth(owner.get(), l, before < after ? maybe_ : model_, total);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  [[nodiscard]] bool has_failed() {
    const Rows r = rows();
    std::vector<float> o(shape_.q(1));
    const auto q = tensor(r.q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
    return keyhole_session_attend(session(), 0, &q, nullptr, nullptr, &out, nullptr) ==
           KEYHOLE_DEVICE_ERROR;
  }
  [[nodiscard]] keyhole_session* session() { return session_.get(); }
  [[nodiscard]] uint32_t tokens() const { return model_.tokens(0); }

  Refusal refusal;

 private:
  struct Rows {
    std::vector<float> q, k, v, o;
  };
  [[nodiscard]] Rows rows() {
    return {numbers_.many(shape_.q(1)), numbers_.many(shape_.kv(1)), numbers_.many(shape_.kv(1)),
            std::vector<float>(shape_.q(1))};
  }
  keyhole_status taken(keyhole_status status) {
    if (status == KEYHOLE_OK) model_ = maybe_;
    return status;
  }
  keyhole_status enqueue(uint32_t layer, const Rows& r) {
    const auto k = on_device(r.k, {shape_.hkv, shape_.d}),
               v = on_device(r.v, {shape_.hkv, shape_.d}),
               q = on_device(r.q, {shape_.hq, shape_.d}), o = on_device(r.o, {shape_.hq, shape_.d});
    return keyhole_session_attend(session(), layer, &q, &k, &v, &o, nullptr);
  }
  void expect_truth(keyhole_session* s, uint32_t layer, const Model& model, uint32_t tokens) {
    const auto q = numbers_.many(shape_.q(1));
    std::vector<double> lse;
    const auto o = model.attend(layer, q, lse, [&](uint32_t t) { return t < tokens; });
    for (const keyhole_memory memory : {KEYHOLE_HOST, KEYHOLE_DEVICE}) {
      Answer a{std::vector<float>(shape_.q(1)), std::vector<float>(ec_.q_heads)};
      auto tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(a.o, {shape_.hq, shape_.d});
      tq.memory = out.memory = memory;
      const auto attend = [&] {
        return keyhole_session_attend(s, layer, &tq, nullptr, nullptr, &out, a.lse.data());
      };
      keyhole_status status = attend();
      // Pinning that goes on beside other work fails where that is waited for.
      if (status == KEYHOLE_OUT_OF_MEMORY && refusal.kind == DeviceCall::pinned) status = attend();
      ASSERT_EQ(status, KEYHOLE_OK) << keyhole_last_error();
      ASSERT_OK(keyhole_session_synchronize(s));
      // The host's codes have few bits.
      const bool is_coarse = way_.has_codes && statistics(s).code_layers < ec_.layers;
      expect_near(a, o, lse, is_coarse ? 2.0 : 1e-4);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  keyhole_engine_config engine_config() {
    keyhole_engine_config c = small_engine(2);
    if (!way_.slides) return c;
    layers_.resize(c.layers);
    for (keyhole_layer_config& l : layers_) keyhole_layer_config_init(&l, &c);
    layers_[1].window = 100;
    layers_[1].window_slack = 4096;  // so that it can be cut to any length
    c.layer_configs = layers_.data();
    c.layer_count = c.layers;
    return c;
  }

  Way way_;
  std::vector<keyhole_layer_config> layers_;
  keyhole_engine_config ec_ = engine_config();
  Numbers numbers_{31};
  Model model_{ec_}, maybe_{ec_};
  Shape shape_{ec_};
  TemporaryFolder folder_;
  std::vector<Rows> steps_;  ///< of the stream
  StreamEngine device_{ec_, 120000};
  SessionPtr session_;
};

}  // namespace keyhole::test
