// Layers of different shapes: whatever the order of calls, every layer attends every token exactly once, with its own
// heads.
#include <filesystem>

#include "keyhole/attention.h"
#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "tests/runtime/session/shapes_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

struct ShapesCase {
  uint64_t seed;
  const char* index;
  keyhole_dtype dtype;
};

/// A sequence, with what it should hold.
struct Sequence {
  SessionPtr session;
  Model model;
};

class EveryLayerItsShape : public ::testing::TestWithParam<ShapesCase> {
 protected:
  static std::vector<Heads> random_heads(Numbers& numbers) {
    std::vector<Heads> heads;
    while (heads.size() < 3) {
      const uint32_t kv_heads = 1 + numbers.below(3), dim = some_head_dim(numbers.below(1000));
      const uint32_t group = some_group(numbers.below(1000));
      if (is_tried(dim, group) && group <= 32) heads.push_back({kv_heads * group, kv_heads, dim});
    }
    return heads;
  }
  void make() {
    keyhole_engine_config& ec = config_.engine;
    ec.kv_dtype = GetParam().dtype;
    if (numbers_.below(4) == 0) ec.value_dim = 48;
    ec.values_in_keys = numbers_.below(4) == 0 ? 1 : 0;
    size_t q_heads = 0;
    for (keyhole_layer_config& layer : config_.layers) {
      q_heads += layer.q_heads;
      layer.scale = numbers_.below(2) == 0 ? 0.0F : 0.05F;
      layer.softcap = numbers_.below(3) == 0 ? 10.0F : 0.0F;
      if (numbers_.below(3) != 0) continue;
      layer.window = 1 + numbers_.below(40);
      layer.window_slack = 4096;  // so that truncations go back as far as they like
    }
    if (numbers_.below(3) == 0) {
      sinks_ = numbers_.many(q_heads);
      ec.sink_logits = sinks_.data();
    }
    engine_ = make_engine(ec);
    keyhole_session_config sc = small_session();
    sc.index = GetParam().index;
    sc.sink = numbers_.below(9);
    sc.window = 1 + numbers_.below(24);
    sc.flush_block = 1 + numbers_.below(16);
    sc.append_block = 1 + numbers_.below(40);
    sc.append_mode = numbers_.below(2) == 0 ? KEYHOLE_APPEND_IN_STEP : KEYHOLE_APPEND_BACKGROUND;
    if (numbers_.below(3) == 0) sc.audit_share = 0.5;
    if (numbers_.below(3) == 0) sc.budget.error_target = 0.5F;
    for (int i = 0; i < 2; ++i) {
      sequences_.push_back({make_session(engine_.get(), sc), Model(ec)});
      ASSERT_NE(sequences_.back().session, nullptr);
    }
  }
  [[nodiscard]] uint32_t layers() const { return config_.engine.layers; }

  void prefill(Sequence& s) {
    const uint32_t n = numbers_.below(4) == 0 ? numbers_.below(120) : numbers_.below(12);
    for (uint32_t l = 0; l < layers(); ++l) {
      prefill_both(s.session.get(), s.model, config_.shape(l), l, n, numbers_);
    }
  }
  void decode(Sequence& s) {
    for (uint32_t l = 0; l < layers(); ++l) {
      const Shape shape = config_.shape(l);
      NewTokens t = new_tokens(shape, 1, numbers_);
      ASSERT_OK(attend(s.session.get(), shape, l, t));
      s.model.append(l, t.k, t.v);
      expect_answers(s.model, shape, l, t);
    }
  }
  void extend_some(Sequence& s) {
    const uint32_t n = 1 + numbers_.below(9);
    std::vector<uint64_t> mask(n);
    for (uint32_t i = 0; i < n; ++i) {
      mask[i] = (uint64_t{1} << i) | (numbers_.below(1U << i) & ((uint64_t{1} << i) - 1));
    }
    const uint64_t* const given = numbers_.below(2) == 0 ? mask.data() : nullptr;
    for (uint32_t l = 0; l < layers(); ++l) {
      NewTokens t = new_tokens(config_.shape(l), n, numbers_);
      ASSERT_OK(extend(s.session.get(), config_.shape(l), l, t, given));
      s.model.append(l, t.k, t.v);
      expect_answers(s.model, config_.shape(l), l, t, given);
      if (HasFatalFailure()) return;
    }
    if (numbers_.below(2) == 0) return;
    std::vector<uint32_t> path;
    for (uint32_t i = 0; i < n; ++i) {
      if (numbers_.below(2) == 0) path.push_back(i);
    }
    ASSERT_OK(
        keyhole_session_accept(s.session.get(), static_cast<uint32_t>(path.size()), path.data()));
    for (uint32_t l = 0; l < layers(); ++l) s.model.keep(l, n, path);
  }
  void extend_both() {
    const uint32_t n[] = {1 + numbers_.below(4), numbers_.below(4)};
    for (uint32_t l = 0; l < layers(); ++l) {
      const Shape shape = config_.shape(l);
      const uint32_t start[] = {0, n[0], n[0] + n[1]};
      NewTokens all = new_tokens(shape, start[2], numbers_);
      ASSERT_OK(extend_batch({sequences_[0].session.get(), sequences_[1].session.get()}, shape, l,
                             all, start));
      for (uint32_t i = 0; i < 2; ++i) {
        const NewTokens own = part_of(all, shape, start[i], start[i + 1]);
        sequences_[i].model.append(l, own.k, own.v);
        expect_answers(sequences_[i].model, shape, l, own);
      }
    }
  }
  void truncate(Sequence& s) {
    const uint32_t least = s.model.tokens(0);
    const uint32_t n = least == 0 ? 0 : numbers_.below(least + 4);
    ASSERT_OK(keyhole_session_truncate(s.session.get(), n));
    s.model.truncate(n);
  }
  /// One goes on as a copy of the other.
  void fork() {
    sequences_[1].session = fork_of(sequences_[0].session.get());
    sequences_[1].model = sequences_[0].model;
  }
  void save_and_load(Sequence& s) {
    const std::string path = (folder_ / "session").string();
    ASSERT_OK(keyhole_session_save(s.session.get(), path.c_str()));
    s.session = load_of(engine_.get(), path);
  }
  void build(Sequence& s) {
    ASSERT_OK(keyhole_session_build(s.session.get(), nullptr, nullptr));
    for (uint32_t l = 0; l < layers(); ++l) {
      const auto t = layer_tokens(s.session.get(), l);
      const uint32_t offloaded = config_.layers[l].window != 0 ? 0 : t.total - t.sink - t.window;
      EXPECT_EQ(offloaded, t.indexed);
    }
  }
  void expect_held(Sequence& s) {
    for (uint32_t l = 0; l < layers(); ++l) {
      const auto t = layer_tokens(s.session.get(), l);
      ASSERT_EQ(t.total, s.model.tokens(l));
      if (t.total == 0) continue;
      const Shape shape = config_.shape(l);
      expect_exact(s.session.get(), s.model, shape, l, numbers_);
      if (HasFatalFailure() || config_.layers[l].window != 0) continue;
      // Attends the offloaded tokens alone.
      const auto q = numbers_.many(shape.q(1));
      Answer a{std::vector<float>(shape.o(1)), std::vector<float>(static_cast<size_t>(shape.hq))};
      const auto tq = tensor(q, {shape.hq, shape.d}), out = tensor(a.o, {shape.hq, shape.dv});
      ASSERT_OK(keyhole_session_attend_offloaded(s.session.get(), l, &tq, &out, a.lse.data()));
      std::vector<double> lse;
      const auto o = s.model.without_sinks().attend(
          l, q, lse, [&](uint32_t token) { return token >= t.sink && token + t.window < t.total; });
      expect_near(a, o, lse);
    }
  }

  Numbers numbers_{GetParam().seed};
  ShapedConfig config_{random_heads(numbers_), 1 + numbers_.below(3)};
  std::vector<float> sinks_;
  EnginePtr engine_;
  std::vector<Sequence> sequences_;
  TemporaryFolder folder_;
};

TEST_P(EveryLayerItsShape, AfterEveryOperation) {
  make();
  for (uint32_t step = 0; step < unless_sanitized(30, 15) && !HasFatalFailure(); ++step) {
    const uint32_t operation = numbers_.below(12);
    SCOPED_TRACE("seed " + std::to_string(GetParam().seed) + ", operation " + std::to_string(step) +
                 ": " + std::to_string(operation));
    Sequence& s = sequences_[numbers_.below(2)];
    switch (operation) {
      case 0:
      case 1:
      case 2: prefill(s); break;
      case 3:
      case 4: decode(s); break;
      case 5:
      case 6: extend_some(s); break;
      case 7: extend_both(); break;
      case 8: build(s); break;
      case 9: truncate(s); break;
      case 10: fork(); break;
      default: save_and_load(s); break;
    }
    for (Sequence& one : sequences_) expect_held(one);
  }
  for (Sequence& s : sequences_) {
    keyhole_audit audit;
    keyhole_audit_init(&audit);
    ASSERT_OK(keyhole_session_get_audit(s.session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
    EXPECT_LT(audit.error_max, 1e-3);
  }
}

std::vector<ShapesCase> all_cases() {
  std::vector<ShapesCase> all;
  uint64_t seed = 1;
  for (const char* index : {"flat", "ivf:C=4,probe=16777216"}) {
    for (const keyhole_dtype t : {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16}) {
      for (uint32_t i = 0; i < cases(3); ++i) all.push_back({seed++, index, t});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Random, EveryLayerItsShape, ::testing::ValuesIn(all_cases()),
                         [](const auto& p) { return "Seed" + std::to_string(p.param.seed); });

}  // namespace
}  // namespace keyhole::test
