// Sessions on a device whose layers have heads of their own: random calls with tensors in device and in host memory.
// After each call every layer answers as attention in double precision over its tokens does, with its own heads. The
// device is a World:
//
//   World::Vector     floats in device memory, as tests/runtime/device_vector.h
//   engine(config)    an engine on it
//   stream()          of the sessions
//   begin_capture(), end_capture(), launch()    a graph of what was captured last
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/device_turn.h"
#include "tests/runtime/session/shapes_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {

/// What stands for offloaded tokens.
enum class Offloaded {
  flat,        ///< all are searched and read on the host
  codes,       ///< codes on the device, which reads the heaviest rows
  host_codes,  ///< and the host reads these
  partitions   ///< the host reads the rows of all partitions
};

struct ShapedCase {
  uint64_t seed;
  Offloaded offloaded;
  keyhole_dtype dtype;
  double tolerance;
  bool int8 = false;  ///< K and V of offloaded tokens
  bool wide = false;  ///< heads of 512 in a layer, as Gemma 4 has them
};

/// Makes layers of two or three shapes that a device takes.
inline std::vector<Heads> some_heads(Numbers& numbers, uint32_t layers, bool wide) {
  constexpr uint32_t kDims[] = {64, 128, 256, 80};
  constexpr uint32_t kGroup[] = {1, 2, 3, 4, 8};
  std::vector<Heads> shapes, heads;
  for (uint32_t i = 0; i < 2 + numbers.below(2); ++i) {
    const uint32_t kv_heads = 1 + numbers.below(4);
    shapes.push_back({kv_heads * kGroup[numbers.below(5)], kv_heads, kDims[numbers.below(4)]});
  }
  for (uint32_t l = 0; l < layers; ++l) {
    heads.push_back(l < 2 ? shapes[l]
                          : shapes[numbers.below(static_cast<uint32_t>(shapes.size()))]);
  }
  // The first two layers never have the same shape.
  if (heads[0].head_dim == heads[1].head_dim)
    heads[1].head_dim = heads[0].head_dim == 64 ? 256 : 64;
  if (wide) heads[1] = {8, 1, 512};
  return heads;
}

template <class World>
class ShapedSequences {
 public:
  using Vector = typename World::Vector;

  ShapedSequences(World& world, const ShapedCase& of)
      : case_(of),
        world_(&world),
        numbers_(of.seed),
        config_(some_heads(numbers_, kLayers, of.wide)) {
    make();
  }

  void run(uint32_t operations) {
    for (uint32_t i = 0; i < operations && !failed(); ++i) {
      const uint32_t operation = numbers_.below(14);
      SCOPED_TRACE("seed " + std::to_string(case_.seed) + ", operation " + std::to_string(i) +
                   ": " + std::to_string(operation));
      Sequence& s = sequences_[numbers_.below(2)];
      switch (operation) {
        case 0:
        case 1: prefill(s); break;
        case 2:
        case 3:
        case 4: decode(s); break;
        case 5: decode_on_host(s); break;
        case 6:
        case 7: extend_some(s); break;
        case 8: extend_both(); break;
        case 9: build(s); break;
        case 10: truncate(s); break;
        case 11: fork(); break;
        case 12: save_and_load(s); break;
        default: launch_graph(s); break;
      }
      for (Sequence& one : sequences_) expect_held(one);
    }
    for (Sequence& s : sequences_) expect_audits(s);
  }
  [[nodiscard]] keyhole_session* session(uint32_t i) const { return sequences_[i].session.get(); }
  /// Runs prompts of so many tokens and a token of each way, and checks that what stands for the offloaded ones is
  /// where it should be.
  void run_once(uint32_t prompt) {
    for (Sequence& s : sequences_) prefill(s, prompt);
    build(sequences_[0]);
    decode(sequences_[0]);
    decode_on_host(sequences_[0]);
    expect_held(sequences_[0]);
    const keyhole_statistics st = statistics(session(0));
    if (case_.offloaded == Offloaded::partitions) {
      EXPECT_GT(st.tail_bytes, 0U);
    }
    if (!has_codes()) return;
    EXPECT_EQ(st.rows_by_host, case_.offloaded == Offloaded::host_codes ? 1U : 0U);
    uint32_t coded = 0;
    for (const keyhole_layer_config& l : config_.layers) coded += l.window == 0 ? 1 : 0;
    EXPECT_EQ(st.code_layers, coded);
    EXPECT_GT(st.code_bytes, 0U);
  }

 private:
  static constexpr uint32_t kLayers = 4;
  struct Sequence {
    SessionPtr session;
    Model model;
  };
  using Turn = DeviceTurn<Vector>;

  [[nodiscard]] static bool failed() { return ::testing::Test::HasFatalFailure(); }
  [[nodiscard]] bool has_codes() const {
    return case_.offloaded == Offloaded::codes || case_.offloaded == Offloaded::host_codes;
  }

  void make() {
    keyhole_engine_config& ec = config_.engine;
    ec.kv_dtype = case_.dtype;
    ec.device = KEYHOLE_DEVICE_CUDA;
    ec.timeout_ms = unless_sanitized(5000, 30000);
    size_t q_heads = 0;
    for (uint32_t l = 0; l < kLayers; ++l) {
      keyhole_layer_config& layer = config_.layers[l];
      q_heads += layer.q_heads;
      // Logits lie within a unit of each other: codes of keys then hardly change weights, and errors of values
      // average out.
      layer.scale = has_codes() ? 0.06F / std::sqrt(static_cast<float>(layer.head_dim)) : 0.02F;
      layer.softcap = numbers_.below(3) == 0 ? 10.0F : 0.0F;
      // The first layer does not slide, the last one does in half of the cases.
      if (l == 0 || numbers_.below(3) == 0) continue;
      if (l == 1 || numbers_.below(2) == 0) continue;
      layer.window = 1 + numbers_.below(40);
      layer.window_slack = 4096;  // so that truncations go back as far as they like
    }
    if (numbers_.below(3) == 0) {
      sinks_ = numbers_.many(q_heads);
      ec.sink_logits = sinks_.data();
    }
    session_config_ = small_session();
    keyhole_session_config& sc = session_config_;
    sc.sink = numbers_.below(9);
    sc.window = 12 + numbers_.below(20);
    sc.flush_block = 1 + numbers_.below(16);
    sc.append_block = 8 + numbers_.below(40);
    sc.append_mode = numbers_.below(2) == 0 ? KEYHOLE_APPEND_IN_STEP : KEYHOLE_APPEND_BACKGROUND;
    if (numbers_.below(2) == 0) sc.audit_share = 0.5;
    if (has_codes()) {
      // Heads of 512 have no lists: all of their codes are read, whatever the spec says.
      sc.index = case_.wide ? "codes:k=4,v=4,lists=64" : "codes:k=4,v=4";
      sc.flush_block = sc.append_block = 256;
      sc.budget.top_k = 16;
      sc.budget.tail = KEYHOLE_TAIL_CODES;
      sc.offload_placement = KEYHOLE_PLACE_DEVICE;
      sc.kv_host = case_.int8 ? KEYHOLE_KV_HOST_INT8 : KEYHOLE_KV_HOST_SAME;
      sc.exact_rows_by =
          case_.offloaded == Offloaded::host_codes ? KEYHOLE_ROWS_BY_HOST : KEYHOLE_ROWS_BY_DEVICE;
    } else if (case_.offloaded == Offloaded::partitions) {
      sc.budget.attend = KEYHOLE_ATTEND_NONE;
      sc.budget.tail = KEYHOLE_TAIL_SECOND;
      sc.budget.min_keys = 4000;
      sc.tail_partition = 4;
      sc.append_mode = KEYHOLE_APPEND_IN_STEP;
    }
    engine_ = world_->engine(ec);
    ASSERT_NE(engine_, nullptr);
    for (int i = 0; i < 2; ++i) {
      sequences_.push_back({make_session(engine_, sc), Model(ec)});
      ASSERT_NE(sequences_.back().session, nullptr) << keyhole_last_error();
      set_stream(sequences_.back());
    }
  }
  void set_stream(Sequence& s) {
    ASSERT_OK(keyhole_session_set_stream(s.session.get(), world_->stream()));
  }

  /// Adds a pattern of their layer, head and channel to values, so that a row in another's place shows however many
  /// are attended.
  void add_pattern(uint32_t layer, NewTokens& t) const {
    const Shape shape = config_.shape(layer);
    const auto d = static_cast<size_t>(shape.d), hkv = static_cast<size_t>(shape.hkv);
    for (size_t i = 0; i < t.v.size(); ++i) {
      const size_t channel = i % d, head = i / d % hkv;
      t.v[i] += static_cast<float>((channel * 5 + head * 37 + layer * 11) % 65) / 16.0F - 2.0F;
    }
  }
  std::unique_ptr<Turn> turn(uint32_t layer, uint32_t n) {
    auto t = std::make_unique<Turn>(config_.shape(layer), n, numbers_);
    add_pattern(layer, t->host);
    t->fill(world_->stream());
    return t;
  }
  /// Appends the turn to the model, whose answers must be the session's.
  void expect_turn(Sequence& s, uint32_t layer, Turn& t, const uint64_t* mask = nullptr) {
    t.fetch();
    s.model.append(layer, t.host.k, t.host.v);
    expect_answers(s.model, t.shape, layer, t.host, mask, case_.tolerance);
  }

  void prefill(Sequence& s) {
    const uint32_t most = has_codes() ? 600 : 90;
    prefill(s, numbers_.below(3) == 0 ? numbers_.below(12) : numbers_.below(most));
  }
  void prefill(Sequence& s, uint32_t n) {
    if (s.model.tokens(0) > 2500) return;
    const bool on_device = numbers_.below(2) == 0 && n != 0;
    for (uint32_t l = 0; l < kLayers; ++l) {
      const Shape shape = config_.shape(l);
      NewTokens t = new_tokens(shape, n, numbers_);
      add_pattern(l, t);
      keyhole_tensor k = tensor(t.k, {n, shape.hkv, shape.d}),
                     v = tensor(t.v, {n, shape.hkv, shape.d}),
                     q = tensor(t.q, {n, shape.hq, shape.d});
      Vector dq(std::max<size_t>(t.q.size(), 1)), dk(std::max<size_t>(t.k.size(), 1)),
          dv(std::max<size_t>(t.v.size(), 1));
      if (on_device) {
        dq.set(t.q, world_->stream());
        dk.set(t.k, world_->stream());
        dv.set(t.v, world_->stream());
        q = dq.tensor({n, shape.hq, shape.d});
        k = dk.tensor({n, shape.hkv, shape.d});
        v = dv.tensor({n, shape.hkv, shape.d});
      }
      ASSERT_OK(keyhole_session_append(s.session.get(), l, &k, &v, &q));
      s.model.append(l, t.k, t.v);
    }
  }
  void decode(Sequence& s) {
    for (uint32_t token = 0; token < 3; ++token) {
      std::vector<std::unique_ptr<Turn>> turns;
      for (uint32_t l = 0; l < kLayers; ++l) turns.push_back(turn(l, 1));
      for (uint32_t l = 0; l < kLayers; ++l) {
        ASSERT_OK(turns[l]->attend(s.session.get(), l, token == 1));
      }
      ASSERT_OK(keyhole_session_synchronize(s.session.get()));
      for (uint32_t l = 0; l < kLayers && !failed(); ++l) expect_turn(s, l, *turns[l]);
    }
  }
  void decode_on_host(Sequence& s) {
    for (uint32_t l = 0; l < kLayers && !failed(); ++l) {
      const Shape shape = config_.shape(l);
      NewTokens t = new_tokens(shape, 1, numbers_);
      add_pattern(l, t);
      ASSERT_OK(attend(s.session.get(), shape, l, t));
      s.model.append(l, t.k, t.v);
      expect_answers(s.model, shape, l, t, nullptr, case_.tolerance);
    }
  }
  void extend_some(Sequence& s) {
    // Heads of 512 have no kernels for turns over codes: what is a turn elsewhere is attended exactly.
    const bool is_turn = case_.wide && numbers_.below(2) == 0;
    const uint32_t n = is_turn ? 20 + numbers_.below(10) : 1 + numbers_.below(9);
    std::vector<uint64_t> mask(n);
    for (uint32_t i = 0; i < n; ++i) {
      mask[i] = (uint64_t{1} << i) | (numbers_.below(1U << i) & ((uint64_t{1} << i) - 1));
    }
    // Attention of blocks, which takes masks where there are no codes, is of 16 bits.
    const bool masked = numbers_.below(2) == 0 && case_.dtype != KEYHOLE_F32;
    const uint64_t* const given = masked ? mask.data() : nullptr;
    std::vector<std::unique_ptr<Turn>> turns;
    for (uint32_t l = 0; l < kLayers; ++l) turns.push_back(turn(l, n));
    for (uint32_t l = 0; l < kLayers; ++l) {
      ASSERT_OK(turns[l]->extend(s.session.get(), l, given));
    }
    std::vector<uint32_t> path;
    const bool accepts = numbers_.below(2) == 0;
    for (uint32_t i = 0; i < n; ++i) {
      if (!accepts || numbers_.below(2) == 0) path.push_back(i);
    }
    if (accepts) {
      ASSERT_OK(
          keyhole_session_accept(s.session.get(), static_cast<uint32_t>(path.size()), path.data()));
    }
    ASSERT_OK(keyhole_session_synchronize(s.session.get()));
    for (uint32_t l = 0; l < kLayers && !failed(); ++l) {
      expect_turn(s, l, *turns[l], given);
      s.model.keep(l, n, path);
    }
  }
  void extend_both() {
    const uint32_t n[] = {1, 1 + numbers_.below(2)};
    const uint32_t start[] = {0, n[0], n[0] + n[1]};
    std::vector<std::unique_ptr<Turn>> turns;
    for (uint32_t l = 0; l < kLayers; ++l) turns.push_back(turn(l, start[2]));
    for (uint32_t l = 0; l < kLayers; ++l) {
      ASSERT_OK(turns[l]->extend_batch({session(0), session(1)}, l, start));
    }
    for (uint32_t i = 0; i < 2; ++i) ASSERT_OK(keyhole_session_synchronize(session(i)));
    for (uint32_t l = 0; l < kLayers; ++l) {
      Turn& t = *turns[l];
      t.fetch();
      for (uint32_t i = 0; i < 2 && !failed(); ++i) {
        const NewTokens own = part_of(t.host, t.shape, start[i], start[i + 1]);
        sequences_[i].model.append(l, own.k, own.v);
        expect_answers(sequences_[i].model, t.shape, l, own, nullptr, case_.tolerance);
      }
    }
  }
  /// Takes a token through all layers by a graph that is captured once and launched twice.
  void launch_graph(Sequence& s) {
    if (s.model.tokens(0) == 0) return;
    decode(s);  // what steps take of the device is there
    if (failed()) return;
    std::vector<std::unique_ptr<Turn>> turns;
    for (uint32_t l = 0; l < kLayers; ++l) turns.push_back(turn(l, 1));
    ASSERT_OK(keyhole_session_synchronize(s.session.get()));
    world_->begin_capture();
    for (uint32_t l = 0; l < kLayers; ++l) {
      EXPECT_OK(turns[l]->attend(s.session.get(), l, l % 2 == 1));
    }
    world_->end_capture();
    for (uint32_t i = 0; i < 2 && !failed(); ++i) {
      for (uint32_t l = 0; l < kLayers; ++l) {
        turns[l]->host = new_tokens(turns[l]->shape, 1, numbers_);
        add_pattern(l, turns[l]->host);
        turns[l]->fill(world_->stream());
      }
      ASSERT_OK(keyhole_session_announce(s.session.get()));
      world_->launch();
      ASSERT_OK(keyhole_session_synchronize(s.session.get()));
      for (uint32_t l = 0; l < kLayers && !failed(); ++l) expect_turn(s, l, *turns[l]);
    }
  }
  void build(Sequence& s) { ASSERT_OK(keyhole_session_build(s.session.get(), nullptr, nullptr)); }
  void truncate(Sequence& s) {
    const uint32_t held = s.model.tokens(0);
    const uint32_t n = held == 0 ? 0 : numbers_.below(held + 4);
    ASSERT_OK(keyhole_session_truncate(s.session.get(), n));
    s.model.truncate(n);
  }
  /// Lets one sequence go on as a copy of the other.
  void fork() {
    sequences_[1].session = fork_of(session(0));
    sequences_[1].model = sequences_[0].model;
    set_stream(sequences_[1]);
  }
  void save_and_load(Sequence& s) {
    const std::string path = (folder_ / "session").string();
    ASSERT_OK(keyhole_session_save(s.session.get(), path.c_str()));
    s.session = load_of(engine_, path);
    set_stream(s);
  }
  /// Checks that all layers have the model's tokens, and that a query of the host finds them.
  void expect_held(Sequence& s) {
    for (uint32_t l = 0; l < kLayers && !failed(); ++l) {
      ASSERT_EQ(layer_tokens(s.session.get(), l).total, s.model.tokens(l));
      if (s.model.tokens(l) == 0) continue;
      const Shape shape = config_.shape(l);
      const auto q = numbers_.many(shape.q(1));
      std::vector<double> lse;
      const auto o = s.model.attend_all(l, q, lse);
      SCOPED_TRACE("layer " + std::to_string(l) + " with " + std::to_string(s.model.tokens(l)));
      expect_near(attend_only(s.session.get(), shape, l, q), o, lse, case_.tolerance);
    }
  }
  void expect_audits(Sequence& s) {
    if (failed()) return;
    keyhole_audit audit;
    keyhole_audit_init(&audit);
    ASSERT_OK(keyhole_session_get_audit(s.session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
    EXPECT_LT(audit.error_max, std::min(10 * case_.tolerance, 0.3));
  }

  ShapedCase case_;
  World* world_;
  Numbers numbers_;
  ShapedConfig config_;
  keyhole_session_config session_config_{};
  std::vector<float> sinks_;
  keyhole_engine* engine_ = nullptr;
  std::vector<Sequence> sequences_;
  TemporaryFolder folder_;
};

}  // namespace keyhole::test
