// The decoder's side of stream steps, with a copy in place of the attend.
#include "tools/cuda/token_stream.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

namespace keyhole::tools {
namespace {

class TokenStreams : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "no CUDA device";
    }
    shape_.layers = 3;
    shape_.q_heads = 4;
    shape_.kv_heads = 2;
    shape_.head_dim = 64;
    shape_.tokens = 5;
    shape_.weights = GetParam();
    shape_.hidden = 256;
    shape_.intermediate = 896;
    shape_.vocabulary = 1000;
    stream_ = make_token_stream(shape_);
    for (uint32_t token = 0; token < shape_.tokens; ++token) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        stream_->upload(token, layer, rows(token, layer).data());
      }
    }
  }

  // Every element names its place.
  [[nodiscard]] std::vector<uint16_t> rows(uint32_t token, uint32_t layer) const {
    std::vector<uint16_t> out(size_t{shape_.q_heads + 2 * shape_.kv_heads} * shape_.head_dim);
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<uint16_t>((token * 8 + layer) * 512 + i);
    }
    return out;
  }

  // Writes k, v and half of q to where the attend would write its output.
  void enqueue(uint32_t token, uint32_t layers) {
    const auto stream = static_cast<cudaStream_t>(stream_->stream());
    const size_t kv_bytes = size_t{2} * shape_.kv_heads * shape_.head_dim;
    stream_->begin_token();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const TokenStream::Rows at = stream_->begin_layer(token, layer);
      ASSERT_EQ(cudaMemcpyAsync(at.out, at.k, kv_bytes, cudaMemcpyDeviceToDevice, stream),
                cudaSuccess);
      ASSERT_EQ(cudaMemcpyAsync(static_cast<char*>(at.out) + kv_bytes, at.v, kv_bytes,
                                cudaMemcpyDeviceToDevice, stream),
                cudaSuccess);
      stream_->end_layer(layer);
    }
    stream_->end_token();
  }

  void expect_outputs(uint32_t token, uint32_t layers) {
    const size_t q = size_t{shape_.q_heads} * shape_.head_dim;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const std::vector<uint16_t> all = rows(token, layer);
      EXPECT_EQ(stream_->output(layer),
                std::vector<uint16_t>(all.begin() + static_cast<ptrdiff_t>(q), all.end()))
          << "token " << token << ", layer " << layer;
    }
  }

  void expect_clocks(uint32_t layers) {
    std::vector<float> attends(layers);
    float token = 0;
    stream_->read_clocks(layers, attends.data(), token);
    float sum = 0;
    for (const float microseconds : attends) {
      EXPECT_GT(microseconds, 0);
      sum += microseconds;
    }
    EXPECT_GE(token, 0.99F * sum);
  }

  TokenStreamShape shape_;
  std::unique_ptr<TokenStream> stream_;
};

TEST_P(TokenStreams, HandOutTheTokensRows) {
  for (const uint32_t token : {3U, 0U, 4U}) {
    enqueue(token, shape_.layers);
    stream_->synchronize();
    expect_outputs(token, shape_.layers);
    expect_clocks(shape_.layers);
  }
}

TEST_P(TokenStreams, GraphsReadTheTokenThatIsLaunched) {
  for (const uint32_t layers : {2U, 3U}) {
    stream_->begin_capture(true);
    enqueue(0, layers);
    stream_->end_capture();
    for (const uint32_t token : {1U, 4U, 2U}) {
      stream_->launch(token, true);
      stream_->synchronize();
      expect_outputs(token, layers);
      expect_clocks(layers);
    }
  }
  enqueue(3, 1);  // and without one again
  stream_->synchronize();
  expect_outputs(3, 1);
}

TEST_P(TokenStreams, MeasureFloors) {
  EXPECT_GT(stream_->copy_bandwidth(), 1e9);
  EXPECT_GT(stream_->host_copy_bandwidth(3 << 20, 2 << 20), 1e8);
  EXPECT_NE(stream_->device(), "");
}

INSTANTIATE_TEST_SUITE_P(Weights, TokenStreams, testing::Bool());

TEST(WeightBytes, AreThoseOfALlama) {
  TokenStreamShape shape;
  shape.layers = 32;
  shape.q_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  shape.weights = true;
  shape.hidden = 4096;
  shape.intermediate = 14336;
  shape.vocabulary = 128256;
  // 8.03e9 parameters, less the embedding (as large as the last product) and the norms.
  EXPECT_EQ(weight_bytes(shape) / 2, 6979321856U + 525336576U);
  shape.weights = false;
  EXPECT_EQ(weight_bytes(shape), 0U);
}

}  // namespace
}  // namespace keyhole::tools
