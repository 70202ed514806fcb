// Audits of steps on a stream beside exact attention in double precision, on a device made of a thread that can answer
// wrongly: what they find, that nothing is audited twice or never, and that a session may be changed, copied and
// destroyed with audits under way.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/relative_error.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

#ifdef KEYHOLE_SANITIZED
constexpr int kCalls = 12;
#else
constexpr int kCalls = 40;
#endif
constexpr uint32_t kPatienceMs = 60000;  // a block of codes takes seconds under a sanitizer

keyhole_audit audit_of(keyhole_session* s, uint32_t layer = KEYHOLE_ALL,
                       uint32_t kv_head = KEYHOLE_ALL) {
  keyhole_audit a;
  keyhole_audit_init(&a);
  EXPECT_OK(keyhole_session_get_audit(s, layer, kv_head, &a));
  return a;
}

class StreamAudit : public StreamTest {
 protected:
  static keyhole_session_config coded(double share) {
    keyhole_session_config c = small_session();
    c.index = "codes:k=2,v=2";
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.flush_block = kCodeBlock;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    c.audit_share = share;
    return c;
  }
  static keyhole_session_config searched(double share) {
    keyhole_session_config c = small_session();
    c.budget.top_k = 3;
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    c.audit_share = share;
    return c;
  }
  [[nodiscard]] uint32_t group() const { return engine_config_.q_heads / engine_config_.kv_heads; }
  void prefill_model(keyhole_session* s, Model& model, uint32_t n) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      prefill_both(s, model, Shape(engine_config_), l, n, numbers_);
    }
  }
  /// A step of all layers in device memory, not waited for.
  void step(keyhole_session* s, bool halves = false) {
    // The stream may still use those of the steps before.
    kept_.push_back({std::move(tokens_), std::move(out_), std::move(lse_)});
    tokens_.clear();
    for (uint32_t l = 0; l < engine_config_.layers; ++l) tokens_.push_back(small_token());
    out_.assign(tokens_.size(), std::vector<float>(tokens_[0].q.size(), NAN));
    lse_.assign(tokens_.size(), std::vector<float>(engine_config_.q_heads, NAN));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      ASSERT_OK(enqueue(s, l, tokens_[l], out_[l], lse_[l].data(), halves));
    }
  }
  Token small_token() {
    Token t = token();
    for (float& x : t.q) x *= 0.125F;  // keeps one key from taking all
    return t;
  }
  /// What audits of one step of all heads should say of the outputs that the step wrote.
  void expect_found(keyhole_session* s, const Model& model, const std::vector<Token>& tokens,
                    const std::vector<std::vector<float>>& out,
                    const std::vector<std::vector<float>>& lse) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      std::vector<double> true_lse;
      const auto truth = model.attend_all(l, tokens[l].q, true_lse);
      for (uint32_t kv = 0; kv < engine_config_.kv_heads; ++kv) {
        double error = 0.0, worst = 0.0, mass = 0.0;
        for (uint32_t g = 0; g < group(); ++g) {
          const uint32_t h = kv * group() + g;
          const double one = error_of(truth, out[l], h);
          error += one / group();
          worst = std::max(worst, one);
          mass += std::min(1.0, std::exp(lse[l][h] - true_lse[h])) / group();
        }
        const keyhole_audit a = audit_of(s, l, kv);
        ASSERT_EQ(a.audits, group()) << "layer " << l << ", KV head " << kv;
        ASSERT_TRUE(std::isfinite(error));  // limits below grow with it
        EXPECT_NEAR(a.error_mean, error, 2e-5 + 1e-3 * error);
        EXPECT_NEAR(a.error_max, worst, 2e-5 + 1e-3 * worst);
        EXPECT_LE(a.error_p95, a.error_p99);
        EXPECT_LE(a.error_p99, a.error_max);
        EXPECT_NEAR(a.mass_mean, mass, 1e-4);
        EXPECT_NEAR(a.missing_mean, 1.0 - mass, 1e-4);
        EXPECT_EQ(a.recall, 0.0) << "the device does not say which rows it read";
        EXPECT_EQ(a.estimated_missing_mean, 0.0);
        EXPECT_GT(a.seconds, 0.0);
      }
    }
  }
  [[nodiscard]] double error_of(const std::vector<double>& truth, const std::vector<float>& out,
                                uint32_t head) const {
    const size_t begin = size_t{head} * engine_config_.head_dim;
    return relative_error(&out[begin], &truth[begin], engine_config_.head_dim);
  }

  struct Memory {
    std::vector<Token> tokens;
    std::vector<std::vector<float>> out, lse;
  };
  std::vector<Memory> kept_;
  std::vector<Token> tokens_;
  std::vector<std::vector<float>> out_, lse_;
};

/// Answers that are off by another share in every layer and head, the more the higher.
void plant_errors(FakeFaults& faults, const keyhole_engine_config& c) {
  faults.on_answer = [c](uint32_t layer, uint32_t sequence, float* o, float* lse) {
    for (uint32_t h = 0; h < c.q_heads; ++h) {
      const float share = 0.01F * static_cast<float>(h + c.q_heads * layer + sequence % 3);
      for (uint32_t j = 0; j < c.head_dim; ++j) {
        o[h * c.head_dim + j] *= j % 2 == 0 ? 1.0F + share : 1.0F - share;
      }
      lse[h] -= share;
    }
  };
}

TEST_F(StreamAudit, FiguresOfCodesEqualAnOfflineComputation) {
  StreamEngine device(engine_config_, kPatienceMs);
  SessionPtr s = make_session(device.handle.get(), coded(1.0));
  Model model(engine_config_);
  plant_errors(device.faults, engine_config_);
  // Without any offloaded token, in the window's course, and across blocks of codes.
  for (const uint32_t n : {2U, 9U, 700U}) {
    prefill_model(s.get(), model, n);
    for (int i = 0; i < (n == 700 ? 12 : 4); ++i) {
      ASSERT_OK(keyhole_session_reset_statistics(s.get()));
      step(s.get(), i % 2 == 1);
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      EXPECT_EQ(statistics(s.get()).attends, engine_config_.layers);
      for (uint32_t l = 0; l < engine_config_.layers; ++l) {
        model.append(l, tokens_[l].k, tokens_[l].v);
      }
      expect_found(s.get(), model, tokens_, out_, lse_);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(device.codes->count(0), 1U);
}

TEST_F(StreamAudit, TokensThatLeaveTheWindowMeanwhileCountOnce) {
  StreamEngine device(engine_config_, kPatienceMs);
  SessionPtr s = make_session(device.handle.get(), coded(1.0));
  Model model(engine_config_);
  prefill_model(s.get(), model, 276);  // sink and window are full
  // Many steps under way while blocks leave the window: each is audited with the tokens of its own moment.
  for (int i = 0; i < 300; ++i) step(s.get());
  const keyhole_audit a = audit_of(s.get());
  EXPECT_EQ(a.audits, 300U * engine_config_.layers * engine_config_.q_heads);
  EXPECT_LT(a.error_max, 1e-5);
  EXPECT_GT(a.mass_p05, 0.9999);
  EXPECT_EQ(a.over_bound, 0U);
}

TEST_F(StreamAudit, StepsOfGraphsAreAudited) {
  StreamEngine device(engine_config_, kPatienceMs);
  SessionPtr s = make_session(device.handle.get(), coded(1.0));
  Model model(engine_config_);
  prefill_model(s.get(), model, 600);
  plant_errors(device.faults, engine_config_);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  device.stream.begin_capture();
  step(s.get());
  device.stream.end_capture();
  for (int i = 0; i < 6; ++i) {
    for (Token& t : tokens_) {
      const Token next = small_token();
      std::copy(next.q.begin(), next.q.end(), t.q.begin());  // the graph reads the same memory
      std::copy(next.k.begin(), next.k.end(), t.k.begin());
      std::copy(next.v.begin(), next.v.end(), t.v.begin());
    }
    ASSERT_OK(keyhole_session_reset_statistics(s.get()));
    ASSERT_OK(keyhole_session_announce(s.get()));
    device.stream.launch_graph();
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      model.append(l, tokens_[l].k, tokens_[l].v);
    }
    expect_found(s.get(), model, tokens_, out_, lse_);
    if (HasFailure()) return;
  }
}

TEST_F(StreamAudit, StepsWithTensorsOfTheHostAreAuditedWhereTheDeviceHasCodes) {
  StreamEngine device(engine_config_, kPatienceMs);
  SessionPtr s = make_session(device.handle.get(), coded(1.0));
  Model model(engine_config_);
  prefill_model(s.get(), model, 600);
  for (int i = 0; i < 5; ++i) {
    ASSERT_OK(keyhole_session_reset_statistics(s.get()));
    std::vector<Token> tokens;
    std::vector<std::vector<float>> out, lse;
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      tokens.push_back(small_token());
      lse.emplace_back(engine_config_.q_heads);
      out.push_back(attend_host(s.get(), l, tokens[l], lse[l].data()));
      model.append(l, tokens[l].k, tokens[l].v);
    }
    expect_found(s.get(), model, tokens, out, lse);
    EXPECT_LT(audit_of(s.get()).error_max, 1e-5);
  }
}

// Where the host attends what is offloaded, the figures are those of the same steps with tensors in host memory.
TEST_F(StreamAudit, StepsThatTheHostServesAreAuditedAsItsOwn) {
  StreamEngine device(engine_config_, kPatienceMs);
  EnginePtr host_engine = make_engine(engine_config_);
  for (const keyhole_tail_mode tail : {KEYHOLE_TAIL_NONE, KEYHOLE_TAIL_MEAN}) {
    for (const keyhole_mode mode :
         {KEYHOLE_MODE_INDEXED, KEYHOLE_MODE_EXACT, KEYHOLE_MODE_RESIDENT}) {
      keyhole_session_config c = searched(0.4);
      c.budget.tail = tail;
      c.offload_placement = KEYHOLE_PLACE_HOST;
      c.mode = mode;
      SessionPtr host = make_session(host_engine.get(), c);
      SessionPtr stream = make_session(device.handle.get(), c);
      for (keyhole_session* s : {host.get(), stream.get()}) {
        prefill(s, 300, 3);
        ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
      }
      compare(host.get(), stream.get(), 60, 1e-4);
      const keyhole_audit a = audit_of(host.get()), b = audit_of(stream.get());
      EXPECT_GT(a.audits, 0U);
      EXPECT_EQ(a.audits, b.audits) << "the same hash of (step, layer, head) chooses";
      EXPECT_NEAR(a.error_mean, b.error_mean, 1e-5);
      EXPECT_NEAR(a.error_max, b.error_max, 1e-4);
      EXPECT_NEAR(a.mass_mean, b.mass_mean, 1e-5);
      EXPECT_NEAR(a.recall, b.recall, 1e-9);
      EXPECT_NEAR(a.missing_mean, b.missing_mean, 1e-5);
      EXPECT_NEAR(a.estimated_missing_mean, b.estimated_missing_mean, 1e-5);
      EXPECT_NEAR(a.missing_error_mean, b.missing_error_mean, 1e-5);
      if (mode == KEYHOLE_MODE_EXACT) {
        EXPECT_LT(b.error_max, 1e-5);
      }
    }
  }
}

TEST_F(StreamAudit, ADeviceThatAnswersWronglyOnceIsSeen) {
  StreamEngine device(engine_config_, kPatienceMs);
  SessionPtr s = make_session(device.handle.get(), coded(1.0));
  Model model(engine_config_);
  prefill_model(s.get(), model, 600);
  // One head of one layer in one step: a value of the group's other head, NaN, a normaliser that is too small.
  const uint32_t d = engine_config_.head_dim;
  device.faults.on_answer = [d](uint32_t layer, uint32_t sequence, float* o, float*) {
    if (layer == 1 && sequence == 20) std::copy_n(o, d, o + d);
  };
  for (int i = 0; i < 40; ++i) step(s.get());
  EXPECT_EQ(audit_of(s.get()).over_bound, 1U);
  EXPECT_EQ(audit_of(s.get(), 1, 0).over_bound, 1U);
  EXPECT_LT(audit_of(s.get(), 0).error_max, 1e-5);
  device.faults.on_answer = [](uint32_t layer, uint32_t sequence, float* o, float*) {
    if (layer == 0 && sequence == 50) o[3] = NAN;
  };
  for (int i = 0; i < 40; ++i) step(s.get());
  EXPECT_EQ(audit_of(s.get()).over_bound, 2U);
  EXPECT_TRUE(std::isinf(audit_of(s.get(), 0, 0).error_max));
  device.faults.on_answer = [](uint32_t layer, uint32_t, float*, float* lse) {
    if (layer == 0) lse[2] -= 0.7F;
  };
  for (int i = 0; i < 40; ++i) step(s.get());
  EXPECT_LT(audit_of(s.get(), 0, 1).mass_p05, 0.51);
  EXPECT_GT(audit_of(s.get(), 1).mass_p05, 0.999);
}

// Steps that are not audited leave no answer, and so cost what they cost in a session without audits.
TEST_F(StreamAudit, OnlyAuditedStepsKeepTheirAnswers) {
  for (const double share : {0.0, 0.05}) {
    StreamEngine device(engine_config_, kPatienceMs);
    SessionPtr s = make_session(device.handle.get(), coded(share));
    Model model(engine_config_);
    prefill_model(s.get(), model, 600);
    for (int i = 0; i < 200; ++i) step(s.get());
    const keyhole_audit a = audit_of(s.get());
    const uint64_t kept = device.faults.answers_kept;
    if (share == 0.0) {
      EXPECT_EQ(kept, 0U);
      EXPECT_EQ(a.audits, 0U);
      continue;
    }
    const double n = 200.0 * engine_config_.layers;
    const double expected = 1.0 - (1.0 - share) * (1.0 - share);  // of two KV heads
    EXPECT_NEAR(static_cast<double>(kept), n * expected, 6 * std::sqrt(n * expected));
    EXPECT_GE(a.audits / group(), kept);
    EXPECT_LE(a.audits / group(), 2 * kept);
  }
}

TEST_F(StreamAudit, NothingIsAuditedTwiceOrNever) {
  StreamEngine device(engine_config_, kPatienceMs);
  const std::string path =
      (std::filesystem::temp_directory_path() / ("keyhole_audits_" + std::to_string(getpid())))
          .string();
  for (const bool has_codes : {true, false}) {
    numbers_ = Numbers(has_codes ? 5 : 6);
    SessionPtr s = make_session(device.handle.get(), has_codes ? coded(1.0) : searched(1.0));
    Model model(engine_config_);
    prefill_model(s.get(), model, 400);
    uint64_t steps = 0;  // of a layer, since the figures began
    const auto expect_all = [&] {
      EXPECT_EQ(audit_of(s.get()).audits, steps * engine_config_.layers * engine_config_.q_heads);
    };
    for (int i = 0; i < kCalls; ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      const uint32_t n = 1 + numbers_.below(20);
      switch (numbers_.below(8)) {
        case 0: {
          ASSERT_OK(keyhole_session_truncate(s.get(), 200 + numbers_.below(150)));
          break;
        }
        case 1: {
          keyhole_session* copy = nullptr;
          ASSERT_OK(keyhole_session_fork(s.get(), &copy));
          expect_all();
          s.reset(copy);
          steps = 0;
          break;
        }
        case 2: {
          ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
          expect_all();
          s = load_of(device.handle.get(), path);
          steps = 0;
          break;
        }
        case 3: {  // of one layer, in halves, with figures read in between
          for (uint32_t l = 0; l < engine_config_.layers; ++l) {
            const Token t = small_token();
            std::vector<float> out(t.q.size());
            const keyhole_tensor q = on_device(t.q, {hq(), d()}), k = on_device(t.k, {hkv(), d()}),
                                 v = on_device(t.v, {hkv(), d()}), o = on_device(out, {hq(), d()});
            ASSERT_OK(keyhole_session_attend_begin(s.get(), l, &q, &k, &v));
            (void)statistics(s.get());
            ASSERT_OK(keyhole_session_attend_end(s.get(), &o, nullptr));
            (void)statistics(s.get());
          }
          steps += 1;
          break;
        }
        case 4: {
          for (uint32_t l = 0; l < engine_config_.layers; ++l) {
            (void)attend_host(s.get(), l, small_token(), nullptr);
          }
          steps += 1;
          break;
        }
        case 5: {  // three launches of a graph of two tokens
          ASSERT_OK(keyhole_session_synchronize(s.get()));
          device.stream.begin_capture();
          step(s.get());
          step(s.get());
          device.stream.end_capture();
          for (int launch = 0; launch < 3; ++launch) {
            ASSERT_OK(keyhole_session_announce(s.get()));
            device.stream.launch_graph();
          }
          ASSERT_OK(keyhole_session_synchronize(s.get()));
          steps += 6;
          break;
        }
        case 6: expect_all(); break;
        default:
          for (uint32_t j = 0; j < n; ++j) step(s.get(), j % 2 == 1);
          steps += n;
      }
      if (HasFailure()) return;
    }
    expect_all();
    if (has_codes) {
      EXPECT_LT(audit_of(s.get()).error_max, 1e-5);
    }
  }
  std::filesystem::remove(path);
}

TEST_F(StreamAudit, MayBeUnderWayWhenTheSessionGoes) {
  for (int round = 0; round < 3; ++round) {
    StreamEngine device(engine_config_, kPatienceMs);
    SessionPtr s = make_session(device.handle.get(), coded(1.0));
    Model model(engine_config_);
    prefill_model(s.get(), model, 1500);
    for (int i = 0; i < 3; ++i) step(s.get());
    if (round == 1) {
      ASSERT_OK(keyhole_session_truncate(s.get(), 10));
    }
    s.reset();
    device.stream.wait();
  }
}

TEST_F(StreamAudit, AFailedStepLeavesNone) {
  StreamEngine device(engine_config_, kPatienceMs);
  SessionPtr s = make_session(device.handle.get(), coded(1.0));
  Model model(engine_config_);
  prefill_model(s.get(), model, 600);
  for (int i = 0; i < 5; ++i) step(s.get());
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const Token bad = [&] {
    Token t = small_token();
    t.k[5] = NAN;
    return t;
  }();
  std::vector<float> out(bad.q.size());
  ASSERT_OK(enqueue(s.get(), 0, bad, out, nullptr));
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
  SessionPtr other = fork_of(s.get());
  EXPECT_EQ(audit_of(other.get()).audits, 0U);
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    (void)attend_host(other.get(), l, small_token(), nullptr);
  }
  EXPECT_EQ(audit_of(other.get()).audits, uint64_t{engine_config_.layers} * engine_config_.q_heads);
}

// Memory of answers is planned: two steps of all layers.
TEST(StreamAuditPlan, CountsTheMemoryOfAnswers) {
  gpu::ResidentShape shape{2, 8, 2, 128, DType::f16, 4, 272, 16, {}};
  const size_t without = gpu::cuda_pinned_bytes(shape);
  shape.keeps_answers = true;
  const size_t answer = size_t{shape.q_heads} * (shape.head_dim + 1) * sizeof(float);
  EXPECT_GE(gpu::cuda_pinned_bytes(shape) - without, 2 * shape.layers * answer);
  EXPECT_LE(gpu::cuda_pinned_bytes(shape) - without, 2 * shape.layers * (answer + 1024));
}

}  // namespace
}  // namespace keyhole::test
