// Full and sliding layers by the interface that they share.
#include "runtime/kv/kv_layer.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "runtime/kv/sequence.h"
#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kFull = 0, kSliding = 1, kSlidingWindow = 20, kSlack = 4;

class KvLayers : public test::LayerConfig {
 protected:
  void SetUp() override {
    own_layers();
    layers_[kSliding].window = kSlidingWindow;
    layers_[kSliding].window_slack = kSlack;
    engine_ = std::make_unique<Engine>(engine_config_);
    keyhole_session_config c = test::small_session();
    c.max_tokens = 200;
    params_ = check_session(c, engine_->model());
    sequence_ = std::make_unique<Sequence>(*engine_, params_);
  }
  /// Appends tokens to both layers, whose elements are all their number.
  void append(uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      for (const uint32_t layer : {kFull, kSliding}) {
        const LayerShape m = engine_->model().of(layer);
        const std::vector<float> row(size_t{m.kv_heads} * m.head_dim, static_cast<float>(next_));
        const TensorView r = dense_tensor(reinterpret_cast<const std::byte*>(row.data()), 1,
                                          m.kv_heads, m.head_dim, DType::f32);
        sequence_->layer(layer).append(r, r);
      }
      ++next_;
    }
  }
  float first_element(uint32_t layer, uint32_t token) const {
    const ModelShape& model = engine_->model();
    std::vector<std::byte> k(model.of(layer).token_bytes(model.kv_dtype)), v(k.size());
    const std::array<uint32_t, 1> tokens{token};
    sequence_->layer(layer).read(tokens, k.data(), v.data());
    float x = 0.0F;
    engine_->kernels().to_f32[static_cast<size_t>(model.kv_dtype)](k.data(), &x, 1);
    return x;
  }

  std::unique_ptr<Engine> engine_;
  SessionParams params_;
  std::unique_ptr<Sequence> sequence_;
  uint32_t next_ = 0;
};

TEST_F(KvLayers, BothCountAllTokensAndReadThoseThatTheyKeep) {
  append(100);
  const KvLayer &full = sequence_->layer(kFull), &sliding = sequence_->layer(kSliding);
  EXPECT_EQ(full.tokens(), 100U);
  EXPECT_EQ(sliding.tokens(), 100U);
  EXPECT_EQ(full.sink() + full.rows() + full.window(), 100U);
  EXPECT_EQ(sliding.sink() + sliding.rows(), 0U);
  EXPECT_EQ(sliding.window(), kSlidingWindow);
  EXPECT_TRUE(full.offloads());
  EXPECT_FALSE(sliding.offloads());
  EXPECT_EQ(full.reach(), 0U);
  EXPECT_EQ(sliding.reach(), kSlidingWindow);
  EXPECT_EQ(first_element(kFull, 3), 3.0F);
  EXPECT_EQ(first_element(kFull, 50), 50.0F);
  EXPECT_EQ(first_element(kSliding, 99 - kSlidingWindow), 99.0F - kSlidingWindow);
}

TEST_F(KvLayers, OnlyASlidingLayerRefusesATruncationBehindWhatItKeeps) {
  append(100);
  sequence_->layer(kFull).check_truncation(10);
  sequence_->layer(kSliding).check_truncation(100 - kSlack);
  sequence_->layer(kSliding).check_truncation(0);
  EXPECT_THROW(sequence_->layer(kSliding).check_truncation(10), Error);
  sequence_->layer(kFull).check_drop(10, 50, 90);
  EXPECT_THROW(sequence_->layer(kSliding).check_drop(10, 50, 90), Error);
  for (const uint32_t layer : {kFull, kSliding}) {
    sequence_->layer(layer).truncate(100 - kSlack);
    EXPECT_EQ(sequence_->layer(layer).tokens(), 100U - kSlack);
    sequence_->layer(layer).drop_newest();
    EXPECT_EQ(sequence_->layer(layer).tokens(), 99U - kSlack);
  }
}

TEST_F(KvLayers, MemoryIsAskedForWhenTokensNeedIt) {
  KvLayer &full = sequence_->layer(kFull), &sliding = sequence_->layer(kSliding);
  const uint32_t slots = params_.sink + params_.window + params_.flush_block;
  EXPECT_FALSE(full.more_bytes(slots));
  EXPECT_EQ(full.more_bytes(slots + 1), params_.offload_bytes(engine_->model(), kFull, slots + 1));
  EXPECT_GT(sliding.more_bytes(1), 0U);
  append(slots);
  EXPECT_EQ(full.more_bytes(1),
            params_.offload_bytes(engine_->model(), kFull, params_.flush_block));
}

}  // namespace
}  // namespace keyhole::runtime
