#include "tools/llama/host_extension.h"

#include <algorithm>

#include "tools/llama/blas.h"
#include "tools/llama/layer_f32.h"
#include "tools/llama/layer_math.h"

namespace keyhole::tools {
namespace {

// Tokens of an item of work, at least: fewer leave sgemm below its rate.
constexpr size_t kLeastPiece = 16;

class Extension {
 public:
  Extension(const LlamaModel& model, KeyholeCache& cache, Team& team,
            std::span<const uint32_t> tokens, uint32_t before)
      : model_(model),
        config_(model.config),
        cache_(cache),
        team_(team),
        tokens_(tokens),
        before_(before),
        math_(config_),
        n_(tokens.size()),
        piece_(std::max(kLeastPiece, (n_ + team.size() - 1) / team.size())),
        hidden_(n_ * config_.hidden_size),
        q_(n_ * config_.q_width()),
        k_(n_ * config_.kv_width()),
        v_(n_ * config_.kv_width()),
        attended_(n_ * config_.q_width()),
        input_(n_ * std::max<size_t>(config_.hidden_size, config_.intermediate_size)),
        output_(n_ *
                std::max({config_.q_width() + 2 * config_.kv_width(),
                          2 * size_t{config_.intermediate_size}, size_t{config_.hidden_size}})) {}

  std::vector<float> run(const Rope& full, const Rope& sliding, LogitsOf which) {
    const size_t first = which == LogitsOf::each ? 0 : n_ - 1;
    const SingleThreadedBlas single_threaded(team_.size());
    for (size_t t = 0; t < n_; ++t) math_.embed(model_.embedding, tokens_[t], hidden(t));
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      const LayerWeights& weights = model_.layers[layer];
      matrices_.convert(weights, team_);
      project(weights, config_.slides(layer) ? sliding : full);
      cache_.extend({layer, before_, n_, q_.data(), k_.data(), v_.data()}, attended_.data());
      // Of the last layer the output is read of those tokens alone that have logits.
      output_and_mlp(weights, layer + 1 == config_.layers ? first : 0);
    }
    std::vector<float> logits((n_ - first) * config_.vocab_size);
    for (size_t t = first; t < n_; ++t) {
      float* const row = &logits[(t - first) * config_.vocab_size];
      math_.normalise(model_.final_norm, hidden(t), input_.data());
      multiply(model_.output_projection(), input_.data(), team_, row);
      math_.finish_logits(row);
    }
    return logits;
  }

 private:
  [[nodiscard]] float* hidden(size_t token) { return &hidden_[token * config_.hidden_size]; }

  /// body(first token, count) over [first, n), spread over the team.
  template <class Body>
  void for_pieces(size_t first, const Body& body) {
    team_.for_each((n_ - first + piece_ - 1) / piece_, [&](size_t piece, unsigned) {
      const size_t begin = first + piece * piece_;
      body(begin, std::min(piece_, n_ - begin));
    });
  }

  void project(const LayerWeights& weights, const Rope& rope) {
    const size_t q_width = config_.q_width(), kv_width = config_.kv_width();
    const MatrixF32& w = matrices_.qkv;
    for_pieces(0, [&](size_t begin, size_t count) {
      std::vector<float> cosines(rope.pairs()), sines(rope.pairs());
      float* const in = &input_[begin * config_.hidden_size];
      float* row = &output_[begin * w.rows()];
      for (size_t t = 0; t < count; ++t) {
        math_.normalise(weights.attention_norm, hidden(begin + t), in + t * config_.hidden_size);
      }
      w.multiply(count, in, w.cols(), 0.0F, row, w.rows());
      for (size_t t = begin; t < begin + count; ++t, row += w.rows()) {
        rope.angles(before_ + static_cast<uint32_t>(t), cosines.data(), sines.data());
        math_.finish_qkv(weights, rope, cosines.data(), sines.data(), row);
        std::copy_n(row, q_width, &q_[t * q_width]);
        std::copy_n(row + q_width, kv_width, &k_[t * kv_width]);
        std::copy_n(row + q_width + kv_width, kv_width, &v_[t * kv_width]);
      }
    });
  }

  /// hidden += W x with its bias and norm; x `[count, cols]`.
  void add_product(const MatrixF32& w, size_t begin, size_t count, const float* x,
                   const std::vector<float>& bias, const std::vector<float>& norm, float* room) {
    w.multiply(count, x, w.cols(), 0.0F, room, w.rows());
    for (size_t t = 0; t < count; ++t) {
      math_.add_update(bias, norm, room + t * w.rows(), hidden(begin + t));
    }
  }

  void output_and_mlp(const LayerWeights& weights, size_t first) {
    const size_t inner = config_.intermediate_size;
    for_pieces(first, [&](size_t begin, size_t count) {
      const MatrixF32& w = matrices_.gate_up;
      float* const in = &input_[begin * std::max<size_t>(config_.hidden_size, inner)];
      float* const out = &output_[begin * std::max<size_t>(w.rows(), config_.hidden_size)];
      add_product(matrices_.output, begin, count, &attended_[begin * config_.q_width()],
                  weights.output_bias, weights.output_norm, out);
      for (size_t t = 0; t < count; ++t) {
        math_.normalise(weights.mlp_norm, hidden(begin + t), in + t * config_.hidden_size);
      }
      w.multiply(count, in, w.cols(), 0.0F, out, w.rows());
      for (size_t t = 0; t < count; ++t) {
        math_.activate(weights, out + t * w.rows(), in + t * inner);
      }
      add_product(matrices_.down, begin, count, in, weights.down_bias, weights.mlp_output_norm,
                  out);
    });
  }

  const LlamaModel& model_;
  const LlamaConfig& config_;
  KeyholeCache& cache_;
  Team& team_;
  std::span<const uint32_t> tokens_;
  uint32_t before_;
  LayerMath math_;
  size_t n_, piece_;
  LayerF32 matrices_;                        // of the current layer
  std::vector<float> hidden_;                // [n, hidden]
  std::vector<float> q_, k_, v_, attended_;  // of the current layer
  std::vector<float> input_, output_;        // each piece has its part
};

}  // namespace

std::vector<float> host_extend(const LlamaModel& model, KeyholeCache& cache, Team& team,
                               std::span<const uint32_t> tokens, uint32_t before, const Rope& full,
                               const Rope& sliding, LogitsOf which) {
  return Extension(model, cache, team, tokens, before).run(full, sliding, which);
}

}  // namespace keyhole::tools
