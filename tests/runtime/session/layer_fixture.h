// Sessions whose layers have something of their own, beside attention in double precision that has it, too.
#pragma once

#include <string>
#include <vector>

#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {

class LayerConfig : public StreamTest {
 protected:
  /// Makes layers of their own with what the engine's fields say; their number is that of engine_config_.
  void own_layers() {
    layers_.resize(engine_config_.layers);
    for (keyhole_layer_config& l : layers_) keyhole_layer_config_init(&l, &engine_config_);
    engine_config_.layer_configs = layers_.data();
    engine_config_.layer_count = engine_config_.layers;
  }
  [[nodiscard]] Shape shape() const { return Shape(engine_config_); }
  void prefill_model(keyhole_session* s, Model& model, uint32_t n) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      prefill_both(s, model, shape(), l, n, numbers_);
    }
  }
  void expect_all_exact(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      expect_exact(s, model, shape(), l, numbers_);
    }
  }
  /// Takes a token through every layer by way of host memory, and checks it.
  void decode(keyhole_session* s, Model& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const Token t = token();
      Answer answer{{}, std::vector<float>(engine_config_.q_heads)};
      answer.o = attend_host(s, l, t, answer.lse.data());
      model.append(l, t.k, t.v);
      std::vector<double> lse;
      const auto o = model.attend_all(l, t.q, lse);
      expect_near(answer, o, lse);
    }
  }
  void expect_refused(const std::string& text) {
    keyhole_engine* engine = nullptr;
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_engine_create(&engine_config_, &engine));
    EXPECT_EQ(engine, nullptr);
    expect_error_text(text);
  }

  std::vector<keyhole_layer_config> layers_;
};

}  // namespace keyhole::test
