#include "tools/llama/prefill.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tools/llama/blas.h"
#include "tools/llama/causal_attention.h"
#include "tools/llama/layer_f32.h"
#include "tools/llama/rope.h"
#include "tools/llama/vector_math.h"

namespace keyhole::tools {
namespace {

// Tokens of one item of work of the projections: enough rows that sgemm runs at its full rate (148 of
// 150 Gflop/s at 256), few enough that activations stay in L2.
constexpr size_t kChunk = 256;
// Tokens of one hand-over to the sink: large enough that its per-call cost vanishes.
constexpr size_t kSinkChunk = 4096;

/// The work of a prefill in multiply-adds, so that progress is even.
class Meter {
 public:
  Meter(double total, const PrefillProgress& progress) : total_(total), progress_(progress) {}
  void add(double work) {
    done_ += work;
    if (progress_) progress_(std::min(1.0, done_ / total_));
  }

 private:
  double total_;
  double done_ = 0.0;
  const PrefillProgress& progress_;
};

class Prefill {
 public:
  Prefill(const LlamaModel& model, Team& team, std::span<const uint32_t> tokens,
          const PrefillProgress& progress)
      : model_(model),
        config_(model.config),
        team_(team),
        tokens_(tokens),
        attention_({config_.q_heads, config_.kv_heads, config_.head_dim}, team),
        meter_(total_work(), progress),
        hidden_(tokens.size() * config_.hidden_size),
        q_(tokens.size() * config_.q_width()),
        k_(tokens.size() * config_.kv_width()),
        v_(tokens.size() * config_.kv_width()),
        cosines_(tokens.size() * config_.head_dim / 2),
        sines_(cosines_.size()),
        scratch_(team.size()) {
    const size_t widest =
        std::max({config_.q_width() + 2 * config_.kv_width(), 2 * size_t{config_.intermediate_size},
                  size_t{config_.hidden_size}});
    for (Scratch& scratch : scratch_) {
      scratch.input.resize(kChunk *
                           std::max<size_t>(config_.hidden_size, config_.intermediate_size));
      scratch.output.resize(kChunk * widest);
    }
  }

  std::vector<float> run(const LayerSink& sink) {
    const SingleThreadedBlas single_threaded;
    embed();
    const size_t n = tokens_.size();
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      const bool last = layer + 1 == config_.layers;
      const LayerWeights& weights = model_.layers[layer];
      matrices_.convert(weights, team_);
      project_qkv(weights);
      hand_over(layer, sink);
      const size_t first = last ? n - 1 : 0;
      attention_.run(q_.data(), k_.data(), v_.data(), n, first, [&](size_t cells) {
        meter_.add(static_cast<double>(cells) * attention_work_per_cell());
      });
      output_and_mlp(weights, first);
    }
    return logits();
  }

 private:
  struct Scratch {
    std::vector<float> input, output;
  };

  double qkv_work_per_token() const {
    return static_cast<double>(config_.hidden_size) * (config_.q_width() + 2 * config_.kv_width());
  }
  double mlp_work_per_token() const {
    return static_cast<double>(config_.hidden_size) *
           (config_.q_width() + 3.0 * config_.intermediate_size);
  }
  double attention_work_per_cell() const { return 2.0 * static_cast<double>(config_.q_width()); }
  double total_work() const {
    const auto n = static_cast<double>(tokens_.size());
    const double full_layers = config_.layers - 1.0;
    return config_.layers * n * qkv_work_per_token() +
           (full_layers * n + 1) * mlp_work_per_token() +
           (full_layers * static_cast<double>(causal_cells(tokens_.size(), 0)) + n) *
               attention_work_per_cell();
  }

  /// body(first token, count, scratch) over [first, tokens) in chunks, spread over the team.
  template <class Body>
  void for_chunks(size_t first, const Body& body) {
    const size_t n = tokens_.size() - first;
    team_.for_each((n + kChunk - 1) / kChunk, [&](size_t chunk, unsigned member) {
      const size_t begin = first + chunk * kChunk;
      body(begin, std::min(kChunk, tokens_.size() - begin), scratch_[member]);
    });
  }

  void embed() {
    const Rope rope(config_);
    const size_t half = config_.head_dim / 2;
    for_chunks(0, [&](size_t begin, size_t count, Scratch&) {
      for (size_t t = begin; t < begin + count; ++t) {
        model_.embedding.rows_to_f32(tokens_[t], tokens_[t] + 1, hidden(t));
        rope.angles(static_cast<uint32_t>(t), &cosines_[t * half], &sines_[t * half]);
      }
    });
  }

  void normalise(size_t begin, size_t count, const std::vector<float>& weight, float* out) {
    for (size_t t = 0; t < count; ++t) {
      rms_norm(hidden(begin + t), weight.data(), config_.hidden_size,
               static_cast<float>(config_.rms_norm_eps), out + t * config_.hidden_size);
    }
  }

  void project_qkv(const LayerWeights& weights) {
    const Rope rope(config_);
    const size_t half = config_.head_dim / 2;
    const size_t q_width = config_.q_width();
    const size_t kv_width = config_.kv_width();
    for_chunks(0, [&](size_t begin, size_t count, Scratch& scratch) {
      normalise(begin, count, weights.attention_norm, scratch.input.data());
      const MatrixF32& w = matrices_.qkv;
      w.multiply(count, scratch.input.data(), w.cols(), 0.0F, scratch.output.data(), w.rows());
      for (size_t t = begin; t < begin + count; ++t) {
        const float* from = scratch.output.data() + (t - begin) * w.rows();
        std::copy_n(from, q_width, &q_[t * q_width]);
        std::copy_n(from + q_width, kv_width, &k_[t * kv_width]);
        std::copy_n(from + q_width + kv_width, kv_width, &v_[t * kv_width]);
        const float* cosines = &cosines_[t * half];
        const float* sines = &sines_[t * half];
        rope.rotate(&q_[t * q_width], config_.q_heads, cosines, sines);
        rope.rotate(&k_[t * kv_width], config_.kv_heads, cosines, sines);
      }
    });
    meter_.add(static_cast<double>(tokens_.size()) * qkv_work_per_token());
  }

  void hand_over(uint32_t layer, const LayerSink& sink) {
    if (!sink) return;
    for (size_t begin = 0; begin < tokens_.size(); begin += kSinkChunk) {
      sink({layer, begin, std::min(kSinkChunk, tokens_.size() - begin),
            &q_[begin * config_.q_width()], &k_[begin * config_.kv_width()],
            &v_[begin * config_.kv_width()]});
    }
  }

  /// hidden += Wo * attention; hidden += MLP(hidden), for tokens from `first` on. q_ holds the attention.
  void output_and_mlp(const LayerWeights& weights, size_t first) {
    const size_t inner = config_.intermediate_size;
    for_chunks(first, [&](size_t begin, size_t count, Scratch& scratch) {
      const MatrixF32& o = matrices_.output;
      o.multiply(count, &q_[begin * o.cols()], o.cols(), 1.0F, hidden(begin), config_.hidden_size);
      normalise(begin, count, weights.mlp_norm, scratch.input.data());
      const MatrixF32& w = matrices_.gate_up;
      w.multiply(count, scratch.input.data(), w.cols(), 0.0F, scratch.output.data(), w.rows());
      for (size_t t = 0; t < count; ++t) {
        const float* gate = scratch.output.data() + t * w.rows();
        silu_multiply(gate, gate + inner, inner, scratch.input.data() + t * inner);
      }
      matrices_.down.multiply(count, scratch.input.data(), inner, 1.0F, hidden(begin),
                              config_.hidden_size);
    });
    meter_.add(static_cast<double>(tokens_.size() - first) * mlp_work_per_token());
  }

  std::vector<float> logits() {
    const Matrix& w = model_.output_projection();
    std::vector<float> normed(config_.hidden_size);
    rms_norm(hidden(tokens_.size() - 1), model_.final_norm.data(), normed.size(),
             static_cast<float>(config_.rms_norm_eps), normed.data());
    std::vector<float> out(w.rows);
    multiply(w, normed.data(), team_, out.data());
    return out;
  }

  float* hidden(size_t token) { return &hidden_[token * config_.hidden_size]; }

  const LlamaModel& model_;
  const LlamaConfig& config_;
  Team& team_;
  std::span<const uint32_t> tokens_;
  CausalAttention attention_;
  Meter meter_;
  LayerF32 matrices_;                   // of the current layer
  std::vector<float> hidden_;           // [tokens, hidden]
  std::vector<float> q_, k_, v_;        // of the current layer
  std::vector<float> cosines_, sines_;  // [tokens, d/2]
  std::vector<Scratch> scratch_;        // one per member of the team
};

}  // namespace

void check_tokens(const LlamaConfig& config, std::span<const uint32_t> tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= config.vocab_size) {
      throw std::runtime_error("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                               "; allowed: 0 to " + std::to_string(config.vocab_size - 1) +
                               " (vocab_size of the model)");
    }
  }
}

std::vector<float> prefill(const LlamaModel& model, Team& team, std::span<const uint32_t> tokens,
                           const LayerSink& sink, const PrefillProgress& progress) {
  if (tokens.empty()) throw std::runtime_error("the prompt is empty; at least one token is needed");
  check_tokens(model.config, tokens);
  return Prefill(model, team, tokens, progress).run(sink);
}

}  // namespace keyhole::tools
