#include "tools/llama/prefill.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tools/llama/blas.h"
#include "tools/llama/causal_attention.h"
#include "tools/llama/layer_f32.h"
#include "tools/llama/layer_math.h"

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
          const PrefillProgress& progress, const PrefillHooks& hooks)
      : model_(model),
        config_(model.config),
        team_(team),
        tokens_(tokens),
        math_(config_),
        attention_({config_.q_heads, config_.kv_heads, config_.head_dim, config_.attention_scale,
                    config_.attention_softcap},
                   team),
        meter_(total_work(), progress),
        hooks_(hooks),
        hidden_(tokens.size() * config_.hidden_size),
        q_(tokens.size() * config_.q_width()),
        k_(tokens.size() * config_.kv_width()),
        v_(tokens.size() * config_.kv_width()),
        full_(config_.head_dim, config_.rope, tokens.size(), true),
        sliding_(config_.head_dim, config_.sliding_rope, tokens.size(),
                 config_.full_layers() < config_.layers),
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
    const SingleThreadedBlas single_threaded(team_.size());
    PrefillTimes times;
    Stopwatch watch;
    embed();
    watch.add_to(times.projections);
    const size_t n = tokens_.size();
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      const bool last = layer + 1 == config_.layers;
      const LayerWeights& weights = model_.layers[layer];
      matrices_.convert(weights, team_);
      watch.add_to(times.weights);
      project_qkv(weights, config_.slides(layer) ? sliding_ : full_);
      watch.add_to(times.projections);
      hand_over(layer, sink);
      watch.add_to(times.hand_over);
      const size_t first = last ? n - 1 : 0;
      attend(layer, first, !last && !config_.slides(layer));
      watch.add_to(times.attention);
      output_and_mlp(weights, first);
      watch.add_to(times.mlp);
    }
    std::vector<float> out = logits();
    watch.add_to(times.logits);
    if (hooks_.times != nullptr) *hooks_.times = times;
    return out;
  }

 private:
  struct Scratch {
    std::vector<float> input, output;
  };
  /// Adds the time since the former call to the stage that has ended.
  class Stopwatch {
   public:
    void add_to(double& stage) {
      const Clock::time_point now = Clock::now();
      stage += std::chrono::duration<double>(now - last_).count();
      last_ = now;
    }

   private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point last_ = Clock::now();
  };
  /// RoPE of one kind of layer, with cos and sin of every token, `[tokens, pairs]`.
  struct Turns {
    Rope rope;
    std::vector<float> cosines, sines;
    Turns(uint32_t head_dim, const RopeSettings& settings, size_t tokens, bool used)
        : rope(head_dim, settings, tokens),
          cosines(used ? tokens * rope.pairs() : 0),
          sines(cosines.size()) {}
    void set(size_t token) {
      if (cosines.empty()) return;
      const size_t at = token * rope.pairs();
      rope.angles(static_cast<uint32_t>(token), &cosines[at], &sines[at]);
    }
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
    const size_t n = tokens_.size();
    double work = 0.0;
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      const size_t first = layer + 1 == config_.layers ? n - 1 : 0;
      const size_t cells = causal_cells(n, first, config_.windows[layer]);
      work += static_cast<double>(n) * qkv_work_per_token() +
              static_cast<double>(n - first) * mlp_work_per_token() +
              static_cast<double>(cells) * attention_work_per_cell();
    }
    return work;
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
    for_chunks(0, [&](size_t begin, size_t count, Scratch&) {
      for (size_t t = begin; t < begin + count; ++t) {
        math_.embed(model_.embedding, tokens_[t], hidden(t));
        full_.set(t);
        sliding_.set(t);
      }
    });
  }

  void normalise(size_t begin, size_t count, const std::vector<float>& weight, float* out) {
    for (size_t t = 0; t < count; ++t) {
      math_.normalise(weight, hidden(begin + t), out + t * config_.hidden_size);
    }
  }

  void project_qkv(const LayerWeights& weights, const Turns& turns) {
    const size_t pairs = turns.rope.pairs();
    const size_t q_width = config_.q_width();
    const size_t kv_width = config_.kv_width();
    for_chunks(0, [&](size_t begin, size_t count, Scratch& scratch) {
      normalise(begin, count, weights.attention_norm, scratch.input.data());
      const MatrixF32& w = matrices_.qkv;
      w.multiply(count, scratch.input.data(), w.cols(), 0.0F, scratch.output.data(), w.rows());
      for (size_t t = begin; t < begin + count; ++t) {
        float* row = scratch.output.data() + (t - begin) * w.rows();
        math_.finish_qkv(weights, turns.rope, &turns.cosines[t * pairs], &turns.sines[t * pairs],
                         row);
        std::copy_n(row, q_width, &q_[t * q_width]);
        std::copy_n(row + q_width, kv_width, &k_[t * kv_width]);
        std::copy_n(row + q_width + kv_width, kv_width, &v_[t * kv_width]);
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

  void attend(uint32_t layer, size_t first, bool may_choose) {
    const size_t n = tokens_.size();
    const auto on_cells = [&](size_t cells) {
      meter_.add(static_cast<double>(cells) * attention_work_per_cell());
    };
    if (hooks_.attend && may_choose && n > hooks_.beyond) {
      const size_t chunk = hooks_.chunk == 0 ? n : hooks_.chunk;
      for (size_t begin = first; begin < n; begin += chunk) {
        const size_t end = std::min(n, begin + chunk);
        hooks_.attend(layer, begin, end, &q_[begin * config_.q_width()], k_.data(), v_.data());
        on_cells(causal_cells(end, begin, config_.windows[layer]));
      }
      return;
    }
    attention_.run(q_.data(), k_.data(), v_.data(), n, first, on_cells, config_.windows[layer]);
  }

  /// hidden += W x with its bias and norm, for `count` tokens; x `[count, cols]`. Where there is neither, the product
  /// adds by itself.
  void add_product(const MatrixF32& w, size_t begin, size_t count, const float* x,
                   const std::vector<float>& bias, const std::vector<float>& norm,
                   std::vector<float>& room) {
    if (bias.empty() && norm.empty()) {
      w.multiply(count, x, w.cols(), 1.0F, hidden(begin), w.rows());
      return;
    }
    w.multiply(count, x, w.cols(), 0.0F, room.data(), w.rows());
    for (size_t t = 0; t < count; ++t) {
      math_.add_update(bias, norm, room.data() + t * w.rows(), hidden(begin + t));
    }
  }

  /// hidden += Wo * attention; hidden += MLP(hidden), for tokens from `first` on. q_ holds the attention.
  void output_and_mlp(const LayerWeights& weights, size_t first) {
    const size_t inner = config_.intermediate_size;
    for_chunks(first, [&](size_t begin, size_t count, Scratch& scratch) {
      add_product(matrices_.output, begin, count, &q_[begin * config_.q_width()],
                  weights.output_bias, weights.output_norm, scratch.output);
      normalise(begin, count, weights.mlp_norm, scratch.input.data());
      const MatrixF32& w = matrices_.gate_up;
      w.multiply(count, scratch.input.data(), w.cols(), 0.0F, scratch.output.data(), w.rows());
      for (size_t t = 0; t < count; ++t) {
        math_.activate(weights, scratch.output.data() + t * w.rows(),
                       scratch.input.data() + t * inner);
      }
      add_product(matrices_.down, begin, count, scratch.input.data(), weights.down_bias,
                  weights.mlp_output_norm, scratch.output);
    });
    meter_.add(static_cast<double>(tokens_.size() - first) * mlp_work_per_token());
  }

  std::vector<float> logits() {
    const Matrix& w = model_.output_projection();
    std::vector<float> normed(config_.hidden_size);
    math_.normalise(model_.final_norm, hidden(tokens_.size() - 1), normed.data());
    std::vector<float> out(w.rows);
    multiply(w, normed.data(), team_, out.data());
    math_.finish_logits(out.data());
    return out;
  }

  float* hidden(size_t token) { return &hidden_[token * config_.hidden_size]; }

  const LlamaModel& model_;
  const LlamaConfig& config_;
  Team& team_;
  std::span<const uint32_t> tokens_;
  LayerMath math_;
  CausalAttention attention_;
  Meter meter_;
  const PrefillHooks& hooks_;
  LayerF32 matrices_;             // of the current layer
  std::vector<float> hidden_;     // [tokens, hidden]
  std::vector<float> q_, k_, v_;  // of the current layer
  Turns full_, sliding_;          // the latter empty where no layer slides
  std::vector<Scratch> scratch_;  // one per member of the team
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
                           const LayerSink& sink, const PrefillProgress& progress,
                           const PrefillHooks& hooks) {
  if (tokens.empty()) throw std::runtime_error("the prompt is empty; at least one token is needed");
  check_tokens(model.config, tokens);
  return Prefill(model, team, tokens, progress, hooks).run(sink);
}

}  // namespace keyhole::tools
