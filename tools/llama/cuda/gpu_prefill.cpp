// A prompt through the model, layer by layer, each in chunks of tokens. The GPU is told of the next chunk before the
// host takes this one's keys and values, so that neither waits for the other longer than it must.
#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "tools/llama/cuda/attention.h"
#include "tools/llama/cuda/device_model.h"
#include "tools/llama/cuda/gemm.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools {
namespace {

using Bf16 = __nv_bfloat16;

struct SplitBuffer {
  cuda::Buffer<Bf16> high, low;
  explicit SplitBuffer(size_t count) : high(count), low(count) {}
  [[nodiscard]] cuda::SplitOut out() const { return {high.get(), low.get()}; }
  [[nodiscard]] cuda::Split in() const { return {high.get(), low.get()}; }
};

/// q, k and v of a chunk on their way to the host.
struct Export {
  cuda::Buffer<float> device;
  cuda::Pinned<float> host;
  cuda::Event ready, copied;
  explicit Export(size_t count) : device(count), host(count) {}
};

class GpuPrefill {
 public:
  GpuPrefill(const GpuModel& model, std::span<const uint32_t> tokens, const LayerSink& sink,
             const PrefillProgress& progress)
      : config_(model.host().config),
        device_(model.device()),
        sink_(sink),
        progress_(progress),
        n_(tokens.size()),
        sizes_(gpu_prefill_sizes(config_, n_, static_cast<bool>(sink))),
        chunk_(sizes_.chunk),
        qkv_width_(config_.q_width() + 2 * config_.kv_width()),
        tokens_(sizes_.tokens),
        hidden_(sizes_.hidden),
        table_(sizes_.table),
        k_(sizes_.kv),
        v_(sizes_.kv),
        q_(sizes_.q),
        wide_(sizes_.wide),
        normed_(sizes_.normed),
        attended_(sizes_.attended),
        inner_(sizes_.inner),
        exports_{Export(sizes_.exported), Export(sizes_.exported)} {
    cuda::copy_now(tokens_.get(), tokens.data(), n_);
  }
  /// A callback that throws must not leave kernels behind that work on freed memory.
  ~GpuPrefill() {
    (void)cudaStreamSynchronize(stream_.get());
    (void)cudaStreamSynchronize(copies_.get());
  }
  GpuPrefill(const GpuPrefill&) = delete;
  GpuPrefill& operator=(const GpuPrefill&) = delete;

  std::vector<float> run() {
    const cudaStream_t s = stream_.get();
    const auto n = static_cast<uint32_t>(n_);
    cuda::embed_tokens(tokens_.get(), n, device_.embedding.split(), config_.hidden_size,
                       hidden_.get(), s);
    cuda::rope_table(device_.frequencies.get(), config_.head_dim / 2, n, table_.get(), s);

    Item former;
    size_t number = 0;
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      for (size_t first = 0; first < n_; first += chunk_, ++number) {
        const Item item{layer, first, std::min(chunk_, n_ - first), number % 2};
        enqueue(item);
        if (number > 0) finish(former);
        former = item;
      }
    }
    finish(former);

    std::vector<float> logits(config_.vocab_size);
    cuda::Buffer<float> result(logits.size());
    cuda::step_logits(device_.output_projection().step(), hidden(n_ - 1),
                      device_.norm(device_.final_norm), result.get(), s);
    cuda::check(cudaStreamSynchronize(s), "prefill");
    cuda::copy_now(logits.data(), result.get(), logits.size());
    if (progress_) progress_(1.0);
    return logits;
  }

 private:
  /// A chunk of a layer, and which of the exports it uses.
  struct Item {
    uint32_t layer = 0;
    size_t first = 0;
    size_t count = 0;
    size_t slot = 0;
  };

  [[nodiscard]] float* hidden(size_t token) const {
    return hidden_.get() + token * config_.hidden_size;
  }
  [[nodiscard]] bool last(const Item& item) const { return item.layer + 1 == config_.layers; }

  void enqueue(const Item& item) {
    const cudaStream_t s = stream_.get();
    const DeviceLayer& layer = device_.layers[item.layer];
    const auto count = static_cast<uint32_t>(item.count);
    cuda::normalise_tokens(hidden(item.first), layer.attention_norm.get(), device_.eps, count,
                           config_.hidden_size, normed_.out(), s);
    multiply(layer.qkv, normed_, count, wide_.get(), false);
    rotate(item);
    if (sink_) {
      const Export& out = exports_[item.slot];
      out.ready.record(s);
      cuda::check(cudaStreamWaitEvent(copies_.get(), out.ready.get(), 0), "an event");
      cuda::check(
          cudaMemcpyAsync(out.host.get(), out.device.get(), item.count * qkv_width_ * sizeof(float),
                          cudaMemcpyDeviceToHost, copies_.get()),
          "keys and values to the host");
      out.copied.record(copies_.get());
    } else {
      exports_[item.slot].copied.record(s);
    }

    // Of the last layer, nothing but the last token's output is ever read.
    if (last(item) && item.first + item.count < n_) return;
    const size_t skipped = last(item) ? item.count - 1 : 0;
    attend_and_mlp(layer, item.first + skipped, count - static_cast<uint32_t>(skipped),
                   q_.get() + skipped * config_.q_width());
  }

  void rotate(const Item& item) {
    cuda::Heads heads;
    heads.qkv = wide_.get();
    heads.table = table_.get() + item.first * config_.head_dim / 2;
    heads.n = static_cast<uint32_t>(item.count);
    heads.q_heads = config_.q_heads;
    heads.kv_heads = config_.kv_heads;
    heads.head_dim = config_.head_dim;
    heads.q = q_.get();
    heads.k = k_.get() + item.first * config_.kv_width();
    heads.v = v_.get() + item.first * config_.kv_width();
    if (sink_) {
      heads.q_out = exports_[item.slot].device.get();
      heads.k_out = heads.q_out + item.count * config_.q_width();
      heads.v_out = heads.k_out + item.count * config_.kv_width();
    }
    cuda::rotate_heads(heads, stream_.get());
  }

  void attend_and_mlp(const DeviceLayer& layer, size_t first, uint32_t count, const __half* q) {
    const cudaStream_t s = stream_.get();
    cuda::AttentionArgs attention;
    attention.q = q;
    attention.k = k_.get();
    attention.v = v_.get();
    attention.out = attended_.out();
    attention.first = static_cast<uint32_t>(first);
    attention.queries = count;
    attention.q_heads = config_.q_heads;
    attention.kv_heads = config_.kv_heads;
    attention.scale = 1.0F / std::sqrt(static_cast<float>(config_.head_dim));
    cuda::causal_attention(attention, config_.head_dim, s);
    multiply(layer.output, attended_, count, hidden(first), true);
    cuda::normalise_tokens(hidden(first), layer.mlp_norm.get(), device_.eps, count,
                           config_.hidden_size, normed_.out(), s);
    multiply(layer.gate_up, normed_, count, wide_.get(), false);
    cuda::silu_multiply_tokens(wide_.get(), count, config_.intermediate_size, inner_.out(), s);
    multiply(layer.down, inner_, count, hidden(first), true);
  }

  void multiply(const DeviceMatrix& w, const SplitBuffer& x, uint32_t count, float* y, bool add) {
    cuda::gemm({x.in(), w.split(), y, count, w.rows, w.columns, add}, stream_.get());
  }

  /// Waits for the item's keys and values and hands them over; the GPU is at its attention meanwhile.
  void finish(const Item& item) {
    const Export& out = exports_[item.slot];
    out.copied.wait();
    if (sink_) {
      const float* const q = out.host.get();
      const float* const k = q + item.count * config_.q_width();
      sink_({item.layer, item.first, item.count, q, k, k + item.count * config_.kv_width()});
    }
    if (!progress_) return;
    // The item's own attention is still to come.
    done_ += work_of_former_;
    work_of_former_ = work(item);
    progress_(std::min(1.0, done_ / total_work()));
  }

  [[nodiscard]] double work(const Item& item) const {
    const auto count = static_cast<double>(item.count);
    const double projections = static_cast<double>(config_.hidden_size) * qkv_width_;
    const double mlp = static_cast<double>(config_.hidden_size) *
                       (config_.q_width() + 3.0 * config_.intermediate_size);
    const double cells = count * (static_cast<double>(item.first) + count / 2);
    return count * projections +
           (last(item) ? 0.0 : count * mlp + 2.0 * static_cast<double>(config_.q_width()) * cells);
  }
  [[nodiscard]] double total_work() const {
    const Item all{0, 0, n_, 0};
    const Item end{config_.layers - 1, 0, n_, 0};
    return (config_.layers - 1.0) * work(all) + work(end);
  }

  const LlamaConfig& config_;
  const GpuModel::Device& device_;
  const LayerSink& sink_;
  const PrefillProgress& progress_;
  const size_t n_;
  const GpuPrefillSizes sizes_;
  const size_t chunk_;
  const size_t qkv_width_;
  cuda::OwnStream stream_, copies_;
  cuda::Buffer<uint32_t> tokens_;
  cuda::Buffer<float> hidden_;  // [n, hidden]
  cuda::Buffer<float2> table_;  // [n, d/2]
  cuda::Buffer<__half> k_, v_;  // [n, kv_heads, d] of the current layer
  cuda::Buffer<__half> q_;      // [chunk, q_heads, d]
  cuda::Buffer<float> wide_;    // [chunk, qkv] or [chunk, gate and up]
  SplitBuffer normed_, attended_, inner_;
  std::array<Export, 2> exports_;
  double done_ = 0.0, work_of_former_ = 0.0;
};

}  // namespace

std::vector<float> gpu_prefill(const GpuModel& model, std::span<const uint32_t> tokens,
                               const LayerSink& sink, const PrefillProgress& progress) {
  if (tokens.empty()) throw std::runtime_error("the prompt is empty; at least one token is needed");
  check_tokens(model.host().config, tokens);
  return GpuPrefill(model, tokens, sink, progress).run();
}

}  // namespace keyhole::tools
