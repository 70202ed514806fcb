#include "tools/llama/cuda/gpu_extension.h"

#include "tools/llama/cuda/token_rows.h"

namespace keyhole::tools {
namespace {

class Extension {
 public:
  Extension(const GpuModel& model, KeyholeCache& cache, std::span<const uint32_t> tokens,
            uint32_t before, size_t rope_tokens, cudaStream_t stream)
      : config_(model.host().config),
        cache_(cache),
        n_(tokens.size()),
        before_(before),
        stream_(stream),
        tokens_(n_),
        hidden_(n_ * config_.hidden_size),
        qkv_(n_ * (config_.q_width() + 2 * config_.kv_width())),
        attended_(n_ * config_.q_width()),
        host_qkv_(cache.on_device() ? 0 : qkv_.size()),
        host_attended_(cache.on_device() ? 0 : attended_.size()),
        ropes_(config_, rope_tokens, n_),
        rows_(model, gpu_chunk_sizes(config_, n_), model.rounds_activations(before + n_), stream) {
    cuda::copy_now(tokens_.get(), tokens.data(), n_);
    ropes_.fill(before, n_, stream);
  }
  /// Nothing may work on freed memory.
  ~Extension() { (void)cudaStreamSynchronize(stream_); }
  Extension(const Extension&) = delete;
  Extension& operator=(const Extension&) = delete;

  std::vector<float> run() {
    rows_.embed(tokens_.get(), n_, hidden_.get());
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      cuda::Heads heads = rows_.project(layer, hidden_.get(), n_, ropes_, 0);
      heads.q_out = q(qkv_, 0);
      heads.k_out = k(qkv_, 0);
      heads.v_out = v(qkv_, 0);
      cuda::finish_heads(heads, stream_);
      if (cache_.on_device()) {
        attend_on_device(layer);
      } else {
        attend_on_host(layer);
      }
      // Of the last layer only the last token's output is ever read.
      const size_t skipped = layer + 1 == config_.layers ? n_ - 1 : 0;
      cuda::split_numbers(attended_.get() + skipped * config_.q_width(),
                          (n_ - skipped) * config_.q_width(), rows_.attended(), stream_);
      rows_.output_and_mlp(layer, hidden(skipped), n_ - skipped);
    }
    std::vector<float> logits(config_.vocab_size);
    if (cache_.on_device()) cache_.synchronize();
    rows_.logits(hidden(n_ - 1), logits);
    return logits;
  }

 private:
  [[nodiscard]] float* hidden(size_t token) const {
    return hidden_.get() + token * config_.hidden_size;
  }
  // The rows of the i-th token, in arrays of all q, then all k, then all v.
  template <class Floats>
  [[nodiscard]] float* q(const Floats& all, size_t i) const {
    return all.get() + i * config_.q_width();
  }
  template <class Floats>
  [[nodiscard]] float* k(const Floats& all, size_t i) const {
    return all.get() + n_ * config_.q_width() + i * config_.kv_width();
  }
  template <class Floats>
  [[nodiscard]] float* v(const Floats& all, size_t i) const {
    return k(all, n_ + i);
  }

  void attend_on_device(uint32_t layer) {
    cache_.enqueue_extend(layer, static_cast<uint32_t>(n_), q(qkv_, 0), k(qkv_, 0), v(qkv_, 0),
                          attended_.get());
  }

  void attend_on_host(uint32_t layer) {
    copy(host_qkv_.get(), qkv_.get(), qkv_.size(), cudaMemcpyDeviceToHost);
    cuda::check(cudaStreamSynchronize(stream_), "tokens behind a prompt");
    cache_.extend({layer, before_, n_, q(host_qkv_, 0), k(host_qkv_, 0), v(host_qkv_, 0)},
                  host_attended_.get());
    copy(attended_.get(), host_attended_.get(), attended_.size(), cudaMemcpyHostToDevice);
  }
  void copy(float* to, const float* from, size_t count, cudaMemcpyKind kind) const {
    cuda::check(cudaMemcpyAsync(to, from, count * sizeof(float), kind, stream_),
                "queries and attention");
  }

  const LlamaConfig& config_;
  KeyholeCache& cache_;
  const size_t n_;
  const uint32_t before_;
  cudaStream_t stream_;
  cuda::Buffer<uint32_t> tokens_;
  cuda::Buffer<float> hidden_, qkv_, attended_;
  cuda::Pinned<float> host_qkv_, host_attended_;  // where the session is on the host
  cuda::RopeTables ropes_;
  cuda::TokenRows rows_;
};

}  // namespace

std::vector<float> gpu_extend(const GpuModel& model, KeyholeCache& cache,
                              std::span<const uint32_t> tokens, uint32_t before, size_t rope_tokens,
                              void* stream) {
  check_tokens(model.host().config, tokens);
  try {
    return Extension(model, cache, tokens, before, rope_tokens, static_cast<cudaStream_t>(stream))
        .run();
  } catch (...) {
    try {
      cache.truncate(before);  // some layers have taken some of them
    } catch (const std::exception&) {
      // The first error says more.
    }
    throw;
  }
}

}  // namespace keyhole::tools
